"""Token histories on the device, for the requests that need them (penalties, bad words of several tokens).

Each sampled token is appended on the device, because the CPU learns of it only a step later. Memory is taken by the
requests that use it: both pools grow by doubling and reuse slots.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sample import devices


class _Slots:
    """Allocates small integers, the last freed one first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.size = 0

    def allocate(self) -> int:
        if self._free:
            return self._free.pop()
        self.size += 1
        return self.size - 1

    def free(self, slot: int) -> None:
        self._free.append(slot)


class TokenPool:
    """``history`` int32 [slots, width]: prompt and output tokens by absolute position.
    ``counts`` int32 [count slots, vocab]: how often each token was output.
    ``seen`` int32 [slots, ceil(vocab / 32)], for kernels: a bit for each token of the history; None: not kept."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device, keep_seen: bool = False) -> None:
        self.max_slots = max_slots
        self.vocab_size = vocab_size
        self.device = device
        self.history = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device) if keep_seen else None
        self._slots = _Slots()
        self._count_slots = _Slots()

    def add(self, prompt: Tensor, output: Tensor, count: bool) -> tuple[int, int]:
        """Store a request's tokens (int64, CPU). Returns its history slot and its count slot (-1 without ``count``)."""
        slot, count_slot = self._slots.allocate(), -1
        length = prompt.numel() + output.numel()
        self.reserve(length + 1)
        self.history[slot, :length] = devices.put(torch.cat((prompt, output)).to(torch.int32), self.device)
        if self.seen is not None:
            bits = np.zeros(self.seen.shape[1] * 32, np.uint8)
            bits[prompt.numpy()] = 1
            bits[output.numpy()] = 1
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self.seen[slot] = devices.put(words, self.device)
        if count:
            count_slot = self._count_slots.allocate()
            if count_slot >= self.counts.shape[0]:
                self.counts = _grown(self.counts, min(self.max_slots, max(4, 2 * count_slot)), self.vocab_size)
            counts = torch.bincount(output, minlength=self.vocab_size)
            self.counts[count_slot] = devices.put(counts.to(torch.int32), self.device)
        return slot, count_slot

    def remove(self, slot: int, count_slot: int) -> None:
        """Free a request's slots, as `add` returned them."""
        self._slots.free(slot)
        if count_slot >= 0:
            self._count_slots.free(count_slot)

    def reserve(self, width: int) -> None:
        """Make room for histories of ``width`` tokens in every slot handed out."""
        slots, old_width = self.history.shape
        if self._slots.size > slots or width > old_width:
            new_slots = slots if self._slots.size <= slots else min(self.max_slots, max(4, 2 * slots, self._slots.size))
            new_width = old_width if width <= old_width else max(256, 2 * old_width, width)
            self.history = _grown(self.history, new_slots, new_width)
            if self.seen is not None and new_slots > slots:
                self.seen = _grown(self.seen, new_slots, self.seen.shape[1])


def _grown(old: Tensor, rows: int, columns: int) -> Tensor:
    new = torch.zeros(rows, columns, dtype=old.dtype, device=old.device)
    new[: old.shape[0], : old.shape[1]] = old
    return new
