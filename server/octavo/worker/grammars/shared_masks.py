"""Grammars of an engine of several ranks. Rank 0 alone compiles and follows them, and sends the others the bitmasks of
each step: whether a grammar is too slow is chance, and all ranks must sample the same tokens. Those after drafts come
along, whether they will be used or not: rank 0 may be of another stage than those who know."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
import torch

from octavo.worker.grammars.pool import GrammarPool
from octavo.worker.grammars.sequences import SequenceGrammars


def _guessed(grammars: Container[str], req_ids: list[str], drafts: Mapping[str, list[int]]) -> list[tuple[str, int]]:
    """The sequences that have a grammar and drafts, in order, and how many drafts."""
    return [(req_id, len(drafts[req_id])) for req_id in req_ids if req_id in drafts and req_id in grammars]


class LeadingGrammars(SequenceGrammars):
    """Rank 0's: ``send`` is given the bytes of a step's bitmasks, first one for each sequence that gets a token, then
    those after each draft of those with a grammar."""

    def __init__(self, pool: GrammarPool, vocab_size: int, send: Callable[[bytes], None]) -> None:
        super().__init__(pool, vocab_size)
        pool.lets_be = False  # the others wait for the bitmasks of all that have a grammar
        self._send = send

    def start_fill(self, req_ids: list[str], drafts: Mapping[str, list[int]]) -> Callable[[], torch.Tensor | None]:
        """See `SequenceGrammars`."""
        fill, guessed = super().start_fill(req_ids, drafts), _guessed(self, req_ids, drafts)

        def result() -> torch.Tensor | None:
            mask = fill()
            if mask is not None:
                later = [self.draft_mask([req_id], 1 + depth) for req_id, count in guessed for depth in range(count)]
                self._send(b"".join(part.numpy().tobytes() for part in (mask, *later) if part is not None))
            return mask

        return result


class FollowingGrammars:
    """Another rank's: ``receive`` waits for the bytes of the next step's bitmasks, as `LeadingGrammars` sends them."""

    def __init__(self, vocab_size: int, receive: Callable[[], bytes | bytearray]) -> None:
        self._words = -(-vocab_size // 32)
        self._receive = receive
        self._sequences: set[str] = set()
        self._after_drafts: dict[str, np.ndarray] = {}  # int32 [drafts, words] of the step under way

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def hold(self) -> bool:
        """See `SequenceGrammars`."""
        return bool(self._sequences)

    def add(self, req_id: str, grammar: str, output_token_ids: Sequence[int]) -> None:
        """Note that a sequence has a grammar."""
        self._sequences.add(req_id)

    def remove(self, req_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.discard(req_id)

    def held(self) -> set[str]:
        """Rank 0 knows."""
        return set()

    def start_fill(self, req_ids: list[str], drafts: Mapping[str, list[int]]) -> Callable[[], torch.Tensor | None]:
        """See `SequenceGrammars`."""
        if not self._sequences.intersection(req_ids):
            return lambda: None
        guessed = _guessed(self._sequences, req_ids, drafts)

        def result() -> torch.Tensor:
            masks = np.frombuffer(bytearray(self._receive()), dtype=np.int32).reshape(-1, self._words)
            mine, *later = np.split(masks, len(req_ids) + np.cumsum([0, *(count for _, count in guessed)])[:-1])
            self._after_drafts = {req_id: part for (req_id, _), part in zip(guessed, later, strict=True)}
            return torch.from_numpy(mine)

        return result

    def draft_mask(self, req_ids: list[str], depth: int) -> torch.Tensor | None:
        """See `SequenceGrammars`."""
        if not self._sequences.intersection(req_ids):
            return None
        mask = np.full((len(req_ids), self._words), -1, dtype=np.int32)
        for i, req_id in enumerate(req_ids):
            if req_id in self._sequences:
                mask[i] = self._after_drafts[req_id][depth - 1]
        return torch.from_numpy(mask)

    def accept(self, tokens: Mapping[str, list[int]]) -> dict[str, str]:
        """Rank 0 knows."""
        return {}


MakeGrammars = Callable[[GrammarPool, int], SequenceGrammars | FollowingGrammars]  # of a pool and the vocabulary's size
