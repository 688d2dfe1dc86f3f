"""Importing torch without CUDA libraries and compilers where there is no GPU.

PyPI's torch is linked with NVIDIA's libraries. Without a GPU nothing in them is ever called, but loading them takes
200 MB of memory and time at each start, and installing them 2 GB. So empty libraries of the same names are loaded
first: the dynamic linker takes those for what torch asks for, and binds symbols lazily, that is never. `make serve`
installs torch without NVIDIA's libraries where there is no GPU. OCTAVO_FULL_TORCH_IMPORT=1 imports all of torch.
"""

from __future__ import annotations

import _ctypes
import ctypes
import importlib
import importlib.util
import logging
import os
import platform
import re
import struct
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

# Of these torch uses functions alone, which are looked up when they are first called. Not of the others: the runtime
# (cudart) has work to do while torch is loaded.
_UNUSED = re.compile(
    r"lib(cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusparse|cusparseLt|nccl|nvrtc|nvshmem_host)\.so\.\d+"
)
# Variables of theirs are looked up while torch is loaded: of NVSHMEM since torch 2.15.
_VARIABLES = ("nvshmem_selected_device_transport",)
# Formulas for tensors without data, and exported graphs: only torch.compile and its kin read them.
_FOR_COMPILERS = ("torch._meta_registrations", "torch.export")
_MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's e_machine


def import_torch() -> None:
    """Import torch; where there is no GPU in a fraction of the memory, and quicker. For a process that is ours alone.

    OCTAVO_FULL_TORCH_IMPORT=1 turns this off. Raises ConfigError where NVIDIA's libraries are needed and not installed.
    """
    if "torch" not in sys.modules and os.environ.get("OCTAVO_FULL_TORCH_IMPORT") != "1" and not _may_have_gpu():
        for name in _FOR_COMPILERS:
            sys.modules[name] = types.ModuleType(name)
        if "cuda" not in sys.modules:
            sys.modules["cuda"] = None  # type: ignore[assignment]
        with _without_cuda_libraries():
            importlib.import_module("torch")
        if sys.modules["cuda"] is None:
            del sys.modules["cuda"]
    import_whole_torch()


def import_whole_torch() -> None:
    """Import torch as it is, for a process that may be somebody else's; NVIDIA's libraries need not be installed where
    there is no GPU.

    Raises ConfigError where they are needed and are not.
    """
    if "torch" not in sys.modules and _lacks_cuda_libraries() and not _may_have_gpu():
        with _without_cuda_libraries():
            importlib.import_module("torch")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        if (missing := _UNUSED.match(str(error))) is None:
            raise
        raise ConfigError(
            f"torch was installed without {missing[0]} and NVIDIA's other libraries, which it needs where there is a "
            "GPU's driver or LD_BIND_NOW is set: `make setup` installs them"
        ) from None


def _torch_folder() -> Path | None:
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None or sys.platform != "linux" else Path(found.origin).parent


def _lacks_cuda_libraries() -> bool:
    """Return whether torch is linked with NVIDIA's libraries and their packages are not installed."""
    folder = _torch_folder()
    if folder is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        return False
    return not any((folder.parent / "nvidia").glob("*/lib/libcudnn.so.*"))


def _may_have_gpu() -> bool:
    """Return whether there is a driver: NVIDIA's library, or AMD's device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return os.path.exists("/dev/kfd")
    return True


@contextmanager
def _without_cuda_libraries() -> Iterator[None]:
    folder = _torch_folder()
    if folder is None or "LD_BIND_NOW" in os.environ:
        yield
        return
    nvidia = folder.parent / "nvidia"
    names = {path.name for path in nvidia.glob("*/lib/*.so.*") if _UNUSED.fullmatch(path.name)}
    flags, load = sys.getdlopenflags(), ctypes.CDLL
    empty: dict[str, ctypes.CDLL] = {}

    def load_what_is_used(name: Any, *args: Any, **options: Any) -> ctypes.CDLL | None:
        """Torch also loads the libraries by their paths, where no other library can stand in for them."""
        return None if str(name).startswith(f"{nvidia}/") else load(name, *args, **options)

    try:
        with ExitStack() as files:
            # In a library of its own: one of NVIDIA's name is asked for versions of its symbols, and has none.
            empty = {"": _load_empty("liboctavo_variables.so", files, _VARIABLES)}
            empty |= {name: _load_empty(name, files) for name in names}
            while missing := _missing_of(folder / "lib" / "libtorch_python.so", without=set(empty)):
                empty[missing] = _load_empty(missing, files)
        sys.setdlopenflags(os.RTLD_LAZY)
        ctypes.CDLL = load_what_is_used  # type: ignore[misc, assignment]
    except OSError as error:  # a torch that needs more of them: it gets the real ones
        logger.info("torch is loaded with all of CUDA's libraries: %s", error)
        for library in empty.values():
            _ctypes.dlclose(library._handle)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)
        ctypes.CDLL = load  # type: ignore[misc]


def _missing_of(library: Path, without: set[str]) -> str | None:
    """Load a library and all that it needs. The name of one that is not installed and that nothing needs without a GPU,
    or None when all is loaded. Raises OSError."""
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_LAZY)
    except OSError as error:
        # "libcudnn.so.9: cannot open shared object file: No such file or directory"
        name, _, reason = str(error).partition(": ")
        if _UNUSED.fullmatch(name) and name not in without and reason.startswith("cannot open"):
            return name
        raise
    return None


def _load_empty(name: str, files: ExitStack, variables: Sequence[str] = ()) -> ctypes.CDLL:
    """A library that lies nowhere but in memory; its ``variables`` are found by all others. The loader knows libraries
    by their paths: ``files`` is not to be closed before the last one is loaded, so that they all differ."""
    file = files.enter_context(os.fdopen(os.memfd_create(name), "wb", buffering=0))
    file.write(empty_library(name, variables))
    mode = os.RTLD_LAZY | (os.RTLD_GLOBAL if variables else 0)
    return ctypes.CDLL(f"/proc/self/fd/{file.fileno()}", mode=mode)


def empty_library(soname: str, variables: Sequence[str] = ()) -> bytes:
    """An ELF shared object that is called ``soname`` and defines ``variables``, each with 8 bytes of zeros, and nothing
    else (System V ABI, chapters 4 and 5)."""
    header, segment, symbol = 64, 56, 24  # bytes
    symbols = header + 2 * segment
    texts, entries = b"\0" + soname.encode() + b"\0", bytes(symbol)  # the null symbol, whose zeros are the variables'
    for name in variables:
        entries += struct.pack("<IBBHQQ", len(texts), 0x11, 0, 1, symbols, 8)  # global, an object, in some section
        texts += name.encode() + b"\0"
    count = len(variables)
    # Hash table: one bucket, the first variable, from which a chain leads through the others.
    chain = [0, *range(2, count + 1), 0][: count + 1]
    hashes = struct.pack(f"<{4 + count}I", 1, 1 + count, min(1, count), *chain)
    hashes += bytes(-len(hashes) % 8)
    texts += bytes(-len(texts) % 8)
    table = symbols + len(entries)
    strings = table + len(hashes)
    dynamic = strings + len(texts)
    tags = [(14, 1), (4, table), (5, strings), (6, symbols), (10, len(texts)), (11, symbol), (0, 0)]
    ends = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    size = dynamic + len(ends)
    machine = _MACHINES.get(platform.machine(), 0)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # 64 bits, little-endian
    elf = ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, header, 0, 0, header, segment, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)  # PT_LOAD, readable and writable
    dynamic_segment = struct.pack("<IIQQQQQQ", 2, 6, dynamic, dynamic, dynamic, len(ends), len(ends), 8)
    return elf + load + dynamic_segment + entries + hashes + texts + ends
