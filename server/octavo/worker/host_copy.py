"""Copies of a step's results to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Starts copying tensors to the host, into memory of their own: what they hold may change at once."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            self._host = [tensor.clone() for tensor in tensors]
            return
        self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[Tensor]:
        """Wait for the copy; return the tensors on the host, in the order given."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
