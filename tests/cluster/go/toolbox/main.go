// Command toolbox is the content of the rig's own images: the pause container, and a small program for pods that test
// the cluster itself. It needs nothing but the kernel.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

const usage = `usage: toolbox pause             wait for SIGTERM and reap orphans
       toolbox serve ADDRESS     answer every HTTP request with the host's name
       toolbox get URL           print what an HTTP GET answers
       toolbox resolve NAME      print the addresses of a name
       toolbox cat FILE          print a file
       toolbox eat MIB           take memory and keep it
       toolbox write FILE TEXT   write a file
`

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "pause":
		pause()
		return nil
	case len(args) == 2 && args[0] == "serve":
		return serve(args[1])
	case len(args) == 2 && args[0] == "get":
		return get(args[1])
	case len(args) == 2 && args[0] == "resolve":
		addresses, err := net.LookupHost(args[1])
		for _, address := range addresses {
			fmt.Println(address)
		}
		return err
	case len(args) == 2 && args[0] == "cat":
		text, err := os.ReadFile(args[1])
		os.Stdout.Write(text)
		return err
	case len(args) == 2 && args[0] == "eat":
		return eat(args[1])
	case len(args) == 3 && args[0] == "write":
		return os.WriteFile(args[1], []byte(args[2]), 0o644)
	}
	return fmt.Errorf("%s", usage)
}

func pause() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

func serve(address string) error {
	go func() { // as pid 1 it must ask for the signal, or the kernel ignores it
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
		<-stop
		os.Exit(0)
	}()
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	return http.ListenAndServe(address, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, name)
	}))
}

func eat(mebibytes string) error {
	size, err := strconv.Atoi(mebibytes)
	if err != nil {
		return err
	}
	memory := make([]byte, size<<20)
	for i := 0; i < len(memory); i += os.Getpagesize() {
		memory[i] = 1 // only pages that were written to count
	}
	pause()
	runtime.KeepAlive(memory)
	return nil
}

func get(url string) error {
	response, err := (&http.Client{Timeout: 5 * time.Second}).Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return err
	}
	if response.StatusCode >= 300 {
		return fmt.Errorf("%s: %s", url, response.Status)
	}
	return nil
}
