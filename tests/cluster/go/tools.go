package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
	"github.com/spf13/pflag"
	helmcmd "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
	nodefast "sigs.k8s.io/kwok/kustomize/stage/node/fast"
	nodelease "sigs.k8s.io/kwok/kustomize/stage/node/heartbeat-with-lease"
	podfast "sigs.k8s.io/kwok/kustomize/stage/pod/fast"
	"sigs.k8s.io/kwok/pkg/config"
	kwokcmd "sigs.k8s.io/kwok/pkg/kwok/cmd"
	"sigs.k8s.io/kwok/pkg/log"
	"sigs.k8s.io/kwok/pkg/utils/signals"
)

func helm() int {
	kube.ManagedFieldsManager = "helm" // else it would be taken from argv[0], which may be a path
	command, err := helmcmd.NewRootCmd(os.Stdout, os.Args[1:], helmcmd.SetupLogging)
	if err != nil {
		return fail(err)
	}
	if err := command.Execute(); err != nil { // cobra has printed it
		if withCode, ok := errors.AsType[helmcmd.CommandError](err); ok {
			return withCode.ExitCode
		}
		return 1
	}
	return 0
}

// kwok plays the kubelet of fake nodes: it renews their leases and moves their pods through the stages.
func kwok() int {
	flags := pflag.NewFlagSet("global", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.Usage = func() {}
	ctx, _ := log.InitFlags(signals.SetupSignalContext(), flags)
	ctx, err := config.InitFlags(ctx, flags)
	if err != nil {
		return fail(err)
	}
	command := kwokcmd.NewCommand(ctx)
	command.PersistentFlags().AddFlagSet(flags)
	if err := command.ExecuteContext(ctx); err != nil {
		return fail(err)
	}
	return 0
}

// kwokStages prints the stages that kwok is to be configured with; it has no default ones when nodes have leases.
func kwokStages() int {
	for _, stage := range []string{
		nodefast.DefaultNodeInit, nodelease.DefaultNodeHeartbeatWithLease,
		podfast.DefaultPodReady, podfast.DefaultPodComplete, podfast.DefaultPodDelete,
	} {
		fmt.Printf("---\n%s\n", stage)
	}
	return 0
}

func coreDNS() int {
	// The order in which plugins see a query; only these are linked in.
	dnsserver.Directives = []string{"bind", "ready", "errors", "log", "cache", "kubernetes", "template"}
	coremain.Run()
	return 0
}

func imageRegistry() int {
	if err := registry.RootCmd.Execute(); err != nil {
		return 1
	}
	return 0
}
