"""Specs that ask for more privileges than the restricted Pod Security Standard gives, each by one way."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

HARDENED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_ENGINE = "/spec/containers/0"


def _add(path: str, value: Any) -> Json:
    return {"podPatches": [{"op": "add", "path": path, "value": value}]}


def _remove(path: str) -> Json:
    return {"podPatches": [{"op": "remove", "path": path}]}


def _volume(**source: Any) -> Json:
    return {"volumes": [{"name": "extra", **source}]}


# Name: the spec, and where the refusal begins.
ESCALATIONS: dict[str, tuple[Json, str]] = {
    "privileged": (_add(f"{_ENGINE}/securityContext/privileged", True), f"{_ENGINE}/securityContext/privileged"),
    "escalation": (
        _add(f"{_ENGINE}/securityContext/allowPrivilegeEscalation", True),
        f"{_ENGINE}/securityContext/allowPrivilegeEscalation",
    ),
    "capability": (
        _add(f"{_ENGINE}/securityContext/capabilities/add", ["SYS_ADMIN"]),
        f"{_ENGINE}/securityContext/capabilities/add",
    ),
    "capabilities kept": (
        _add(f"{_ENGINE}/securityContext/capabilities/drop", []),
        f"{_ENGINE}/securityContext/capabilities/drop",
    ),
    "no context": (_remove(f"{_ENGINE}/securityContext"), f"{_ENGINE}/securityContext/allowPrivilegeEscalation"),
    "root": (_add(f"{_ENGINE}/securityContext/runAsUser", 0), f"{_ENGINE}/securityContext/runAsUser"),
    "pod's root": (_add("/spec/securityContext/runAsUser", 0), "/spec/securityContext/runAsUser"),
    "maybe root": (
        _remove("/spec/securityContext/runAsNonRoot"),
        "/spec/initContainers/0/securityContext/runAsNonRoot",
    ),
    "root allowed": (_add("/spec/securityContext/runAsNonRoot", False), "/spec/securityContext/runAsNonRoot"),
    "root allowed in fetch": (
        _add("/spec/initContainers/0/securityContext/runAsNonRoot", False),
        "/spec/initContainers/0/securityContext/runAsNonRoot",
    ),
    "root by null": (
        {
            "podPatches": [
                *_remove("/spec/securityContext/runAsNonRoot")["podPatches"],
                *_add("/spec/initContainers/0/securityContext/runAsNonRoot", True)["podPatches"],
                *_add(f"{_ENGINE}/securityContext", {**HARDENED, "runAsNonRoot": None})["podPatches"],
            ]
        },
        f"{_ENGINE}/securityContext/runAsNonRoot",
    ),
    "procMount": (
        _add(f"{_ENGINE}/securityContext/procMount", "Unmasked"),
        f"{_ENGINE}/securityContext/procMount",
    ),
    "seccomp": (
        _add("/spec/securityContext/seccompProfile", {"type": "Unconfined"}),
        "/spec/securityContext/seccompProfile/type",
    ),
    "no seccomp": (
        _remove("/spec/securityContext/seccompProfile"),
        "/spec/initContainers/0/securityContext/seccompProfile",
    ),
    "apparmor": (
        _add("/spec/securityContext/appArmorProfile", {"type": "Unconfined"}),
        "/spec/securityContext/appArmorProfile/type",
    ),
    "apparmor by annotation": (
        {"podAnnotations": {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}},
        "/metadata/annotations",
    ),
    "selinux": (
        _add("/spec/securityContext/seLinuxOptions", {"type": "spc_t"}),
        "/spec/securityContext/seLinuxOptions/type",
    ),
    "sysctl": (
        _add("/spec/securityContext/sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
        "/spec/securityContext/sysctls/0",
    ),
    "hostNetwork": (_add("/spec/hostNetwork", True), "/spec/hostNetwork"),
    "hostPID": (_add("/spec/hostPID", True), "/spec/hostPID"),
    "hostIPC": (_add("/spec/hostIPC", True), "/spec/hostIPC"),
    "hostPort": (_add(f"{_ENGINE}/ports/0/hostPort", 8000), f"{_ENGINE}/ports/0/hostPort"),
    "hostPath": (_volume(hostPath={"path": "/"}), "/spec/volumes/3/hostPath"),
    "hostPath by patch": (
        _add("/spec/volumes/-", {"name": "host", "hostPath": {"path": "/"}}),
        "/spec/volumes/3/hostPath",
    ),
    "nfs": (_volume(nfs={"server": "s", "path": "/"}), "/spec/volumes/3/nfs"),
    "probe of another host": (_add(f"{_ENGINE}/livenessProbe/httpGet/host", "10.0.0.1"), f"{_ENGINE}/livenessProbe"),
    "bare sidecar": (
        _add("/spec/containers/-", {"name": "more", "image": "more:1"}),
        "/spec/containers/1/securityContext/allowPrivilegeEscalation",
    ),
    "account": (_add("/spec/serviceAccountName", "ci-admin"), "/spec/serviceAccountName"),
    "account by its old name": (_add("/spec/serviceAccount", "ci-admin"), "/spec/serviceAccount"),
    "default account": (_remove("/spec/serviceAccountName"), "/spec/serviceAccountName"),
    "token": (_add("/spec/automountServiceAccountToken", True), "/spec/automountServiceAccountToken"),
    "token by default": (_remove("/spec/automountServiceAccountToken"), "/spec/automountServiceAccountToken"),
    "projected token": (
        _volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]}),
        "/spec/volumes/3/projected/sources/0/serviceAccountToken",
    ),
    "moved into place": (
        {
            "podPatches": [
                {"op": "add", "path": "/metadata/x", "value": {"hostNetwork": True}},
                {"op": "move", "from": "/metadata/x/hostNetwork", "path": "/spec/hostNetwork"},
                {"op": "remove", "path": "/metadata/x"},
            ]
        },
        "/spec/hostNetwork",
    ),
}
# What Pod Security Admission leaves alone: whose name a pod bears is not its matter.
OF_ACCOUNTS = frozenset(name for name in ESCALATIONS if "account" in name or "token" in name)
