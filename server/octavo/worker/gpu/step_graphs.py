"""Captured steps of decodes: the model with the preparation of its inputs, the head with the sampler, and what a
drafter reads of them, a graph each, for some numbers of tokens.

The sampler is apart, so that a row whose sampling needs more than the captured one can still use the model's; a drafter
reads what was sampled, whoever did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import DeferredHidden
from octavo.models.base import CausalLM
from octavo.worker.gpu.draft_plan import DraftPlan
from octavo.worker.gpu.graphs import Captured
from octavo.worker.gpu.step_parts import StepParts
from octavo_kernels import AttentionMetadata, SamplingRows


class StepTokens(NamedTuple):
    """The tokens of a step: ids and positions, int64 [T]."""

    token_ids: Tensor
    positions: Tensor
    metadata: list[AttentionMetadata]


class ReadsSteps(Protocol):
    """A drafter that reads what the model computes."""

    num_reads: int  # times that it reads a step

    def states(self, target: CausalLM, deferred: DeferredHidden, hidden: Tensor) -> Tensor:
        """The states ``[T, H]`` that it reads of a step, from the results of the model's `begin` and of its `finish`
        for all of them."""
        ...

    def read(self, plan: DraftPlan, tokens: StepTokens, states: Tensor, number: int) -> None:
        """Read a step, the time ``number`` from 0, after its tokens have been sampled. Can be captured."""
        ...


class StepGraphs(ABC):
    """Captured graphs by their number of tokens with padding (one of ``sizes``)."""

    def __init__(
        self, parts: StepParts, sizes: list[int], chosen: Tensor, nobody: Tensor, reader: ReadsSteps | None
    ) -> None:
        """``chosen`` on the device says what the graphs compute; ``nobody``: what it says where that is nothing."""
        assert isinstance(parts.model, CausalLM)
        self.sizes = sizes
        self._model, self._parts, self._batch = parts.model, parts, parts.batch
        self._chosen, self._nobody, self._reader = chosen, nobody, reader
        self._models: dict[int, Captured] = {}
        self._samplers: dict[tuple[int, bool], Captured] = {}
        self._readers: dict[tuple[int, int], Captured] = {}

    @abstractmethod
    def plan(self, size: int) -> DraftPlan:
        """The step that the graphs of that size compute."""

    @abstractmethod
    def _inputs(self, size: int) -> tuple[StepTokens, Tensor]:
        """A step's tokens, and the positions int64 [size] after them."""

    @abstractmethod
    def _metadata(self, size: int, positions: Tensor) -> list[AttentionMetadata]:
        """Describe the same step once its tokens are counted, whose ``positions`` int64 [size] are known."""

    @abstractmethod
    def _go_on(self, size: int, token_ids: Tensor, invalid: Tensor) -> tuple[Tensor, ...]:
        """Have the sequences go on after the tokens ``token_ids`` int64 [size] that were sampled."""

    def capture_all(self) -> None:
        """Capture every size now, the largest first, instead of when it is first needed."""
        for size in reversed(self.sizes):
            self.model_graph(size)
            for truncated in (False, True):
                self.sampler_graph(size, truncated)
            for number in range(self._reader.num_reads if self._reader else 0):
                self.reader_graph(size, number)

    def model_graph(self, size: int) -> Captured:
        """Its outputs: hidden states [size, H], the positions int64 [size] of the tokens to be sampled, and what a
        drafter reads."""
        if size not in self._models:
            rows = self.plan(size).rows

            def work() -> tuple[Tensor, ...]:
                tokens, after = self._inputs(size)
                context = ForwardContext(tokens.metadata, self._parts.kv_caches)
                positions = self._batch.rotary_positions(rows, tokens.positions)
                with self._parts.applied(rows):
                    deferred = self._model.begin(tokens.token_ids, positions, context)
                    hidden = self._model.finish(*deferred)
                if self._reader is None:
                    return hidden, after
                return hidden, after, tokens.token_ids, self._reader.states(self._model, deferred, hidden)

            self._models[size] = self._capture(work)
        return self._models[size]

    def sampler_graph(self, size: int, truncated: bool) -> Captured:
        """Samples after what `model_graph` left: greedy, by temperature and, if ``truncated``, with top-k, top-p and
        min-p. The sequences go on from there.

        Its outputs: tokens int64 [size], bool [size] whether there was nothing to sample, and what `_go_on` returns.
        """
        key = size, truncated
        if key not in self._samplers:
            plan, table = self.plan(size), self._parts.sampling.table()
            hidden, positions = self.model_graph(size).outputs[:2]

            def work() -> tuple[Tensor, ...]:
                step = SamplingRows(table, plan.rows, positions, truncated)
                with self._parts.applied(plan.rows):
                    drawn = self._model.sample(hidden, step)
                return drawn.token_ids, drawn.invalid, *self._go_on(size, drawn.token_ids, drawn.invalid)

            self._samplers[key] = self._capture(work)
        return self._samplers[key]

    def reader_graph(self, size: int, number: int) -> Captured:
        """Has the drafter read what `model_graph` and a sampler left. No outputs."""
        key = size, number
        if key not in self._readers:
            assert self._reader is not None
            reader, plan = self._reader, self.plan(size)
            _, after, token_ids, states = self.model_graph(size).outputs

            def work() -> tuple[Tensor, ...]:
                positions = (after - 1).clamp(min=0)
                reader.read(plan, StepTokens(token_ids, positions, self._metadata(size, positions)), states, number)
                return ()

            self._readers[key] = self._capture(work)
        return self._readers[key]

    def _capture(self, work: Callable[[], tuple[Tensor, ...]]) -> Captured:
        return self._parts.capture_on(self._chosen, self._nobody, work)


G = TypeVar("G", bound=StepGraphs)


@dataclass(frozen=True)
class Graphs(Generic[G]):
    """The graphs of one kind of step: ``plain`` for steps whose rows have no LoRA adapter, ``lora`` for the others."""

    plain: G
    lora: G | None  # None: the engine has no adapters

    @classmethod
    def build(cls, build: Callable[[StepParts], G], plain: StepParts, lora: StepParts | None) -> Graphs[G]:
        """Build both from their parts; without ``lora`` there are plain ones alone."""
        return cls(build(plain), build(lora) if lora is not None else None)

    def of(self, has_lora: bool) -> G:
        """The graphs of a step that has rows with adapters, or none."""
        if not has_lora:
            return self.plain
        assert self.lora is not None, "rows with adapters in an engine without"
        return self.lora

    def all(self) -> tuple[G, ...]:
        """All sets of graphs: both, or the only one."""
        return (self.plain,) if self.lora is None else (self.plain, self.lora)
