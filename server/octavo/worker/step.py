"""The contract between the model runner, which drives a step, and the two kinds of devices that compute one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from octavo.interface.step import SchedulerOutput
from octavo.layers.decoder import DeferredHidden
from octavo.sample.logprobs import LogprobsTensors
from octavo.worker.input_batch import StepInputs


@dataclass(slots=True)
class SampledRows:
    """The S sequences of a step that get a token."""

    req_ids: list[str]
    rows: np.ndarray  # int64 [S], in InputBatch
    positions: np.ndarray  # int64 [S], of the tokens to be sampled
    grammar_bitmask: Callable[[], Tensor | None]  # waits for int32 [S, ceil(V / 32)]; None: no row has a grammar


class Logits(NamedTuple):
    """Logits of R rows. Valid until the device's next step."""

    values: Tensor  # [R, V]; undefined where only ``best`` was asked for
    best: tuple[Tensor, Tensor] | None = None  # token int64 [R] and value float32 [R] of each row's maximum, if known


class SampledTokens(NamedTuple):
    """The tokens of S sequences, on the host."""

    token_ids: list[int]
    invalid: list[bool]  # nothing could be sampled: NaN among the logits, or all tokens forbidden
    logprobs: LogprobsTensors | None = None
    same_sequence: list[bool] | None = None  # False: another one has the row since, maybe by that id; None: all True
    later_rounds: Sequence[tuple[list[str], SampledTokens]] = ()  # after accepted drafts: of some of the sequences


PendingTokens = Callable[[], SampledTokens]  # reads the tokens back; call once, in the order of the steps


class DeviceRunner(Protocol):
    """One kind of device's part of a step. The rows of `RequestStates` are given; methods are listed in call order."""

    @property
    def recording_obstacle(self) -> str | None:
        """What keeps a CPU's steps from being recorded; None: nothing, or not a CPU."""

    def update_rows(self, step: SchedulerOutput) -> None:
        """Follow the changes of ``step``, which the rows on the host show already."""

    def decode(self, sampled: SampledRows) -> PendingTokens | None:
        """Run and sample a step of one token of each of these sequences. None: use the methods below."""

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


def pad_indices(indices: np.ndarray, multiple: int) -> np.ndarray:
    """``indices`` int64 and zeros, up to a multiple of ``multiple``."""
    padded = np.zeros(-(-len(indices) // multiple) * multiple, dtype=np.int64)
    padded[: len(indices)] = indices
    return padded
