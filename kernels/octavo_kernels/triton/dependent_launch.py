"""Programmatic dependent launch: a kernel's programs start while the kernel before it ends, and wait there for it.

What a launch costs passes beside the end of the kernel before. The order of memory is that of ordinary launches by two
rules: every program of a kernel that is launched so calls `await_previous` before it reads or writes anything, also a
program that has nothing to do; and waiting ends only when the kernel before is complete and its writes are seen. So a
kernel that is complete implies that all before it are, however they were launched.
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
def await_previous():
    """The first statement of a kernel that may be launched so. Does nothing where it was not, or no GPU can."""
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
