"""The facts of a device that launches depend on: its generation, multiprocessors and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Facts:
    """Compute capability, multiprocessors, and bytes of shared memory that a program can have."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    @property
    def has_large_memory(self) -> bool:
        """True if tiles for 160 KB fit: on A100, H100 and B200, not on A10, L4, L40S and RTX, which have 99 KB."""
        return self.shared_memory >= 160 << 10


HOPPER = Facts((9, 0), 132, 227 << 10)
# By type of device: the interpreter's host counts as what the kernels were made for; "meta" is for compiling ahead.
OTHERS = {"cpu": HOPPER, "meta": HOPPER}


@cache
def facts(device: torch.device) -> Facts:
    """The facts of ``device``, asked for once."""
    if device.type != "cuda":
        return OTHERS[device.type]
    own = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    memory: int = own.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs do not know it
    return Facts(capability, own.multi_processor_count, memory)
