// Command octavo-rig is everything a test cluster runs, in one binary. It acts as the program whose name it was
// started by (a symbolic link): `etcd`, `kube-apiserver`, `kubelet`, `kubectl`, `helm`, ...
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// programs holds every name that this binary answers to. Each function returns the exit status.
var programs = map[string]func() int{
	"etcd":                    etcd,
	"kube-apiserver":          apiServer,
	"kube-controller-manager": controllerManager,
	"kube-scheduler":          scheduler,
	"kubelet":                 kubelet,
	"kube-proxy":              proxy,
	"kubectl":                 alone(kubectl),
	"helm":                    alone(helm),
	"kwok":                    alone(kwok),
	"coredns":                 coreDNS,
	"registry":                alone(imageRegistry),
	"rig-provisioner":         provisioner,
	"rig-pki":                 pki,
	"rig-kwok-stages":         kwokStages,
}

func main() {
	name := filepath.Base(os.Args[0])
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s: start me by a link of one of these names: %s\n",
			name, strings.Join(slices.Sorted(maps.Keys(programs)), " "))
		os.Exit(2)
	}
	os.Exit(program())
}

// alone hides the global flags that Kubernetes' packages register when they are linked (`--version` for one), which
// cobra would add to every command of a program that is not theirs.
func alone(program func() int) func() int {
	return func() int {
		pflag.CommandLine = pflag.NewFlagSet("", pflag.ContinueOnError)
		return program()
	}
}

func fail(err error) int {
	fmt.Fprintf(os.Stderr, "%s: %v\n", filepath.Base(os.Args[0]), err)
	return 1
}
