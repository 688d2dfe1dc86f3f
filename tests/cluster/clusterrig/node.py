"""Process 1 of the rig: runs inside its namespaces, starts every daemon and keeps it running.

Started by cluster.py as `python -m clusterrig.node RUN KEEP`. When it dies, the kernel ends everything inside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import binaries, config, settings
from .api import Api
from .settings import Places

# Folders whose names are compiled into kubelet, containerd and CNI: here they are the rig's own.
PRIVATE_FOLDERS = (
    "/run/netns",
    "/run/containerd",
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/var/log/containers",
    "/var/log/pods",
)


class Supervisor:
    """Starts daemons, each with a log of its own, and starts them again when they end."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._commands = config.commands(places)
        self._names: dict[int, str] = {}

    def start(self, *names: str) -> None:
        for name in names:
            with open(self._places.logs / f"{name}.log", "ab") as log:
                process = subprocess.Popen(self._commands[name], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            self._names[process.pid] = name
            process.returncode = 0  # the loop below reaps it; Popen shall not warn

    def stop(self, name: str) -> None:
        pid = next(pid for pid, known in self._names.items() if known == name)
        del self._names[pid]
        os.kill(pid, 15)
        os.waitpid(pid, 0)

    def check(self) -> None:
        """Raises SystemExit when a daemon has ended, with what it said last."""
        for pid, name in self._names.items():
            if os.waitpid(pid, os.WNOHANG)[0]:
                said = (self._places.logs / f"{name}.log").read_text(errors="replace").splitlines()[:20]
                raise SystemExit("\n".join([f"{name} ended at once:", *said]))

    def run_for_ever(self) -> None:
        while True:
            pid, status = os.wait()  # orphans of containers come by here too
            if name := self._names.pop(pid, None):
                note(f"{name} ended ({os.waitstatus_to_exitcode(status)}); starting it again")
                time.sleep(0.5)
                self.start(name)


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout.strip()}")
    return done.stdout


def wait_for(
    what: str, ready: Callable[[], bool], seconds: float = 60, check: Callable[[], None] = lambda: None
) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if ready():
                note(what)
                return
        except (OSError, RuntimeError):
            pass
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def isolate() -> None:
    """Own mounts and own network; the cable to the machine is plugged in from outside, by cluster.py."""
    run("mount", "--make-rprivate", "/")
    for folder in PRIVATE_FOLDERS:
        run("mount", "-t", "tmpfs", "tmpfs", folder)
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", settings.BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{settings.NODE_IP}/24", "dev", settings.BRIDGE)
    run("ip", "link", "set", settings.BRIDGE, "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    wait_for("the cable is there", lambda: Path("/sys/class/net", settings.RIG_INTERFACE).exists() or _cable())
    run("ip", "addr", "add", f"{settings.LINK_IP}/{settings.LINK_PREFIX}", "dev", settings.RIG_INTERFACE)
    run("ip", "link", "set", settings.RIG_INTERFACE, "up")
    run("ip", "route", "add", "default", "via", settings.HOST_IP)


def _cable() -> bool:
    """/sys may still be the machine's; `ip` asks the kernel."""
    return bool(run("ip", "link", "show", settings.RIG_INTERFACE))


def start_containerd(daemons: Supervisor, places: Places) -> None:
    """Starts it with the images of the last time, but without that time's containers."""

    def ctr(*args: str) -> str:
        return run("ctr", "--namespace", "k8s.io", *args)

    def listening() -> bool:
        return bool(ctr("version"))

    daemons.start("containerd")
    wait_for("containerd answers", listening)
    if dead := ctr("containers", "ls", "--quiet").split():
        ctr("containers", "rm", *dead)
        daemons.stop("containerd")  # it has read them already
        daemons.start("containerd")
        wait_for(f"containerd has forgotten {len(dead)} containers", listening)
    if settings.TOOLBOX_IMAGE not in ctr("images", "ls", "--quiet").split():
        ctr("images", "import", str(places.run / "toolbox.tar"))


def main() -> None:
    run_folder, keep = map(Path, sys.argv[1:])
    places = Places(run=run_folder, keep=keep, bin=run_folder / "bin")
    os.environ["PATH"] = f"{places.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    isolate()
    runc = binaries.which("runc")
    assert runc
    config.write_all(places, binaries.cni_folder(), runc)
    (places.run / "kwok-stages.yaml").write_text(run("rig-kwok-stages"))
    daemons = Supervisor(places)
    daemons.start("etcd", "registry")
    run(
        "rig-pki",
        f"--dir={places.pki}",
        f"--node-name={settings.NODE_NAME}",
        f"--node-ip={settings.NODE_IP}",
        f"--service-ip={settings.SERVICE_IP}",
    )
    daemons.start("kube-apiserver")
    config.write_kubeconfigs(places)
    start_containerd(daemons, places)
    api = Api(places)
    wait_for("the API server is ready", lambda: api.has("/readyz"), check=daemons.check)
    # Not before: the controller manager ends when the roles of the bootstrap are not there yet.
    daemons.start(
        "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns", "kwok", "rig-provisioner"
    )
    note("all daemons are started")
    daemons.run_for_ever()


if __name__ == "__main__":
    try:
        main()
    except (Exception, SystemExit) as error:
        note(f"GAVE UP: {error}")
        sys.exit(1)
