"""Every engine that `make bench` knows: how it is started, with which flags, and whether it is here."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.cpus import better_dtype

LLAMA_QUANTS = ("Q4_0", "Q8_0")  # made from the embedded Q4_1: what llama.cpp is fastest with
LLAMA_SLOTS = 20
LLAMA_CONTEXT = 1024 * LLAMA_SLOTS


@dataclass(frozen=True)
class Engine:
    """``command`` with ``{port}`` in it serves OpenAI's API there. ``brief``: only 1 and 20 users are measured."""

    name: str
    variant: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    model: str = ""  # the name to ask for
    needs: tuple[Path, ...] = ()
    brief: bool = False
    default: bool = True

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant}".strip()

    def missing(self) -> str | None:
        """What is not here, by name; None when all is."""
        gone = [path.name for path in self.needs if not path.exists()]
        return f"{', '.join(gone)} not found (make peers installs it)" if gone else None

    def shown(self) -> str:
        """The command as a person would type it: no folders of this machine in it."""
        words = [word if word.startswith("-") else Path(word).name for word in self.command if word != "{port}"]
        words = [word for word in words if word not in ("--port", "--host", "127.0.0.1")]
        env = [f"{key}={':'.join(Path(part).name for part in value.split(':'))}" for key, value in self.env.items()]
        return " ".join([*env, shlex.join(words)])


def peers_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("OCTAVO_PEERS") or cache / "octavo" / "peers").expanduser()


def vllm_binary(root: Path) -> Path:
    return root / "vllm" / "bin" / "vllm"


def torchvision_folder(root: Path) -> Path:
    """What vLLM imports for most models that read images; beside its environment, which serves text without it."""
    return root / "torchvision"


def llama_binary(root: Path) -> Path:
    """Built from source, or unpacked from packages."""
    built = root / "llama-build" / "bin" / "llama-server"
    return built if built.exists() else root / "llama.cpp" / "llama-server"


def llama_model(root: Path, quant: str) -> Path:
    return root / "model" / f"{quant.lower()}.gguf"


def checkpoint_folder(root: Path) -> Path:
    return root / "model" / "smollm2-hf"


def gguf_file() -> Path:
    """The embedded model, fetched if need be."""
    from octavo.fetch.sources import resolve_model

    return Path(resolve_model(None, progress=False).weights[0])


def all_engines(root: Path, cores: int) -> list[Engine]:
    return [_octavo(), _octavo_as_vllm(root), _octavo_int8(root), *_vllm(root, cores), *_llama(root, cores)]


def serve_octavo(*flags: str) -> tuple[str, ...]:
    """The command that starts our own server."""
    where = ("--host", "127.0.0.1", "--port", "{port}")
    return (str(Path(sys.executable).with_name("octavo")), "serve", *flags, *where, "--disable-access-log")


def _octavo() -> Engine:
    return Engine("Octavo", "", serve_octavo(), model="smollm2-135m-instruct")


def _octavo_as_vllm(root: Path) -> Engine:
    """vLLM's checkpoint in vLLM's precision."""
    return _octavo_checkpoint(root, better_dtype(), "--dtype", better_dtype())


def _octavo_int8(root: Path) -> Engine:
    return _octavo_checkpoint(root, "int8", "--quantization", "int8", default=False)


def _octavo_checkpoint(root: Path, variant: str, *flags: str, default: bool = True) -> Engine:
    checkpoint = checkpoint_folder(root)
    command = serve_octavo(str(checkpoint), *flags, "--served-model-name", "smollm2")
    return Engine("Octavo", variant, command, model="smollm2", needs=(checkpoint,), default=default)


def vllm_environment(root: Path, cores: int) -> dict[str, str]:
    """As vLLM's documentation of its CPU build advises."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    preload = [*root.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"), *root.glob("vllm/lib/libiomp5.so")]
    if preload:
        env["LD_PRELOAD"] = ":".join(map(str, preload))
    return env


def _vllm(root: Path, cores: int) -> list[Engine]:
    binary, checkpoint = vllm_binary(root), checkpoint_folder(root)
    env = vllm_environment(root, cores)
    best = better_dtype()
    return [
        Engine(
            "vLLM",
            dtype,
            (
                str(binary),
                "serve",
                str(checkpoint),
                "--served-model-name",
                "smollm2",
                "--dtype",
                dtype,
                "--max-model-len",
                "2048",
                "--disable-uvicorn-access-log",
                "--host",
                "127.0.0.1",
                "--port",
                "{port}",
            ),
            env,
            "smollm2",
            (binary, checkpoint),
            default=dtype == best,
        )
        for dtype in (best, "float32" if best == "bfloat16" else "bfloat16")
    ]


def _llama(root: Path, cores: int) -> list[Engine]:
    binary = llama_binary(root)

    def serve(model: Path, variant: str, *flags: str, brief: bool = False) -> Engine:
        command = (
            str(binary),
            "-m",
            str(model),
            "--alias",
            "smollm2",
            "-np",
            str(LLAMA_SLOTS),
            "-c",
            str(LLAMA_CONTEXT),
            "-t",
            str(cores),
            *flags,
            "--no-webui",
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
        )
        return Engine("llama.cpp", variant, command, {}, "smollm2", (binary, model), brief)

    return [
        serve(llama_model(root, "Q4_0"), "Q4_0", "--poll", "0"),
        serve(llama_model(root, "Q4_0"), "Q4_0, polling", brief=True),
        serve(llama_model(root, "Q8_0"), "Q8_0", "--poll", "0", brief=True),
        serve(gguf_file(), "Q4_1", "--poll", "0", brief=True),
    ]
