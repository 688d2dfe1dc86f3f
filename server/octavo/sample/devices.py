"""Select numpy's vectorised argmax, sort and partition on CPUs instead of torch's; copy arrays to a device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_cpu(tensor: Tensor) -> bool:
    """True if the CPU's ways are taken; every one of them has a plain torch twin that works on any device."""
    return tensor.device.type == "cpu"


def put(host: Tensor | NDArray, device: torch.device) -> Tensor:  # type: ignore[type-arg]
    """``host`` on ``device``, without waiting for the work under way there; on a CPU it may share its memory."""
    if not isinstance(host, Tensor):
        host = torch.from_numpy(np.ascontiguousarray(host))
    return host if device.type == "cpu" else pinned(host).to(device, non_blocking=True)


def pinned(host: Tensor) -> Tensor:
    """A copy from which a device can read while the host goes on. Its pages come from torch's pool, which hands them
    out again only once the copies from them are done."""
    return host.pin_memory()
