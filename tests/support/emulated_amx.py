"""The CPU kernels for matrix tiles (AMX) on any x86-64: their sources, compiled with an emulator of the tiles in C.

Everything else in them is as the best instruction set of this machine has it. Below, the same arithmetic by numpy.
"""

from __future__ import annotations

import fcntl
import shlex
import subprocess
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.cpu import compiler, library

NAME = "amx-emulated"


def names() -> list[str]:
    """`NAME` where it can be compiled and run, else nothing."""
    return [NAME] if compiler.machine() == "x86_64" and compiler.find_compiler() and _bases() else []


def _bases() -> list[str]:
    return [isa for isa in compiler.supported_isas() if isa != compiler.AMX]


@cache
def load(base: str | None = None) -> library.Library:
    """The library, compiled if need be. But for tiles its instruction set is ``base`` (None: this machine's best)."""
    base = base or _bases()[0]
    target = compiler.LIBRARIES / f"emulated-{compiler.AMX}-{base}-{compiler.source_hash()}.so"
    with (compiler.LIBRARIES / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            sources = [str(path) for path in sorted(compiler.SOURCES.glob("*.c"))]
            part = target.with_suffix(".part")
            # -O3 has the same bits and compiles twice as long.
            flags = [*compiler.flags(base), "-O1", "-DOCTAVO_AMX_EMULATED"]
            command = [*shlex.split(compiler.find_compiler() or "cc"), *flags]
            done = subprocess.run([*command, *sources, "-lm", "-o", str(part)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            for old in compiler.LIBRARIES.glob(f"emulated-{compiler.AMX}-{base}-*.so"):
                old.unlink()
            part.rename(target)
    return library.Library(target, base)


def configured_threads() -> int:
    """How many threads hold a configuration of the emulated tiles."""
    return int(load().c.oct_amx_configured_threads())


def disturb() -> None:
    """What another library may do on this thread: configure tiles of its own, use and release them."""
    disturbs = load().c.oct_amx_disturb
    disturbs.restype = None
    disturbs.argtypes = ()
    disturbs()


Floats = NDArray[np.float32]
LEAST = np.float64(np.finfo(np.float32).tiny)  # of what is no denormal


def _rounded(value: NDArray[np.float64], error: NDArray[np.float64]) -> Floats:
    """float32 nearest to value + error, of which ``value`` is the nearest float64; denormal results are zeros.

    Of two neighbours, that whose last bit is odd is taken where there is an error: rounding once more is then right.
    """
    bits = value.view(np.int64)
    away = np.where((error > 0) == (value > 0), 1, -1)
    moves = (error != 0) & (bits & 1 == 0) & np.isfinite(value)
    odd = np.where(moves, bits + away, bits).view(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = odd.astype(np.float32)
        # Whether it is denormal is decided after rounding to 24 bits of any exponent.
        return np.where(np.abs(odd) < LEAST * (1 - 2.0**-25), np.copysign(np.float32(0), result), result)


def _fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once; a and b of 8 bits each, so that their product is exact."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product, addend = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
    return _rounded(total, np.where(np.isfinite(error), error, 0.0))


def _without_denormals(values: Floats) -> Floats:
    return np.where(np.abs(values) < np.float32(LEAST), np.copysign(np.float32(0), values), values)


def linear_by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [rows, channels]: bfloat16 ``x`` [rows, width] times ``weight`` [channels, width], as TDPBF16PS adds up.

    For each 32 columns, two chains of fused multiply-adds from zero, of the even and the odd ones; their sum is added.
    """
    width = -(-x.shape[1] // 32) * 32
    rows, channels = (np.zeros((len(m), width), np.float32) for m in (x, weight))
    rows[:, : x.shape[1]] = _without_denormals(x.float().numpy())
    channels[:, : x.shape[1]] = _without_denormals(weight.float().numpy())
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, width, 32):
        chains = []
        for odd in (0, 1):
            chain = np.zeros_like(total)
            for k in range(first + odd, first + 32, 2):
                chain = _fused(rows[:, k, None], channels[None, :, k], chain)
            chains.append(chain)
        one = np.float32(1)
        total = _fused(_fused(chains[0], one, chains[1]), one, total)
    return torch.from_numpy(total)
