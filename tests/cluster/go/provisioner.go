package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
)

// provisioner serves the rig's StorageClass: each claim gets a directory of the machine as a `local` volume. As with
// a cloud disk the directory belongs to root (0755), so that a pod without fsGroup finds out here that it needs one.
func provisioner() int {
	kubeconfig := flag.String("kubeconfig", "", "cluster to serve")
	name := flag.String("name", "rig.octavo.dev/local", "provisioner name, as in StorageClass.provisioner")
	root := flag.String("root", "", "directory that holds the volumes")
	_ = flag.CommandLine.Parse(os.Args[1:])
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return fail(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fail(err)
	}
	ctx := context.Background()
	controller.NewProvisionController(ctx, client, *name, directories{*root}, controller.LeaderElection(false)).Run(ctx)
	return 0
}

type directories struct{ root string }

func (d directories) Provision(
	_ context.Context, options controller.ProvisionOptions,
) (*corev1.PersistentVolume, controller.ProvisioningState, error) {
	if options.SelectedNodeName == "" {
		err := fmt.Errorf("the StorageClass must have volumeBindingMode WaitForFirstConsumer")
		return nil, controller.ProvisioningFinished, err
	}
	path := filepath.Join(d.root, options.PVName)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	onNode := corev1.NodeSelectorRequirement{
		Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn,
		Values: []string{options.SelectedNodeName},
	}
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: options.PVName},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: *options.StorageClass.ReclaimPolicy,
			AccessModes:                   options.PVC.Spec.AccessModes,
			Capacity: corev1.ResourceList{
				corev1.ResourceStorage: options.PVC.Spec.Resources.Requests[corev1.ResourceStorage],
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: path}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{
					{MatchExpressions: []corev1.NodeSelectorRequirement{onNode}},
				},
			}},
		},
	}, controller.ProvisioningFinished, nil
}

func (d directories) Delete(_ context.Context, volume *corev1.PersistentVolume) error {
	return os.RemoveAll(filepath.Join(d.root, volume.Name))
}
