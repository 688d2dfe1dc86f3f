"""Checks a pod template against the restricted Pod Security Standard, and for a service account without a token.

podPatches, volumes and podAnnotations reach the template as users write them, and pods are created with the operator's
rights: without this check, all who may write LLMDeployments could create privileged pods in namespaces without Pod
Security Admission. The whole template is checked, so no combination of patches gets around it.
https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = Any

_VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_SECCOMP = ("RuntimeDefault", "Localhost")
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.ping_group_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_wmem",
    }
)
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def violations(template: Json, service_account: str, cache: Json = None, folder: str = "") -> Iterator[str]:
    """Find violations in `template`: JSON pointers, each with the requirement there. `cache`: a volume that is allowed
    as it is, whatever its kind; of one on the node, pods may mount only `folder`."""
    pod = _map(template.get("spec"))
    yield from _identity(pod, service_account)
    yield from _volumes(pod, cache)
    context = _map(pod.get("securityContext"))
    for index, sysctl in enumerate(_items(context.get("sysctls"))):
        if sysctl.get("name") not in _SYSCTLS:
            yield f"/spec/securityContext/sysctls/{index}: {sysctl.get('name')} is not a safe sysctl"
    yield from _context(context, "/spec/securityContext")
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for index, container in enumerate(_items(pod.get(kind))):
            yield from _container(container, context, f"/spec/{kind}/{index}")
            if "hostPath" in _map(cache):
                yield from _mounts(container, folder, f"/spec/{kind}/{index}")
    for name, value in _map(_map(template.get("metadata")).get("annotations")).items():
        if str(name).startswith(_APPARMOR) and not str(value).startswith(("runtime/default", "localhost/")):
            yield f"/metadata/annotations: {name} must be runtime/default or localhost/..."


def _identity(pod: Json, service_account: str) -> Iterator[str]:
    """Host namespaces, and the service account."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"/spec/{field} must not be true"
    for field in ("serviceAccountName", "serviceAccount"):
        if pod.get(field, service_account) != service_account:
            yield f"/spec/{field} must stay {service_account}"
    if "serviceAccountName" not in pod:
        yield f"/spec/serviceAccountName must stay {service_account}"
    if pod.get("automountServiceAccountToken") is not False:
        yield "/spec/automountServiceAccountToken must stay false"


def _volumes(pod: Json, cache: Json) -> Iterator[str]:
    for index, volume in enumerate(_items(pod.get("volumes"))):
        where = f"/spec/volumes/{index}"
        for kind in volume:
            if kind != "name" and kind not in _VOLUMES and volume != cache:
                yield f"{where}/{kind} is not allowed; use {', '.join(sorted(_VOLUMES))}"
        for number, source in enumerate(_items(_map(volume.get("projected")).get("sources"))):
            if "serviceAccountToken" in source:
                yield f"{where}/projected/sources/{number}/serviceAccountToken is not allowed"


def _mounts(container: Json, folder: str, path: str) -> Iterator[str]:
    """The folder of a node is everybody's: a pod gets the part of its namespace."""
    for index, mount in enumerate(_items(container.get("volumeMounts"))):
        part = mount.get("subPath", "")
        own = (
            isinstance(part, str) and (part == folder or part.startswith(f"{folder}/")) and ".." not in part.split("/")
        )
        if mount.get("name") == "cache" and (not own or "subPathExpr" in mount):
            yield f"{path}/volumeMounts/{index}/subPath must be {folder}, or a folder in it"


def _context(context: Json, where: str) -> Iterator[str]:
    """Fields that pods and containers have in common."""
    if context.get("runAsNonRoot") is False:
        yield f"{where}/runAsNonRoot must be true"
    if context.get("runAsUser") == 0:
        yield f"{where}/runAsUser must not be 0"
    if "seccompProfile" in context and _map(context["seccompProfile"]).get("type") not in _SECCOMP:
        yield f"{where}/seccompProfile/type must be {' or '.join(_SECCOMP)}"
    if _map(context.get("appArmorProfile")).get("type", "RuntimeDefault") not in _SECCOMP:
        yield f"{where}/appArmorProfile/type must be {' or '.join(_SECCOMP)}"
    selinux = _map(context.get("seLinuxOptions"))
    if selinux.get("type", "") not in _SELINUX_TYPES:
        yield f"{where}/seLinuxOptions/type must be one of container_t, container_init_t, container_kvm_t"
    for field in ("user", "role"):
        if selinux.get(field):
            yield f"{where}/seLinuxOptions/{field} must not be set"
    if _map(context.get("windowsOptions")).get("hostProcess"):
        yield f"{where}/windowsOptions/hostProcess must not be true"


def _container(container: Json, pod: Json, path: str) -> Iterator[str]:
    context, where = _map(container.get("securityContext")), f"{path}/securityContext"
    yield from _context(context, where)
    if context.get("privileged"):
        yield f"{where}/privileged must not be true"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{where}/allowPrivilegeEscalation must be false"
    if context.get("procMount", "Default") != "Default":
        yield f"{where}/procMount must be Default"
    capabilities = _map(context.get("capabilities"))
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"{where}/capabilities/drop must hold ALL"
    if added := [name for name in capabilities.get("add") or () if name != "NET_BIND_SERVICE"]:
        yield f"{where}/capabilities/add must not hold {added[0]}"
    if context.get("runAsNonRoot") is None and pod.get("runAsNonRoot") is not True:
        yield f"{where}/runAsNonRoot must be true, here or in /spec/securityContext"
    if "seccompProfile" not in context and "seccompProfile" not in pod:
        yield f"{where}/seccompProfile must be set, here or in /spec/securityContext"
    yield from _network(container, path)


def _network(container: Json, path: str) -> Iterator[str]:
    """Host ports, and hosts that probes and hooks connect to."""
    for index, port in enumerate(_items(container.get("ports"))):
        if port.get("hostPort"):
            yield f"{path}/ports/{index}/hostPort is not allowed"
    hooks = {f"lifecycle/{name}": hook for name, hook in _map(container.get("lifecycle")).items()}
    probes = {name: container.get(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    for name, action in {**hooks, **probes}.items():
        for way in ("httpGet", "tcpSocket"):
            if _map(_map(action).get(way)).get("host"):
                yield f"{path}/{name}/{way}/host is not allowed"


def _map(value: Json) -> dict[str, Any]:
    """Values of a wrong type are left to the API server to reject."""
    return value if isinstance(value, dict) else {}


def _items(value: Json) -> list[dict[str, Any]]:
    return [_map(item) for item in value] if isinstance(value, list) else []
