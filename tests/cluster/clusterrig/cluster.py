"""Bringing the rig up and down, seen from the machine: namespaces, the cable to them, waiting, and leaving no trace."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import binaries, config, images, settings
from .api import Api, ApiError
from .node import PRIVATE_FOLDERS
from .progress import RigError, say, step
from .settings import Places, default_places

NODE_PATH = f"/api/v1/nodes/{settings.NODE_NAME}"


def is_up() -> bool:
    record = _record()
    return record is not None and _alive(record)


def require_up() -> dict[str, Any]:
    """The record of the rig that is up. Raises RigError when there is none."""
    record = _record()
    if record is None or not _alive(record):
        raise RigError("no rig is up: run `rig.py up` first")
    return record


def require_root() -> None:
    if os.geteuid() != 0:
        raise RigError(
            "the test cluster needs root (it makes namespaces, mounts and a bridge, all gone after `rig.py down`).\n"
            "  Either   sudo " + " ".join([sys.executable, *sys.argv]) + "\n"
            "  or       use a cluster of yours: OCTAVO_E2E_KUBECONFIG=~/.kube/config for the end-to-end tests,\n"
            "           KUBE_CONTEXT=name for the demo\n"
            "  or       leave Kubernetes out: `make serve` runs the engine alone."
        )


def up() -> Places:
    """Starts the rig; one that is up already is left as it is. Raises RigError."""
    require_root()
    places = default_places()
    if record := _record():
        if _alive(record):
            if record["run"] == str(places.run):
                say("already up")
                return places
            raise RigError(
                f"a rig of {record['run']} is up on this machine, and there can be one; `rig.py down` there first"
            )
        down()  # what a crash has left
    binaries.require_machine_commands(images=False)
    programs = binaries.programs()
    _refuse_taken_network()
    start = time.monotonic()
    _prepare(places, programs)
    record = _start(places)
    try:
        _plug_cable(record["init"])
        with step("Kubernetes is ready"):
            _wait_until_ready(places, record)
    except BaseException:
        _end(record)
        _remove_tree(places.run, but="logs")
        say(f"its logs are in {places.logs}")
        raise
    if "SUDO_UID" in os.environ:  # who asked shall be able to read it
        os.chown(places.kubeconfig, int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"]))
    say(f"up in {time.monotonic() - start:.1f} s; export KUBECONFIG={places.kubeconfig}")
    return places


def down(*, keep_logs: bool = False) -> None:
    """Ends the rig and removes all but the cache. Does nothing when there is none."""
    record = _record()
    if record is None:
        say("no rig is up")
        return
    require_root()
    with step("down"):
        _end(record)
        _remove_tree(Path(record["run"]), but="logs" if keep_logs else None)


def enter(command: list[str]) -> list[str]:
    """The command line that runs `command` inside the rig's namespaces, in the present folder."""
    record = require_up()
    namespaces = ["-m", "-n", "-p", "-i", f"--wd={Path.cwd()}"]
    path = f"PATH={record['run']}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return ["nsenter", f"--target={record['init']}", *namespaces, "env", path, *command]


def daemon_pid(name: str) -> int:
    """The process of a daemon (`kubelet`, ...) as this machine numbers it, for tests that send signals."""
    for pid in _children(require_up()["init"]):
        if Path(_argv(pid)[0]).name == name:
            return pid
    known = ", ".join(config.commands(default_places()))
    raise RigError(f"no daemon {name!r} is running in the rig; there are: {known}")


def set_gpus(places: Places, count: int) -> None:
    """Lets the real node claim `count` GPUs. Scheduler and kubelet honour the number; no device is there."""
    require_up()
    patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
    Api(places).call("PATCH", f"{NODE_PATH}/status", patch, "application/json-patch+json")


def add_fake_nodes(places: Places, count: int, *, gpus: int, product: str, prefix: str = "gpu-node") -> list[str]:
    """Adds nodes that kwok plays; returns their names. Existing ones of the same name stay."""
    require_up()
    api, names = Api(places), [f"{prefix}-{number}" for number in range(count)]
    for name in names:
        try:
            api.call("POST", "/api/v1/nodes", config.fake_node(name, gpus=gpus, product=product))
        except ApiError as error:
            if error.status != 409:
                raise
    for name in names:
        _wait(f"node {name} is ready", functools.partial(_node_ready, api, f"/api/v1/nodes/{name}"), 30)
    return names


# ---------------------------------------------------------------------------------------------------------------- up


def _prepare(places: Places, programs: dict[str, Path]) -> None:
    _remove_tree(places.run)
    for folder in (places.run / "bin", places.logs, places.pki, places.run / "volumes", places.keep):
        folder.mkdir(parents=True, exist_ok=True)
    places.run.chmod(0o755)
    for name, path in programs.items():
        (places.run / "bin" / name).symlink_to(path)
    toolbox = {"toolbox": programs["toolbox"]}
    images.pack(places.run / "toolbox.tar", settings.TOOLBOX_IMAGE, toolbox, entrypoint=["/toolbox"], cmd=["pause"])
    for hierarchy in _cgroup_hierarchies():
        if (hierarchy / "cgroup.controllers").exists():  # version 2: the kubelet wants every controller below its root
            for controller in (hierarchy / "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):
                    (hierarchy / "cgroup.subtree_control").write_text(f"+{controller}")
        (hierarchy / settings.CGROUP).mkdir(exist_ok=True)


def _start(places: Places) -> dict[str, Any]:
    made = _missing_folders()
    for folder in PRIVATE_FOLDERS:
        Path(folder).mkdir(parents=True, exist_ok=True)
    log = open(places.logs / "rig.log", "ab")  # noqa: SIM115 - the child's
    command = ["unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, "-m", "clusterrig.node", str(places.run), str(places.keep)]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    log.close()
    deadline = time.monotonic() + 5
    while not (children := _children(process.pid)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RigError(f"cannot make namespaces: {(places.logs / 'rig.log').read_text().strip()}")
        time.sleep(0.01)
    record = {"init": children[0], "started": _start_time(children[0]), "run": str(places.run), "made": made}
    settings.RECORD.write_text(json.dumps(record))
    return record


def _missing_folders() -> list[str]:
    """Folders that the rig is about to make on this machine, parents first, to be removed when it goes."""
    missing: list[str] = []
    for folder in map(Path, PRIVATE_FOLDERS):
        missing += [str(path) for path in (*reversed(folder.parents), folder) if not path.exists()]
    return list(dict.fromkeys(missing))


def _plug_cable(init: int) -> None:
    def ip(*args: str) -> None:
        done = subprocess.run([binaries.which("ip") or "ip", *args], capture_output=True, text=True)
        if done.returncode:
            raise RigError(f"ip {' '.join(args)}: {done.stderr.strip()}")

    host, rig = settings.HOST_INTERFACE, settings.RIG_INTERFACE
    ip("link", "add", host, "type", "veth", "peer", "name", rig, "netns", str(init))
    ip("addr", "add", f"{settings.HOST_IP}/{settings.LINK_PREFIX}", "dev", host)
    ip("link", "set", host, "up")
    for network in (settings.POD_CIDR, settings.SERVICE_CIDR):
        ip("route", "add", network, "via", settings.LINK_IP)


def _refuse_taken_network() -> None:
    ours = [ipaddress.ip_network(cidr) for cidr in (settings.POD_CIDR, settings.SERVICE_CIDR, f"{settings.HOST_IP}/32")]
    listing = subprocess.run([binaries.which("ip") or "ip", "-json", "route"], capture_output=True, text=True).stdout
    for route in json.loads(listing or "[]"):
        if route["dst"] != "default" and any(ipaddress.ip_network(route["dst"]).overlaps(network) for network in ours):
            raise RigError(
                f"this machine has a route to {route['dst']} ({route.get('dev')}), which the rig's {ours[0]} and "
                f"{ours[1]} would hide; give the rig other addresses: OCTAVO_RIG_NETWORK=10.214 (the first two octets)"
            )


def _wait_until_ready(places: Places, record: dict[str, Any]) -> None:
    def inside_is_alive() -> None:
        if not _alive(record):
            raise RigError((places.logs / "rig.log").read_text().strip()[-1500:])

    _wait("keys are made", (places.run / "kubeconfig").exists, 30, inside_is_alive)
    api = Api(places)
    _wait("the API server is ready", lambda: api.has("/readyz"), 60, inside_is_alive)
    api.apply("/apis/storage.k8s.io/v1/storageclasses/standard", config.STORAGE_CLASS)
    _wait("the node is ready", lambda: _node_ready(api, NODE_PATH), 60, inside_is_alive)
    _wait("DNS answers", lambda: _answers(f"http://{settings.NODE_IP}:8181/ready"), 30, inside_is_alive)
    service_account = "/api/v1/namespaces/default/serviceaccounts/default"  # without it no pod is admitted
    _wait("service accounts are there", lambda: api.has(service_account), 60, inside_is_alive)


def _wait(what: str, ready: Callable[[], bool], seconds: float, check: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        check()
        if time.monotonic() > deadline:
            raise RigError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def _node_ready(api: Api, path: str) -> bool:
    try:
        conditions = api.call("GET", path)["status"].get("conditions", [])
    except ApiError:
        return False
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


# -------------------------------------------------------------------------------------------------------------- down


def _end(record: dict[str, Any]) -> None:
    """Kills process 1 of the namespaces, and with it everything inside; then removes what is not a process."""
    if _alive(record):
        os.kill(record["init"], signal.SIGKILL)
    _wait("the rig's processes are gone", lambda: not _alive(record), 20)
    # Usually it goes with its namespace; asking makes sure that it is gone when this returns.
    ip = binaries.which("ip") or "ip"
    subprocess.run([ip, "link", "delete", settings.HOST_INTERFACE], capture_output=True)
    _wait("its control groups are gone", _remove_cgroups, 20)
    for folder in reversed(record["made"]):
        with contextlib.suppress(OSError):  # not empty: someone else has found a use for it
            os.rmdir(folder)
    settings.RECORD.unlink(missing_ok=True)


def _remove_cgroups() -> bool:
    gone = True
    for hierarchy in _cgroup_hierarchies():
        for folder, _, _ in os.walk(hierarchy / settings.CGROUP, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                gone = False
    return gone


def _cgroup_hierarchies() -> list[Path]:
    """The root of every control-group hierarchy: one with version 2, one a controller with version 1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")]


def _remove_tree(folder: Path, but: str | None = None) -> None:
    """Deletes a run folder, never through a mount: a volume of someone else's could be behind it."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if Path(line.split()[1]).is_relative_to(folder):
            raise RigError(f"{line.split()[1]} is mounted on this machine; unmount it before {folder} is removed")
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == but:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if folder.is_dir() and not but:
        folder.rmdir()


# --------------------------------------------------------------------------------------------------------- processes


def _record() -> dict[str, Any] | None:
    try:
        return dict(json.loads(settings.RECORD.read_text()))
    except FileNotFoundError:
        return None


def _alive(record: dict[str, Any]) -> bool:
    return bool(_start_time(record["init"]) == record["started"])


def _start_time(pid: int) -> str | None:
    """Tells a process from a later one of the same number. None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return [""]
