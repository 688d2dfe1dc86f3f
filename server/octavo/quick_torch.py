"""Torch for a process that has no GPU: the same torch, without what only a GPU or a compiler needs.

PyPI's torch is linked with NVIDIA's libraries. Where there is no GPU nothing in them is ever called, but to load them
takes 200 MB of memory and time at each start. So libraries of the same names with nothing in them are loaded first: the
system's loader then takes those for what torch asks for, and symbols are looked up when they are called, that is never.
"""

from __future__ import annotations

import _ctypes
import ctypes
import importlib.util
import logging
import os
import platform
import re
import struct
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Of these torch uses functions alone, which are looked up when they are first called. Not of the others: the runtime
# (cudart) has work to do while torch is loaded.
_UNUSED = re.compile(r"lib(cublas|cublasLt|cudnn|cufft|cufile|curand|cusparse|cusparseLt|nccl|nvrtc)\.so\.\d+")
# Formulas for tensors without data, and exported graphs: only torch.compile and its kin read them.
_FOR_COMPILERS = ("torch._meta_registrations", "torch.export")
_MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's e_machine


def import_torch() -> None:
    """Import torch; where there is no GPU in a fraction of the memory, and quicker."""
    if "torch" not in sys.modules and not _may_have_gpu():
        for name in _FOR_COMPILERS:
            sys.modules[name] = types.ModuleType(name)
        if "cuda" not in sys.modules:
            sys.modules["cuda"] = None  # type: ignore[assignment]
        with _without_cuda_libraries():
            import torch
        if sys.modules["cuda"] is None:
            del sys.modules["cuda"]
    import torch  # noqa: F401


def _may_have_gpu() -> bool:
    """Whether there is a driver: NVIDIA's library of that, or AMD's device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return os.path.exists("/dev/kfd")
    return True


@contextmanager
def _without_cuda_libraries() -> Iterator[None]:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None or sys.platform != "linux" or "LD_BIND_NOW" in os.environ:
        yield
        return
    folder = Path(found.origin).parent
    nvidia = folder.parent / "nvidia"
    names = {path.name for path in nvidia.glob("*/lib/*.so.*") if _UNUSED.fullmatch(path.name)}
    flags, load = sys.getdlopenflags(), ctypes.CDLL
    empty: list[ctypes.CDLL] = []

    def load_what_is_used(name: Any, *args: Any, **options: Any) -> ctypes.CDLL | None:
        """Torch also loads the libraries by their paths, where no other library can stand in for them."""
        return None if str(name).startswith(f"{nvidia}/") else load(name, *args, **options)

    try:
        empty += _load({name: empty_library(name) for name in names})
        load(str(folder / "lib" / "libtorch_python.so"), mode=os.RTLD_LAZY)  # and with it all the others
        sys.setdlopenflags(os.RTLD_LAZY)
        ctypes.CDLL = load_what_is_used  # type: ignore[misc, assignment]
    except OSError as error:  # a torch that needs more of them: it gets the real ones
        logger.info("torch is loaded with all of CUDA's libraries: %s", error)
        for library in empty:
            _ctypes.dlclose(library._handle)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)
        ctypes.CDLL = load  # type: ignore[misc]


def _load(files: dict[str, bytes]) -> list[ctypes.CDLL]:
    """Libraries that lie nowhere but in memory. The loader knows them by their paths, so these must all differ."""
    with ExitStack() as stack:
        paths = []
        for name, data in files.items():
            file = stack.enter_context(os.fdopen(os.memfd_create(name), "wb"))
            file.write(data)
            file.flush()
            paths.append(f"/proc/self/fd/{file.fileno()}")
        return [ctypes.CDLL(path, mode=os.RTLD_LAZY) for path in paths]


def empty_library(soname: str) -> bytes:
    """An ELF shared object that is called ``soname`` and defines nothing (System V ABI, chapters 4 and 5)."""
    header, segment, symbol = 64, 56, 24  # bytes
    symbols = header + 2 * segment
    table = symbols + symbol  # hash table: one bucket, one chain, both of the null symbol
    strings = table + 16
    texts = b"\0" + soname.encode() + b"\0"
    texts += bytes(-len(texts) % 8)
    dynamic = strings + len(texts)
    tags = [(14, 1), (4, table), (5, strings), (6, symbols), (10, len(texts)), (11, symbol), (0, 0)]
    entries = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    size = dynamic + len(entries)
    machine = _MACHINES.get(platform.machine(), 0)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # 64 bits, little-endian
    elf = ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, header, 0, 0, header, segment, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)  # PT_LOAD, readable and writable
    dynamic_segment = struct.pack("<IIQQQQQQ", 2, 6, dynamic, dynamic, dynamic, len(entries), len(entries), 8)
    return elf + load + dynamic_segment + bytes(symbol) + struct.pack("<IIII", 1, 1, 0, 0) + texts + entries
