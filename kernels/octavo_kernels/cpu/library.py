"""The compiled kernels: which library is in use, how an operation is packed for it, and how tensors are handed to it.

C knows one call, ``oct_run(program)``: a list of operations, each as opcode, number of argument words, arguments of
eight bytes each. A single call is a program of one operation.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from octavo_kernels.cpu import compiler

logger = logging.getLogger("octavo_kernels")

ISA_ENV = "OCTAVO_CPU_ISA"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # csrc/simd.h: enum dtype
WEIGHT_DTYPES = {**DTYPES, torch.float16: 2}  # weights may have one more
PAIR_ISAS = (compiler.AMX, "avx512bf16")  # whose attention multiplies pairs of bfloat16

# Operation -> opcode and argument layout, as in csrc/thread_team.c and csrc/*_ops.h: "P" address, "K" address of what
# says how many items other operations have, "R" number of rows of the step, "S" number of sequences of the step, "q"
# another integer, "d" float.
_STATE = "P" * 10 + "Sqqqqq"  # state_args
_OPS = {
    "rms_norm": (0, "PPPPPRqqqd"),
    "silu_and_mul": (1, "PPRqq"),
    "rope_and_cache": (2, "PPPPPPPPR" + "q" * 11 + "d"),
    "paged_attention": (3, "PPPPPPPPRRS" + "q" * 11 + "dd"),
    "copy_blocks": (4, "PPqq"),
    "quantize": (5, "PPPPPPPqR" + "q" * 5 + "d"),
    "quantized_linear": (6, "PPPPPR" + "q" * 8),
    "quantized_embedding": (7, "PPPR" + "q" * 7),
    "embedding": (8, "PPPRqqq"),
    "read_memory": (9, "PPq"),
    "dot_products": (10, "Pq"),
    "gated_linear": (11, "PPPPPR" + "q" * 7),
    "pack_gguf": (12, "PPqqqqq"),
    "touch_blocks": (13, "Pqqq"),
    "argmax": (14, "PPPRqq"),
    "decode_inputs": (15, "P" * 12 + "qqqqqq"),
    "quantized_head": (16, "P" * 9 + "R" + "q" * 4 + "d"),
    "dense_linear": (17, "PPPPR" + "q" * 7),
    "pack_dense": (18, "PPqqqq"),
    "dense_embedding": (19, "PPPR" + "q" * 5),
    "layer_norm": (20, "P" * 6 + "Rqqd"),
    "activation": (21, "PPPR" + "q" * 5),
    "add": (22, "PPPRqq"),
    "take_columns": (23, "PPPRqqq"),
    "scale": (24, "PPRqqdd"),
    "rms_norm_columns": (25, "PPRqqqqqd"),
    "topk_route": (26, "PPPPPR" + "q" * 7 + "d"),
    "sort_choices": (27, "PPRqq"),
    "quantized_experts_gated": (28, "P" * 11 + "R" + "q" * 8 + "d"),
    "quantized_experts_down": (29, "P" * 6 + "R" + "q" * 5),
    "dense_experts_gated": (30, "P" * 8 + "R" + "q" * 7 + "d"),
    "dense_experts_down": (31, "P" * 6 + "R" + "q" * 6),
    "add_choices": (32, "P" * 6 + "R" + "q" * 5),
    "latent_cache": (33, "P" * 8 + "R" + "q" * 10 + "d"),
    "head_linear": (34, "PPPR" + "q" * 9),
    "varlen_attention": (35, "PPPPRSqqqqqd"),
    "rope": (36, "PPPR" + "q" * 6),
    "mix_streams": (37, "P" * 6 + "R" + "q" * 6),
    "match_rms": (38, "PPR" + "q" * 4 + "d"),
    "sparsify": (39, "PRqqqd"),
    "all_reduce": (40, "PPPqqqRqqqq"),
    "all_gather": (41, "PPPPqqqRqqqq"),
    "best_of_ranks": (42, "PPPPPqqqRqq"),
    "lora_shrink": (43, "P" * 6 + "q" * 6),
    "lora_gather": (44, "PPPPPR" + "q" * 4),
    "lora_expand": (45, "P" * 7 + "q" * 5),
    "lora_tiles": (46, "PPKRq"),
    "gather_rows": (47, "PPPPPPPPqqqqqqq"),
    "sum_rows": (48, "PPPPPPqqqqqq"),
    "draw": (49, "P" * 17 + "qqqqqq"),
    "causal_conv": (50, "PPPPP" + _STATE + "Rqqqqqqq"),
    "gated_delta_rule": (51, "P" * 11 + _STATE + "R" + "q" * 9 + "dd"),
    "gated_norm": (52, "PPPPR" + "q" * 6 + "d"),
    "state_space_scan": (53, "P" * 11 + _STATE + "R" + "q" * 9 + "dd"),
}
NAMES = {code: name for name, (code, _) in _OPS.items()}


def _arguments(letters: str) -> dict[int, list[int]]:
    """Opcode -> which of its arguments are of these kinds."""
    return {code: [i for i, kind in enumerate(layout) if kind in letters] for code, layout in _OPS.values()}


ADDRESSES, KEPT, ROWS, SEQUENCES = _arguments("PK"), _arguments("K"), _arguments("R"), _arguments("S")


def packers() -> dict[str, tuple[struct.Struct, int, int]]:
    """Return each operation's layout: its words, opcode and number of arguments."""
    return {
        name: (struct.Struct("=qq" + re.sub("[PKRS]", "q", layout)), code, len(layout))
        for name, (code, layout) in _OPS.items()
    }


class Library:
    """One loaded library. ``pack`` makes an operation, ``run`` executes one or several packed operations."""

    def __init__(self, path: Path, isa: str) -> None:
        self.path, self.isa = path, isa
        self.recorder: list[bytes] | None = (
            None  # if set, operations are appended here instead of run, see recording.py
        )
        self.c = library = ctypes.CDLL(str(path))
        self._run = library.oct_run
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._run.restype = ctypes.c_int64
        _share_openmp(library)
        self._packers = packers()

    def pack(self, name: str, *args: int | float) -> bytes:
        """The bytes of operation ``name`` with these arguments, which `run` takes."""
        packer, code, words = self._packers[name]
        return packer.pack(code, words, *args)

    def run(self, program: bytes, threads: int | None = None) -> None:
        """Run packed operations on ``threads`` of torch's OpenMP threads (by default all of them)."""
        if self.recorder is not None:
            self.recorder.append(program)
        else:
            self.run_at(program, len(program) // 8, threads)

    def run_at(self, program: bytes | int, words: int, threads: int | None = None) -> None:
        """Like `run`, for packed operations or the address of some; ``words`` is their length in words of 8 bytes.

        Raises RuntimeError if the library does not know an operation, or its number of arguments.
        """
        malformed = self._run(program, words, threads or torch.get_num_threads())
        if malformed:
            raise RuntimeError(
                f"{self.path.name}: unknown operation at word {malformed - 1}, or its sizes; rebuild the kernels"
            )


def _share_openmp(library: ctypes.CDLL) -> None:
    """Use the OpenMP runtime that torch has loaded: two runtimes would have two sets of spinning threads."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        functions = [ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p) for name in names]
    except (OSError, AttributeError):
        logger.warning("torch has no OpenMP runtime: the CPU kernels run on one thread.")
        return
    library.oct_set_openmp.argtypes = (ctypes.c_void_p,) * 3
    library.oct_set_openmp.restype = None
    library.oct_set_openmp(*functions)


@cache
def load(isa: str) -> Library:
    """The library for one instruction set, compiled now if necessary. Raises compiler.BuildError."""
    name = compiler.library_name(isa)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "kernels"
    for directory in (compiler.LIBRARIES, cache):
        if (directory / name).exists():
            return Library(directory / name, isa)
    # Neither `make setup` nor a wheel has built these sources.
    directory = compiler.LIBRARIES if os.access(compiler.LIBRARIES.parent, os.W_OK) else cache
    # Warnings, since a person who waits for a chat sees no others.
    return Library(compiler.build(isa, directory, logger.warning), isa)


@cache
def load_best() -> tuple[Library | None, str]:
    """The library for this CPU, or None and the reason. OCTAVO_CPU_ISA names an instruction set instead."""
    isas = compiler.supported_isas()
    wanted = os.environ.get(ISA_ENV)
    if wanted and wanted not in isas:
        reason = compiler.amx_refusal() if wanted == compiler.AMX else None
        raise ValueError(
            f"{ISA_ENV}={wanted!r} does not run on this CPU{f': {reason}' if reason else ''}; "
            f"choose one of {', '.join(isas) or 'none'}"
        )
    if not isas:
        return None, f"there are no CPU kernels for {compiler.machine()}"
    problem = ""
    for isa in [wanted] if wanted else isas:  # an old compiler may not know the newest
        try:
            return load(isa), ""
        except (compiler.BuildError, OSError) as error:
            problem = problem or str(error)
    return None, problem


_library: Library | None = None
_loaded = False


def get_library() -> Library | None:
    """The library for this CPU, loaded at the first call; None, with one warning, if there is none."""
    global _library, _loaded
    if not _loaded:
        _library, reason = load_best()
        _loaded = True
        if _library is None:
            logger.warning(
                "CPU kernels are unavailable, plain torch is used instead, about 50 times slower: %s", reason
            )
        else:
            logger.info("CPU kernels: %s", _library.isa)
            if _library.isa != compiler.AMX and not os.environ.get(ISA_ENV) and (refusal := compiler.amx_refusal()):
                logger.warning(
                    "This CPU has matrix units (AMX), but %s: kernels without them are used. Linux 5.16 or newer has "
                    "them; in a container, the sandbox and its seccomp profile must allow arch_prctl.",
                    refusal,
                )
    return _library


def use_library(chosen: Library | None) -> None:
    """Use this library from now on, or plain torch if None. Tests compare instruction sets with it."""
    global _library, _loaded
    _library, _loaded = chosen, True


def unavailable_reason() -> str | None:
    """Return why the C kernels cannot run here; None if they can."""
    return None if get_library() is not None else load_best()[1] or "switched off"


def norm_dtype(weight: Tensor, dtype: torch.dtype) -> int | None:
    """The code of a norm's weight for activations in ``dtype``: the same or float32; None for any other."""
    return DTYPES.get(weight.dtype) if weight.dtype in (dtype, torch.float32) else None


def threads_for(elements: int) -> int | None:
    """One thread for an operation where starting a second would cost more than it saves, else None: torch's number."""
    return 1 if elements < 16384 else None


def threads_for_products(rows: int, weights: int) -> int | None:
    """The same for products of ``rows`` with so many numbers: one thread for what takes a fraction of a millisecond
    between operations of Python. Its others sleep by then, and are often elsewhere when they wake: a server decodes
    images and reads requests meanwhile."""
    return 1 if weights < 1 << 20 and rows * weights < 1 << 24 else None


def as_contiguous(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` contiguous, and converted to ``dtype`` if one is given; usually ``x`` itself."""
    if dtype is not None and x.dtype != dtype:
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()
