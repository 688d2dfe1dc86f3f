"""Exchanges of a pipeline's stage with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.interface.step import ModelRunnerOutput


class StageLink(Protocol):
    """A link from a stage to the next one. Steps go through it in order, and only so many at a time as there are
    stages."""

    def send(self, states: Sequence[Tensor]) -> None:
        """Hand on a step's states ``[T, ...]``, without waiting for the next stage to take them."""

    def receive(self) -> list[Tensor]:
        """Wait for the next step's states, which are valid until the step after it. Raises RuntimeError when the stage
        before has ended."""


@dataclass(frozen=True)
class Pipes:
    """The links of one stage, which lacks one at each end of the pipeline. ``results``, on the first rank: waits for
    what the last stage has made of the oldest step that it has not told of yet."""

    before: StageLink | None = None
    after: StageLink | None = None
    results: Callable[[], ModelRunnerOutput] | None = None
