"""Tokens of a step with drafts, on the device, and the device's part of verification.

All tokens of a step are sampled after at once: a draw depends on what precedes it, and where that was a wrong draft it
is dropped. How many drafts are right, and what follows them, is found out where the next step reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PADDING = -1  # the row of a step's padding: the last one, counted from the end


class DraftPlan(NamedTuple):
    """The tokens of a step of S sequences: of each its last one, and the drafts after it; all int64."""

    rows: Tensor  # [T], of the token's sequence; PADDING
    offsets: Tensor  # [T], 0: the last token, i: the draft i after it
    owners: Tensor  # [T], of the S sequences; S: padding
    sequences: Tensor  # [S], their rows; PADDING
    starts: Tensor  # [S + 1], where each one's tokens start

    @property
    def counts(self) -> Tensor:
        """Tokens of each sequence: 1 and its drafts."""
        return self.starts.diff()


def packed_plan(rows: np.ndarray, counts: np.ndarray, size: int, max_sequences: int) -> np.ndarray:
    """The plan of sequences ``rows`` int64 [R] with ``counts`` tokens each, padded, as int64 [5, size + 1]."""
    total, starts = int(counts.sum()), np.cumsum(counts) - counts
    packed = np.zeros((5, size + 1), dtype=np.int64)
    packed[0], packed[2], packed[3], packed[4] = PADDING, max_sequences, PADDING, total
    packed[0, :total] = np.repeat(rows, counts)
    packed[1, :total] = np.arange(total) - np.repeat(starts, counts)
    packed[2, :total] = np.repeat(np.arange(len(rows)), counts)
    packed[3, : len(rows)], packed[4, : len(rows)] = rows, starts
    return packed


def unpack_plan(packed: Tensor, size: int, max_sequences: int) -> DraftPlan:
    """Unpack the result of `packed_plan`, of at least that size."""
    rows, offsets, owners, sequences, starts = packed.unbind()
    return DraftPlan(rows[:size], offsets[:size], owners[:size], sequences[:max_sequences], starts[: max_sequences + 1])


def accept(plan: DraftPlan, drafts: Tensor, tokens: Tensor, invalid: Tensor) -> tuple[Tensor, Tensor]:
    """Count the right drafts of each sequence, int64 [S], and return the token sampled after them, int64 [S].

    ``drafts`` int64 [T]: the draft after each token, if any; ``tokens`` int64 [T] and ``invalid`` bool [T]: the results
    of sampling after each. If nothing could be sampled after right drafts, the last of these does not count: the next
    step comes back to it.
    """
    size, count = len(plan.rows), len(plan.sequences)
    followed = torch.zeros_like(invalid)
    followed[: size - 1] = plan.offsets[1:] > 0
    right = followed & (tokens == drafts) & ~invalid
    ends = torch.where(right, size, plan.offsets)
    accepted = torch.full((count + 1,), size, dtype=torch.int64, device=tokens.device)
    accepted = accepted.scatter_reduce(0, plan.owners.clamp(max=count), ends, "amin")[:count]
    accepted = torch.where(plan.counts > 0, accepted, 0)
    first = plan.starts[:-1].clamp(max=size - 1)
    accepted = accepted - (invalid[first + accepted] & (accepted > 0)).long()
    return accepted, tokens[first + accepted]
