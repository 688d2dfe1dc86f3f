package main

import (
	"context"
	"os"
	_ "time/tzdata" // CronJobs with a time zone

	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectlcmd "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserverapp "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanagerapp "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxyapp "k8s.io/kubernetes/cmd/kube-proxy/app"
	schedulerapp "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeletapp "k8s.io/kubernetes/cmd/kubelet/app"
)

func etcd() int {
	etcdmain.Main(os.Args)
	return 0
}

func apiServer() int         { return cli.Run(apiserverapp.NewAPIServerCommand()) }
func controllerManager() int { return cli.Run(controllermanagerapp.NewControllerManagerCommand()) }
func scheduler() int         { return cli.Run(schedulerapp.NewSchedulerCommand()) }
func proxy() int             { return cli.Run(proxyapp.NewProxyCommand()) }
func kubelet() int           { return cli.Run(kubeletapp.NewKubeletCommand(context.Background())) }

func kubectl() int {
	// Verbosity must be known while the command tree (plugins, .kuberc) is made, before flags are parsed.
	_, _ = logs.GlogSetter(kubectlcmd.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectlcmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
	return 0
}
