"""The contract between the model runner, which drives a step, and the two kinds of devices that compute one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.interface.step import SchedulerOutput
from octavo.layers.decoder import DeferredHidden
from octavo.sample.logprobs import LogprobsTensors, joined_logprobs
from octavo.worker.input_batch import StepInputs
from octavo_kernels.cpu import Best, Drawn


@dataclass(slots=True)
class SampledRows:
    """The S sequences of a step that get a token."""

    req_ids: list[str]
    rows: np.ndarray  # int64 [S], in InputBatch
    positions: np.ndarray  # int64 [S], of the tokens to be sampled
    grammar_bitmask: Callable[[], Tensor | None]  # waits for int32 [S, ceil(V / 32)]; None: no row has a grammar

    def take(self, which: np.ndarray, bitmask: Tensor | None) -> SampledRows:
        """Some of them, int64 [N]. ``bitmask``: of all."""
        some = None if bitmask is None else bitmask[torch.from_numpy(which)]
        return SampledRows([self.req_ids[i] for i in which], self.rows[which], self.positions[which], lambda: some)


class DraftRows:
    """The sampled sequences of a step, each with the rows of logits of its last known token and of its drafts."""

    def __init__(self, drafts: Mapping[str, list[int]], sampled: SampledRows) -> None:
        """``sampled.positions`` are those after the drafts; they become those after the last known tokens."""
        self.num_rejected: np.ndarray | int = 0  # int64 [S]
        if drafts:
            self._drafts = [drafts.get(req_id, []) for req_id in sampled.req_ids]
            self._counts = np.array([len(tokens) + 1 for tokens in self._drafts], dtype=np.int64)
            sampled.positions = sampled.positions - self._counts + 1
        self._has_drafts = bool(drafts)

    def __bool__(self) -> bool:
        return self._has_drafts

    @property
    def tokens(self) -> list[list[int]]:
        """Each sequence's drafts."""
        return self._drafts

    @property
    def counts(self) -> np.ndarray:
        """Rows of logits of each sequence int64 [S]: 1 and one for each draft."""
        return self._counts

    @property
    def first(self) -> np.ndarray:
        """The first row of logits of each sequence; int64 [S]."""
        first: np.ndarray = np.cumsum(self._counts) - self._counts
        return first

    def indices(self, ends: np.ndarray) -> np.ndarray:
        """The tokens of the step that give a row of logits. ``ends`` int64 [S]: the end of each sequence."""
        if not self:
            return ends - 1
        offsets: np.ndarray = np.arange(self._counts.sum()) - np.repeat(self.first, self._counts)
        return offsets + np.repeat(ends - self._counts, self._counts)


class Logits(NamedTuple):
    """Logits of R rows. Valid until the device's next step."""

    values: Tensor  # [R, V]; undefined where ``best_only`` or ``drawn`` is there
    best: Best | None = None  # of each row, if known
    best_only: tuple[list[int], list[float]] | None = None  # the same on the host, where that was all that is wanted
    drawn: Drawn | None = None  # the tokens, where they were drawn in the step's own program

    def take(self, rows: np.ndarray) -> Logits:
        """A copy of some rows, int64 [N]."""
        which = torch.from_numpy(rows)
        return Logits(self.values[which], None if self.best is None else self.best.take(which))


class StepDraw(Protocol):
    """Draws a step's tokens in the program that computes its logits."""

    def pack(self, logits: Tensor, best: Best) -> bytes:
        """The operations that follow on those that fill the first R rows of ``logits [>= R, V]`` and ``best``."""

    def read(self) -> Drawn:
        """The tokens, once the operations have run."""


class SampledTokens(NamedTuple):
    """The tokens of S sequences, on the host."""

    token_ids: list[int]
    invalid: list[bool]  # nothing could be sampled: NaN among the logits, or all tokens forbidden
    logprobs: LogprobsTensors | None = None
    same_sequence: list[bool] | None = None  # False: another one has the row since, maybe by that id; None: all True
    later_rounds: Sequence[tuple[list[str], SampledTokens]] = ()  # after accepted drafts: of some of the sequences

    @classmethod
    def from_drawn(cls, drawn: Drawn) -> SampledTokens:
        """The tokens that the C kernel has drawn."""
        logprobs = drawn.logprobs and LogprobsTensors(*map(torch.from_numpy, drawn.logprobs))
        return cls(drawn.token_ids, drawn.invalid, logprobs)

    @classmethod
    def joined(cls, places: Sequence[np.ndarray], parts: Sequence[SampledTokens]) -> SampledTokens:
        """Put together what was drawn apart: ``places`` int64, one for each token of ``parts``, are all of S."""
        order = np.argsort(np.concatenate(places))
        ids = [token for part in parts for token in part.token_ids]
        invalid = [one for part in parts for one in part.invalid]
        logprobs = joined_logprobs([(len(part.token_ids), part.logprobs) for part in parts])
        in_order = None if logprobs is None else logprobs.take(torch.from_numpy(order))
        return cls([ids[i] for i in order], [invalid[i] for i in order], in_order)


PendingTokens = Callable[[], SampledTokens]  # reads the tokens back; call once, in the order of the steps


class DeviceRunner(Protocol):
    """One kind of device's part of a step. The rows of `RequestStates` are given; methods are listed in call order."""

    @property
    def recording_obstacle(self) -> str | None:
        """The obstacle to recording a CPU's steps; None: there is none, or no CPU."""

    def update_rows(self, step: SchedulerOutput) -> None:
        """Follow the changes of ``step``, which the rows on the host show already."""

    def decode(self, sampled: SampledRows, drafts: DraftRows) -> PendingTokens | None:
        """Run and sample a step of one token of each of these sequences, and of their drafts. None: use the methods
        below."""

    def make_inputs(self, rows: np.ndarray, num_scheduled: np.ndarray) -> StepInputs:
        """Inputs, on the device, of ``num_scheduled`` int64 [R] tokens of the sequences ``rows`` int64 [R]."""

    def run_to_logits(self, inputs: StepInputs, indices: np.ndarray, sampled: SampledRows) -> Logits:
        """Run a step, for the logits of the tokens ``indices`` int64 [S] alone, from which ``sampled`` are drawn."""

    def run(self, inputs: StepInputs) -> DeferredHidden:
        """Run a step whose logits are not wanted, or not alone. Valid until the device's next step."""

    def compute_logits(self, hidden: DeferredHidden, indices: np.ndarray) -> Tensor:
        """[len(indices), V], of the tokens ``indices`` of a step."""

    def sample(self, logits: Logits, sampled: SampledRows) -> PendingTokens:
        """Draw a token for each sequence; its next step may be made before the token is read back."""

    states: Tensor | None  # what a drafter on the host reads of the step that ran last, ``[T, H]`` or more rows

    def guess(self, step: SchedulerOutput) -> None:
        """Let the drafter on the device guess, once all of ``step`` has been launched."""

    def verify(self, logits: Logits, sampled: SampledRows, drafts: DraftRows) -> PendingTokens:
        """Draw a token for each sequence and after each draft that is right.

        ``logits`` has the rows of ``drafts``. The next step of a sequence with drafts may be made once its tokens are
        read back.
        """


def pad_indices(indices: np.ndarray, multiple: int) -> np.ndarray:
    """``indices`` int64 and zeros, up to a multiple of ``multiple``."""
    padded = np.zeros(-(-len(indices) // multiple) * multiple, dtype=np.int64)
    padded[: len(indices)] = indices
    return padded
