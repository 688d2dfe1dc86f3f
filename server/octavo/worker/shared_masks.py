"""Grammars of an engine of several ranks. Rank 0 alone compiles and follows them, and sends the others each bitmask
that it uses: whether a grammar is too slow is chance, and all ranks must sample the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from octavo.worker.grammar import SequenceGrammars
from octavo.worker.grammar_pool import GrammarPool


class LeadingGrammars(SequenceGrammars):
    """Rank 0's: ``send`` is given the bytes of each bitmask."""

    def __init__(self, pool: GrammarPool, vocab_size: int, send: Callable[[bytes], None]) -> None:
        super().__init__(pool, vocab_size)
        self._send = send

    def start_fill(self, req_ids: list[str]) -> Callable[[], torch.Tensor | None]:
        """See `SequenceGrammars`."""
        fill = super().start_fill(req_ids)
        return lambda: self._sent(fill())

    def draft_mask(self, req_ids: list[str], depth: int) -> torch.Tensor | None:
        """See `SequenceGrammars`."""
        return self._sent(super().draft_mask(req_ids, depth))

    def _sent(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is not None:
            self._send(mask.numpy().tobytes())
        return mask


class FollowingGrammars:
    """Another rank's: ``receive`` waits for the bytes of the next bitmask. It asks for as many as rank 0 has, in the
    same order."""

    def __init__(self, vocab_size: int, receive: Callable[[], bytes | bytearray]) -> None:
        self._words = -(-vocab_size // 32)
        self._receive = receive
        self._sequences: set[str] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, req_id: str, grammar: str, output_token_ids: Sequence[int]) -> None:
        """Note that a sequence has a grammar."""
        self._sequences.add(req_id)

    def remove(self, req_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.discard(req_id)

    def held(self) -> set[str]:
        """Rank 0 knows."""
        return set()

    def start_fill(self, req_ids: list[str]) -> Callable[[], torch.Tensor | None]:
        """See `SequenceGrammars`."""
        if not self._sequences.intersection(req_ids):
            return lambda: None
        return lambda: self._next(len(req_ids))

    def draft_mask(self, req_ids: list[str], depth: int) -> torch.Tensor | None:
        """See `SequenceGrammars`."""
        return self._next(len(req_ids)) if self._sequences.intersection(req_ids) else None

    def _next(self, rows: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(self._receive()), dtype=np.int32).reshape(rows, self._words))

    def accept(self, tokens: Mapping[str, list[int]]) -> dict[str, str]:
        """Rank 0 knows."""
        return {}


MakeGrammars = Callable[[GrammarPool, int], SequenceGrammars | FollowingGrammars]  # of a pool and the vocabulary's size
