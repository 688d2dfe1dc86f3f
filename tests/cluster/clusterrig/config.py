"""The configuration of every daemon of the rig, as data. JSON is YAML, so the standard library writes it all."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from . import settings
from .settings import API_SERVER, NODE_IP, NODE_NAME, POD_CIDR, SERVICE_CIDR, Places


def write_all(places: Places, cni_folder: Path, runc: str) -> None:
    """Writes all files below `places.run` but the keys (rig-pki) and the kubeconfigs, which hold keys."""
    _write(places.run / "containerd/config.toml", _containerd(places, cni_folder, runc))
    hosts = f'server = "http://{settings.REGISTRY}"\n[host."http://{settings.REGISTRY}"]\n'
    _write(places.run / "containerd/certs.d/_default/hosts.toml", hosts + '  capabilities = ["pull", "resolve"]\n')
    _write(places.run / "containerd/net.d/10-rig.conflist", json.dumps(_cni(places)))
    _write(places.run / "registry.yaml", json.dumps(_registry(places)))
    _write(places.run / "kubelet.yaml", json.dumps(_kubelet(places)))
    _write(places.run / "proxy.yaml", json.dumps(_proxy(places)))
    _write(places.run / "audit-policy.yaml", json.dumps(AUDIT_POLICY))
    _write(places.run / "Corefile", _corefile(places))


def write_kubeconfigs(places: Places) -> None:
    """One for each daemon in pki/NAME.kubeconfig, and the administrator's. Keys are inside: a file can be moved."""
    authority = _inline(places.pki / "ca.crt")
    users = ("kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "admin")
    for user in users:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rig", "cluster": {"server": API_SERVER, "certificate-authority-data": authority}}],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _inline(places.pki / f"{user}.crt"),
                        "client-key-data": _inline(places.pki / f"{user}.key"),
                    },
                }
            ],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": user}}],
            "current-context": "rig",
        }
        path = places.kubeconfig if user == "admin" else places.pki / f"{user}.kubeconfig"
        _write(path, json.dumps(config, indent=1))
        path.chmod(0o600)


def commands(places: Places) -> dict[str, list[str]]:
    """Command line of every daemon by its name. They are started in the order that node.py says."""
    run, pki = places.run, places.pki

    def kubeconfig(name: str) -> str:
        return str(pki / f"{name}.kubeconfig")

    def controller(name: str) -> list[str]:
        """Flags that controller manager and scheduler share."""
        config = kubeconfig(name)
        return [
            name,
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--kube-api-qps=300",
            "--kube-api-burst=600",  # a thousand deployments at once shall not queue here
        ]

    return {
        "etcd": ["etcd", f"--data-dir={run}/etcd", "--log-level=warn", "--unsafe-no-fsync"],
        "containerd": ["containerd", "--config", f"{run}/containerd/config.toml"],
        "registry": ["registry", "serve", f"{run}/registry.yaml"],
        "kube-apiserver": [
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--bind-address={NODE_IP}",
            f"--advertise-address={NODE_IP}",
            "--secure-port=6443",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            # Aggregated APIs (external.metrics.k8s.io and the like) know by these who asks.
            f"--requestheader-client-ca-file={pki}/front-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-client.crt",
            f"--proxy-client-key-file={pki}/front-client.key",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--audit-policy-file={run}/audit-policy.yaml",
            f"--audit-log-path={places.audit_log}",
            "--max-requests-inflight=2000",
            "--max-mutating-requests-inflight=1000",
        ],
        "kube-controller-manager": [
            *controller("kube-controller-manager"),
            "--use-service-account-credentials",
            f"--root-ca-file={pki}/ca.crt",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            "--pvclaimbinder-sync-period=1s",
            "--horizontal-pod-autoscaler-sync-period=2s",
            "--node-monitor-grace-period=12s",
        ],
        "kube-scheduler": controller("kube-scheduler"),
        "kubelet": [
            "kubelet",
            f"--config={run}/kubelet.yaml",
            f"--kubeconfig={kubeconfig('kubelet')}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NODE_IP}",
            f"--root-dir={run}/kubelet",
            f"--cert-dir={run}/kubelet-pki",
            "--node-labels=type=real",
        ],
        "kube-proxy": ["kube-proxy", f"--config={run}/proxy.yaml"],
        "coredns": ["coredns", "-conf", f"{run}/Corefile"],
        "kwok": [
            "kwok",
            f"--kubeconfig={places.kubeconfig}",
            "--manage-all-nodes=false",
            "--manage-nodes-with-label-selector=type=kwok",
            "--node-lease-duration-seconds=40",
            "--server-address=127.0.0.1:10247",
            f"--config={run}/kwok-stages.yaml",
        ],
        "rig-provisioner": [
            "rig-provisioner",
            f"--kubeconfig={places.kubeconfig}",
            f"--root={run}/volumes",
        ],
    }


# Every write, by whom and to what, without bodies. Reads would drown them.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "Metadata"},
    ],
}

STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "rig.octavo.dev/local",
    "volumeBindingMode": "WaitForFirstConsumer",
    "reclaimPolicy": "Delete",
}


def fake_node(name: str, *, gpus: int, product: str) -> dict[str, Any]:
    """A node that kwok keeps alive: pods are scheduled to it by the real rules and then only seem to run.

    Tainted as GPU pools are, so that only pods that tolerate `nvidia.com/gpu` go there.
    """
    capacity = {"cpu": "96", "memory": "1Ti", "pods": "1000", "ephemeral-storage": "1Ti", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {
                "type": "kwok",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "nvidia.com/gpu.present": "true",
                "nvidia.com/gpu.product": product,
                "nvidia.com/gpu.count": str(gpus),
            },
        },
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def _containerd(places: Places, cni_folder: Path, runc: str) -> str:
    # Version 2 is read by Debian's containerd 1.6 and by every later one.
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE (a rig inside a container) no pod would start otherwise.
    # discard_unpacked_layers: the registry has them already; a 5 GB image need not lie here twice.
    own = "-own" if (places.run / "bin/containerd").exists() else ""  # an older one does not read a newer one's store
    return f"""version = 2
root = "{places.keep}/containerd{own}"
state = "{places.run}/containerd/state"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.opt",
]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{settings.TOOLBOX_IMAGE}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_folder}"
    conf_dir = "{places.run}/containerd/net.d"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{places.run}/containerd/certs.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    discard_unpacked_layers = true
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
"""


def _cni(places: Places) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": f"{places.run}/cni",
        "ranges": [[{"subnet": POD_CIDR, "gateway": NODE_IP}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": settings.BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    return {"cniVersion": "1.0.0", "name": "rig", "plugins": [bridge]}


def _registry(places: Places) -> dict[str, Any]:
    return {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": f"{places.keep}/registry"}, "delete": {"enabled": True}},
        "http": {"addr": settings.REGISTRY, "secret": "one registry, nothing to share"},
    }


def _kubelet(places: Places) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{places.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{places.pki}/kubelet-serving.crt",
        "tlsPrivateKeyFile": f"{places.pki}/kubelet-serving.key",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.CGROUP}",
        "failCgroupV1": False,  # the default refuses machines with control groups of version 1
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDomain": "cluster.local",
        "clusterDNS": [NODE_IP],
        "resolvConf": "",
        "serializeImagePulls": False,
        "maxPods": 250,
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "4s",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,  # never remove images: they are meant to be there tomorrow
        "volumePluginDir": f"{places.run}/volume-plugins",
    }


def _proxy(places: Places) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{places.pki}/kube-proxy.kubeconfig"},
        "hostnameOverride": NODE_NAME,
        "bindAddress": NODE_IP,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "clusterCIDR": POD_CIDR,
        # Zero: leave the machine's connection tracking as it is.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _corefile(places: Places) -> str:
    # The template answers for names outside the cluster, which would end in SERVFAIL and a slow retry.
    return f""".:53 {{
  bind {NODE_IP}
  errors
  ready {NODE_IP}:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {places.kubeconfig} rig
    ttl 1
  }}
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""


def _inline(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
