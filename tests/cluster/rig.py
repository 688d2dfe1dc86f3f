#!/usr/bin/env python3
"""A real Kubernetes on this machine for tests and demos; see README.md beside this file."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from clusterrig import binaries, cluster, images, settings
from clusterrig.api import ApiError
from clusterrig.progress import RigError, say

PROGRAMS = ("kubectl", "helm", "kubeconform")


def main() -> int:
    command, *rest = sys.argv[1:] or ["--help"]
    # What follows belongs to the other program, options included.
    arguments = parser().parse_args([command, *(["--"] if command in (*PROGRAMS, "exec") else []), *rest])
    try:
        return int(arguments.run(arguments) or 0)
    except (RigError, ApiError) as error:
        print(f"rig: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="rig.py", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, help: str, run: object) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help)
        one.set_defaults(run=run)
        return one

    command("up", "start the cluster (nothing happens when it is up)", lambda a: cluster.up() and None)
    one = command("down", "end the cluster and remove all but the cache", lambda a: cluster.down(keep_logs=a.keep_logs))
    one.add_argument("--keep-logs", action="store_true", help="leave .cluster/logs")
    command("status", "say whether it is up (exit status 0) or not (1)", status)
    command("kubeconfig", "print the path of the administrator's kubeconfig", kubeconfig)
    command("binaries", "build what is not built yet; print the path of each program", print_binaries)
    for name in PROGRAMS:
        one = command(name, f"run the rig's {name} (on the rig, unless KUBECONFIG is set)", run_tool)
        one.set_defaults(tool=name)
        one.add_argument("arguments", nargs="*")
    one = command("exec", "run a command inside the rig: `rig.py exec ctr -n k8s.io images ls`", run_inside)
    one.add_argument("arguments", nargs="*")
    one = command("pid", "print the process number of a daemon, to send it signals", print_pid)
    one.add_argument("name", help="kubelet, kube-apiserver, containerd, ...")
    one = command("gpus", "let the real node claim GPUs", set_gpus)
    one.add_argument("count", type=int)
    one = command("fake-nodes", "add GPU nodes on which pods only seem to run (kwok)", fake_nodes)
    one.add_argument("count", type=int)
    one.add_argument("--gpus", type=int, default=8, help="on each (default 8)")
    one.add_argument("--product", default="NVIDIA-H200", help="label nvidia.com/gpu.product (default NVIDIA-H200)")
    one = command("build", "build an image: `rig.py build NAME CONTEXT [options of buildah build]`", build)
    one.add_argument("name")
    one.add_argument("context", type=Path)
    one.add_argument("arguments", nargs=argparse.REMAINDER)
    command("packages", "install the Debian packages that it needs", lambda a: install_packages())
    command("base-image", "make the Debian base image, so that a later build need not", lambda a: images.debian())
    one = command("push", "send a built image to the registry that its name has; says its digest", push)
    one.add_argument("image", help="registry.example.com/name:tag; `buildah login` or `docker login` gives access")
    one.add_argument("--plain-http", action="store_true", help="the registry has no TLS")
    one = command("load-image", "give built images, or archives of `docker save`, to the cluster", load)
    one.add_argument("images", nargs="+", help="name of a built image, or FILE.tar")
    one = command("clean", "remove images and build layers from the cache", clean)
    one.add_argument("--all", action="store_true", help="the built programs too")
    return top


def status(_: argparse.Namespace) -> int:
    print("up" if cluster.is_up() else "down")
    return 0 if cluster.is_up() else 1


def kubeconfig(_: argparse.Namespace) -> None:
    print(Path(cluster.require_up()["run"]) / "kubeconfig")


def print_binaries(_: argparse.Namespace) -> None:
    for name, path in binaries.programs().items():
        print(name, path)


def run_tool(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("KUBECONFIG", str(settings.default_places().kubeconfig))
    program = binaries.programs()[arguments.tool]
    os.execv(program, [arguments.tool, *arguments.arguments])


def run_inside(arguments: argparse.Namespace) -> None:
    command = cluster.enter(arguments.arguments or ["bash"])
    os.execvp(command[0], command)


def print_pid(arguments: argparse.Namespace) -> None:
    print(cluster.daemon_pid(arguments.name))


def set_gpus(arguments: argparse.Namespace) -> None:
    cluster.set_gpus(settings.default_places(), arguments.count)


def fake_nodes(arguments: argparse.Namespace) -> None:
    places = settings.default_places()
    names = cluster.add_fake_nodes(places, arguments.count, gpus=arguments.gpus, product=arguments.product)
    print("\n".join(names))


def install_packages() -> None:
    cluster.require_root()
    binaries.require_machine_commands(images=True)


def build(arguments: argparse.Namespace) -> None:
    images.build(arguments.name, arguments.context, arguments.arguments)


def push(arguments: argparse.Namespace) -> None:
    name = arguments.image
    _require_image(name)
    print(f"{name}@{images.publish(name, plain_http=arguments.plain_http)}")


def load(arguments: argparse.Namespace) -> None:
    for image in arguments.images:
        if image.endswith(".tar"):
            archive = str(Path(image).resolve())
            subprocess.run(cluster.enter(["ctr", "-n", "k8s.io", "images", "import", archive]), check=True)
        else:
            _require_image(image)
            cluster.require_up()
            print(f"{image.partition('@')[0]}@{images.push(image)}")


def _require_image(name: str) -> None:
    if not images.has(name):
        raise RigError(f"no image {name} in the build store; `rig.py build {name} CONTEXT` makes one")


def clean(arguments: argparse.Namespace) -> None:
    if cluster.is_up():
        raise RigError("the rig is up and uses the cache; `rig.py down` first")
    for path in settings.cache().iterdir() if settings.cache().exists() else ():
        if arguments.all or path.name in ("containerd", "containerd-own", "registry", "buildah"):
            say(f"removing {path}")
            shutil.rmtree(path)


if __name__ == "__main__":
    sys.exit(main())
