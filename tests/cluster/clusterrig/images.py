"""Images for the rig without Docker and without a registry on the network.

A Dockerfile is built by buildah into a store in the cache. `push` sends the result to the rig's own registry, which
the kubelet pulls from whatever host an image name has; both move only the layers that the other side lacks.
"""

from __future__ import annotations

import collections
import configparser
import hashlib
import io
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from . import binaries, settings
from .progress import RigError, say, step

DEBIAN_SUITE = "bookworm"
DEBIAN_IMAGE = f"docker.io/library/debian:{DEBIAN_SUITE}-slim"


def pack(archive: Path, name: str, files: dict[str, Path], *, entrypoint: list[str], cmd: list[str]) -> None:
    """Writes a one-layer image of `files` (path in the image -> file) as `docker save` would, always the same."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path, source in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = source.stat().st_size, 0o755
            with source.open("rb") as file:
                tar.addfile(member, file)
    image = {
        "architecture": {"aarch64": "arm64"}.get(platform.machine(), "amd64"),
        "os": "linux",
        "created": "2020-01-01T00:00:00Z",
        "config": {"Entrypoint": entrypoint, "Cmd": cmd, "User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
        "history": [{"created": "2020-01-01T00:00:00Z"}],
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for path, content in {
            "layer.tar": layer.getvalue(),
            "config.json": json.dumps(image).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        }.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def build(name: str, context: Path, arguments: list[str]) -> None:
    """Builds the Dockerfile of `context` as image `name`. `arguments` go to `buildah build`."""
    binaries.require_machine_commands(images=True)
    dockerfile = _dockerfile(context, arguments)
    if "debian:" in dockerfile and not any(argument.startswith("BASE=") for argument in arguments):
        debian()
    with step(f"building {name}"), tempfile.TemporaryDirectory(prefix="octavo-rig-") as scratch:
        # chroot: needs no container runtime, works inside a container; the machine's network is the build's.
        _buildah(
            "build",
            "--isolation=chroot",
            "--network=host",
            "--pull=false",
            "--layers",
            *_trust(Path(scratch), dockerfile),
            *arguments,
            "--tag",
            name,
            str(context),
        )


def push(name: str) -> str:
    """Makes an image of the store available to the rig's pods under the same name. Returns its digest (sha256:...)."""
    repository = name.split("/", 1)[1] if re.match(r"[^/]*[.:][^/]*/|localhost/", name) else name
    # zstd: 5 GB of torch cost 61 s of processor to send and 44 s to unpack, against 85 s and 55 s with gzip, and
    # buildah sends nothing uncompressed to a registry. It needs manifests of OCI's format.
    fast = ["--format=oci", "--compression-format=zstd", "--compression-level=1"]
    with step(f"sending {name} to the rig"):
        return _send(name, f"{settings.REGISTRY}/{repository}", "--tls-verify=false", *fast)


def publish(name: str, *, plain_http: bool) -> str:
    """Sends an image of the store to the registry that its name has, in the form that every runtime reads. Returns its
    digest (sha256:...)."""
    with step(f"sending {name}"):
        return _send(name, name, *(["--tls-verify=false"] if plain_http else []))


def _send(name: str, address: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile("r", prefix="octavo-rig-") as digest:
        _buildah("push", f"--digestfile={digest.name}", *options, name, f"docker://{address}")
        return digest.read().strip()


def debian() -> None:
    """Puts Debian's base system into the store under the name that its image has elsewhere, unless it is there."""
    if _buildah("inspect", "--type=image", DEBIAN_IMAGE, check=False) == 0:
        return
    binaries.require_machine_commands(images=True)
    with tempfile.TemporaryDirectory(prefix="octavo-rig-") as scratch:
        root = Path(scratch, "root")
        mirror = [os.environ["OCTAVO_DEBIAN_MIRROR"]] if "OCTAVO_DEBIAN_MIRROR" in os.environ else []
        with step(f"debootstrap of Debian {DEBIAN_SUITE}"):
            _run(["debootstrap", "--variant=minbase", DEBIAN_SUITE, str(root), *mirror])
        if not mirror:
            _add_updates(root / "etc/apt/sources.list")
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(root / waste, ignore_errors=True)
            (root / waste).mkdir(parents=True, exist_ok=True)
        with step(f"making {DEBIAN_IMAGE} of it"):
            Path(scratch, "Dockerfile").write_text('FROM scratch\nADD root/ /\nCMD ["bash"]\n')
            _buildah("build", "--isolation=chroot", "--layers", "--tag", DEBIAN_IMAGE, scratch)


def has(name: str) -> bool:
    return _buildah("inspect", "--type=image", name, check=False) == 0


def _add_updates(sources: Path) -> None:
    mirror = sources.read_text().split()[1]
    security = mirror.rstrip("/") + "-security"
    with sources.open("a") as file:
        file.write(f"deb {mirror} {DEBIAN_SUITE}-updates main\ndeb {security} {DEBIAN_SUITE}-security main\n")


def _dockerfile(context: Path, arguments: list[str]) -> str:
    name = next((word for flag, word in itertools.pairwise(arguments) if flag in ("-f", "--file")), None)
    path = Path(name) if name else context / "Dockerfile"
    if not path.exists():
        raise RigError(f"no Dockerfile at {path}")
    return path.read_text()


def _trust(scratch: Path, dockerfile: str) -> list[str]:
    """Options that let a build step reach package servers as this machine does, without a word of it in the image.

    Which servers pip and uv ask on this machine (pip.conf, PIP_INDEX_URL, ...) is mounted as their configuration. Where
    the machine has certificate authorities of its own (SSL_CERT_FILE), pip gets them by it; a Dockerfile that says
    `ARG SSL_CERT_FILE` gets the path for other tools.
    """
    options: list[str] = []
    pip = configparser.ConfigParser(interpolation=None)
    pip.read(["/etc/pip.conf", Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"])
    for key in ("index-url", "extra-index-url", "trusted-host"):
        if value := os.environ.get(f"PIP_{key.upper().replace('-', '_')}"):
            pip.read_dict({"global": {key: value}})
    settings_of_pip = dict(pip["global"]) if pip.has_section("global") else {}
    if bundle := os.environ.get("SSL_CERT_FILE"):
        options += ["-v", f"{bundle}:/run/rig-ca.crt:ro"]
        pip.read_dict({"global": {"cert": "/run/rig-ca.crt"}})
        if re.search(r"^ARG SSL_CERT_FILE\b", dockerfile, re.MULTILINE):
            options += ["--build-arg", "SSL_CERT_FILE=/run/rig-ca.crt"]
    if pip.sections():
        with open(scratch / "pip.conf", "w") as file:
            pip.write(file)
        options += ["-v", f"{scratch}/pip.conf:/etc/pip.conf:ro"]
    if uv := _uv_settings(settings_of_pip):
        (scratch / "uv.toml").write_text(uv)
        options += ["-v", f"{scratch}/uv.toml:/etc/uv/uv.toml:ro"]
    return options


def _uv_settings(pip: dict[str, str]) -> str:
    """uv.toml with the indexes that uv is told of on this machine, else those of pip, which it does not read itself."""
    default = next(filter(None, map(os.environ.get, ("UV_DEFAULT_INDEX", "UV_INDEX_URL"))), pip.get("index-url"))
    more = next(filter(None, map(os.environ.get, ("UV_INDEX", "UV_EXTRA_INDEX_URL"))), pip.get("extra-index-url", ""))
    urls = [re.sub(r"^[\w-]+=(?=http)", "", url) for url in more.split()]  # uv lets them have names
    lines = [f"[[index]]\nurl = {json.dumps(url)}\n" for url in urls]
    if default:
        lines.append(f"[[index]]\nurl = {json.dumps(default)}\ndefault = true\n")
    return "".join(lines)


def _buildah(verb: str, *arguments: str, check: bool = True) -> int:
    store = settings.cache() / "buildah"
    store.mkdir(parents=True, exist_ok=True)
    policy = store / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')  # nothing comes from a network
    place = ["--root", f"{store}/root", "--runroot", f"{store}/run", "--storage-driver", "overlay"]
    signature = ["--signature-policy", str(policy)] if verb in ("build", "push", "pull") else []
    return _run(["buildah", *place, verb, *signature, *arguments], check=check)


def _run(command: list[str], *, check: bool = True) -> int:
    """Runs a command; shows the steps of a build as they come, and all its last words when it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    said: collections.deque[str] = collections.deque(maxlen=40)
    for line in process.stdout:
        said.append(line)
        if line.startswith("STEP ") or (line.startswith("[") and "] STEP " in line):
            say(f"  {line.strip()[:120]}")
    if process.wait() and check:
        raise RigError(f"{command[0]} failed:\n{''.join(said).strip()}")
    return process.returncode
