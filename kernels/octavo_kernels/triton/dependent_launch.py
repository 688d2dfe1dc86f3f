"""Programmatic dependent launch: a kernel's programs start while the kernel before it ends, and wait there for it.

What a launch costs passes beside the end of the kernel before. The order of memory is that of ordinary launches by two
rules: every program of a kernel that is launched so calls `await_previous`, also a program that has nothing to do, and
before it neither writes anything nor reads what an earlier kernel of the same step may write; and waiting ends only
when the kernel before is complete and its writes are seen. So a kernel that is complete implies that all before it are,
however they were launched.

Weights, which no kernel of a step writes, may be asked for before: `prefetch_constants`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def prefetch_constants(pointers):
    """Ask for the cache lines that ``pointers`` lie in, all of them in tensors, while the kernel before still runs.

    They come into the L2 cache, the same for all programs; what is in them is read only by a load.
    """
    if _COMPILED:  # noqa: SIM102  (as below)
        if cuda_capability_geq(9, 0):
            # Elementwise means a result for each pointer, which nobody wants.
            asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
            tl.inline_asm_elementwise(asm, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_previous():
    """What a kernel that may be launched so begins with. Does nothing where it was not, or no GPU can."""
    if _COMPILED:  # noqa: SIM102  (the interpreter has no device to ask for)
        if cuda_capability_geq(9, 0):
            gdc_wait()
            # Programs of the next kernel may come as soon as all of this one have: they wait for its end.
            gdc_launch_dependents()


@cache
def supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that calls `await_previous`."""
    return {"launch_pdl": supported(device)}
