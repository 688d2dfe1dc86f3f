"""Programmatic dependent launch (PDL): a kernel's programs start while the previous kernel ends, and wait for it.

This hides the latency of a launch. Memory is ordered as with ordinary launches, by two rules. First, every program of a
kernel that is launched this way calls `wait_for_previous_kernel`, even if it has no work, and before that call it
neither writes nor reads what an earlier kernel of the same step may write. Second, the wait ends only when the previous
kernel is complete and its writes are visible. So when a kernel is complete, all earlier ones are, however launched.

Weights, which no kernel of a step writes, may be prefetched before the wait: `prefetch_constants`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from octavo_kernels.gpu_parts import is_on
from octavo_kernels.triton import devices

_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def prefetch_constants(pointers):
    """Prefetch the cache lines of ``pointers``, which must lie in tensors, while the previous kernel still runs.

    They are loaded into the L2 cache, which all programs share; only a load reads their contents.
    """
    if _COMPILED:  # noqa: SIM102  (as below)
        if cuda_capability_geq(9, 0):
            # An elementwise operation must return a result for each pointer; it is not used.
            asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
            tl.inline_asm_elementwise(asm, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_previous_kernel():
    """Wait for the previous kernel. Does nothing where the launch was an ordinary one or the GPU has no PDL."""
    if _COMPILED:  # noqa: SIM102  (the interpreter has no device to ask for)
        if cuda_capability_geq(9, 0):
            gdc_wait()
            # The next kernel's programs may start once all of this one's have; they wait for its end.
            gdc_launch_dependents()


def supported(device: torch.device) -> bool:
    """True if ``device`` has programmatic dependent launch (from compute capability 9.0 on), not turned off."""
    return is_on("pdl") and device.type != "cpu" and devices.facts(device).capability >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options for a kernel that calls `wait_for_previous_kernel`."""
    return {"launch_pdl": supported(device)}
