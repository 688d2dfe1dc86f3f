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
)

// programs holds every name that this binary answers to. Each function returns the exit status.
var programs = map[string]func() int{
	"etcd":                    etcd,
	"kube-apiserver":          apiServer,
	"kube-controller-manager": controllerManager,
	"kube-scheduler":          scheduler,
	"kubelet":                 kubelet,
	"kube-proxy":              proxy,
	"kubectl":                 kubectl,
	"helm":                    helm,
	"kwok":                    kwok,
	"coredns":                 coreDNS,
	"registry":                imageRegistry,
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

func fail(err error) int {
	fmt.Fprintf(os.Stderr, "%s: %v\n", filepath.Base(os.Args[0]), err)
	return 1
}
