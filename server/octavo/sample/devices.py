"""Where numpy's vectorised argmax, sort and partition stand in for torch's."""

from __future__ import annotations

from torch import Tensor


def on_cpu(tensor: Tensor) -> bool:
    """Whether the CPU's ways are taken; every one of them has a plain torch twin that works on any device."""
    return tensor.device.type == "cpu"
