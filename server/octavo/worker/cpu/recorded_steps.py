"""Steps of a quantised model on a CPU, recorded once and then replayed.

The CPU's counterpart of CUDA graphs: a step of a small model is hundreds of short operations, and starting each from
Python takes as long as computing it. One program serves steps of all sizes: the layers for all rows, the head for those
that get a token, and the best token of each. Where hidden states are wanted for more than that, one program runs the
layers up to the last attention and another what follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

import octavo_kernels
from octavo.layers.attention import ForwardContext, StepImages
from octavo.layers.decoder import DeferredHidden
from octavo.models.base import CausalLM
from octavo.models.state_reader import StateReader
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.sequence_states import empty_metadata, fill_metadata
from octavo.worker.step import Logits, StepDraw
from octavo_kernels import AttentionMetadata, LayerState
from octavo_kernels.attention_metadata import for_groups
from octavo_kernels.cpu import Arena, Best, DecodeInputs, Program, RecordingError, record, unavailable_reason

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RecordedSteps:
    """Results are valid until the next call, and None when this model's steps cannot be recorded."""

    def __init__(
        self,
        model: CausalLM,
        batch: InputBatch,
        kv_caches: list[Tensor],
        max_rows: int,
        max_logits: int,
        reader: StateReader | None = None,
        arena: Arena | None = None,
        states: Sequence[LayerState] = (),
    ) -> None:
        """``max_rows``: maximum number of tokens per step; ``max_logits``: of those that have logits; ``reader``: what
        guesses from the states of all tokens. ``arena``: shared with steps that are not replayed in between;
        ``states``: of recurrent layers."""
        self._layer_states = states
        self._model, self._kv_caches, self._reader = model, kv_caches, reader
        self._max_logits = max_logits
        # More rows than logits: by its size a program knows whether a tensor has a row a token or a row a sequence.
        self._inputs = RecordedInputs(max(max_rows, self._max_logits + 1), batch)
        self._indices = torch.empty(self._max_logits, dtype=torch.int64)
        self._wants_logits = torch.ones(1, dtype=torch.int64)
        self._written = self._indices.numpy(), self._wants_logits.numpy()
        self.arena = arena or Arena()
        self._step: Program[list[Tensor]] | None = None
        self._image_step: Program[list[Tensor]] | None = None
        self._last: Program[list[Tensor]] | None = None  # of the two, the one that ran last
        self._best: dict[bool, list[np.ndarray]] = {}  # of each
        self._images: RecordedImages | None = None  # once there is one
        self._layers: Program[list[Tensor]] | None = None
        self._head: Program[Tensor] | None = None
        self._head_rows: list[Tensor] = []
        # The obstacle to recording steps; None: there is none.
        self.obstacle = obstacle_to_recording(model.row_multiple)
        self._received: list[Tensor] = []  # from the stage before

    @property
    def can_record(self) -> bool:
        """True if steps are recorded, as far as is known before one is."""
        return self.obstacle is None

    def decode(
        self, rows: np.ndarray, wants_logits: bool, counts: np.ndarray | None = None, draw: StepDraw | None = None
    ) -> Logits | None:
        """A step in which each of the sequences ``rows`` int64 [R] computes one token, or ``counts`` int64 [R], and all
        of them have logits. With ``draw``, tokens are drawn from the logits in the same program."""
        total = len(rows) if counts is None else int(counts.sum())
        if not self.can_record or total > self._max_logits:
            return None
        self._inputs.fill_rows(rows, counts)
        return self._replay(total, len(rows), np.arange(total), wants_logits, draw=draw)

    def receive(self, states: Sequence[Tensor]) -> None:
        """Have the next step go on from the ``states [T, ...]`` of the stage before."""
        if not self._received:
            self._received = [state.new_empty(len(self._inputs.positions), state.shape[1]) for state in states]
        for ours, theirs in zip(self._received, states, strict=True):
            ours[: len(theirs)] = theirs

    def run_to_logits(self, step: StepInputs, indices: np.ndarray, wants_logits: bool) -> Logits | None:
        """Run any step. Returns the best next tokens of its tokens ``indices`` int64 [R], one at least, and logits if
        wanted."""
        total, sequences = step.num_tokens, len(step.seq_lens)
        if not self.can_record or total > len(self._inputs.positions) or len(indices) > self._max_logits:
            return None
        self._inputs.fill(step)
        if step.images is not None:
            self._fill_images(step, step.images)
        return self._replay(total, sequences, indices, wants_logits, step.images is not None)

    def _fill_images(self, step: StepInputs, images: StepImages) -> None:
        total = step.num_tokens
        x = self._model.model.embed(step.input_ids[:total], step.rotary_positions[:total])
        if self._images is None:
            self._images = RecordedImages(images, x, len(self._inputs.positions))
        self._images.fill(images, x)

    def run(self, step: StepInputs) -> DeferredHidden | None:
        """The layers of any step up to the last attention."""
        total, sequences = step.num_tokens, len(step.seq_lens)
        if not self.can_record or total > len(self._inputs.positions):
            return None
        self._inputs.fill(step)
        return self._replay_layers(total, sequences)

    def run_decode(self, rows: np.ndarray) -> DeferredHidden | None:
        """Do what `run` does, for a step in which each of the sequences ``rows`` int64 [R] computes one token."""
        if not self.can_record:
            return None
        self._inputs.fill_rows(rows)
        return self._replay_layers(len(rows), len(rows))

    def _replay_layers(self, total: int, sequences: int) -> DeferredHidden | None:
        if self._layers is None:
            self._layers = self._record(lambda: [*self._run_layers(*self._received)])
            if self._layers is None:
                return None
        self._layers.replay(*self._rows(total), sequences=sequences)
        return tuple(tensor[:total] for tensor in self._layers.outputs)

    def _rows(self, total: int) -> tuple[int, ...]:
        """Row counts of the step and, if there are replicas, of all of them together: experts compute these."""
        replicas = self._model.tp.replicas
        return (total,) if replicas is None else (total, replicas.total)

    def compute_logits(self, hidden: DeferredHidden) -> Tensor | None:
        """Logits float32 [R, vocabulary] from R rows of what `run` returned."""
        rows = len(hidden[0])
        if not self.can_record or rows > self._max_logits:
            return None
        if self._head is None:
            self._head_rows = [tensor.new_empty(self._max_logits, tensor.shape[1]) for tensor in hidden]
            self._head = self._record(self._run_head)
            if self._head is None:
                return None
        for ours, theirs in zip(self._head_rows, hidden, strict=True):
            ours[:rows] = theirs
        self._head.replay(rows)
        return self._head.outputs[:rows]

    def _replay(
        self,
        rows: int,
        sequences: int,
        indices: np.ndarray,
        wants_logits: bool,
        has_images: bool = False,
        draw: StepDraw | None = None,
    ) -> Logits | None:
        step = self._image_step if has_images else self._step
        if step is None:
            images = self._images if has_images else None
            received = self._received if images is None else [images.embeds]
            step = self._record(lambda: self._run_whole_step(*received, images=images.of_step if images else None))
            if step is None:
                return None
            self._best[has_images] = [output.numpy() for output in step.outputs[1:3]]
            if has_images:
                self._image_step = step
            else:
                self._step = step
        self._last = step
        self._written[0][: len(indices)] = indices
        self._written[1][0] = wants_logits
        logits, index, value, maxima = step.outputs[:4]
        best = Best(index, value, maxima if len(maxima) else None)
        then = draw.pack(logits, best) if draw is not None and wants_logits else b""
        step.replay(*self._rows(rows), len(indices), sequences=sequences, then=then)
        if draw is not None and then:
            return Logits(logits, best, drawn=draw.read())
        if not wants_logits:
            token_ids, values = (array[: len(indices)].tolist() for array in self._best[has_images])
            return Logits(logits, None, (token_ids, values))
        some = slice(len(indices))
        return Logits(logits[some], best.take(some))

    @property
    def states(self) -> Tensor:
        """The input of ``reader`` from the whole step that ran last, ``[T, H]`` and more rows."""
        assert self._last is not None
        return self._last.outputs[4]

    def _run_whole_step(self, *received: Tensor, images: StepImages | None = None) -> list[Tensor]:
        deferred = self._run_layers(*received, images=images)
        if self._reader is None:
            some = [octavo_kernels.embedding(self._indices, tensor) for tensor in deferred]
            with self._for_logits():
                return self._find_best(self._model.finish(*some))
        hidden = self._model.finish(*deferred)
        states = self._reader.read(self._model, deferred, hidden)
        hidden = octavo_kernels.embedding(self._indices, hidden)
        return [*self._find_best(hidden), states]

    def _find_best(self, hidden: Tensor) -> list[Tensor]:
        logits, best = self._model.lm_head.find_best(hidden, self._wants_logits)
        return [logits, best.token_ids, best.values, logits.new_empty(0) if best.maxima is None else best.maxima]

    def _run_layers(self, *received: Tensor, images: StepImages | None = None) -> DeferredHidden:
        inputs, states = self._inputs, self._layer_states
        context = ForwardContext(inputs.metadata, self._kv_caches, images, states, inputs.state)
        with self._for_tokens():
            return self._model.begin(self._inputs.input_ids, self._inputs.positions, context, *received)

    def _run_head(self) -> Tensor:
        with self._for_logits():
            return self._model.compute_logits(self._model.finish(*self._head_rows))

    def _for_tokens(self) -> AbstractContextManager[None]:
        """A context for the computation of every token, and (below) of those that have logits."""
        return nullcontext()

    def _for_logits(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def _most_rows(self) -> Iterator[None]:
        """Steps are recorded with as many rows as there may be, on all replicas."""
        replicas = self._model.tp.replicas
        if replicas is None:
            yield
            return
        rows = replicas.rows
        replicas.set_rows([len(self._inputs.positions)] * replicas.ranks)
        try:
            yield
        finally:
            replicas.set_rows(rows)

    def _record(self, step: Callable[[], T]) -> Program[T] | None:
        if self.can_record:
            try:
                with self._most_rows():
                    return record(step, self.arena)
            except RecordingError as error:
                logger.info("steps are not recorded, each operation is called from Python: %s", error)
                self.obstacle = str(error)
        return None


def obstacle_to_recording(row_multiple: int) -> str | None:
    """Explain why steps of a model with that ``row_multiple`` cannot be recorded here; None: they can, as far as is
    known."""
    if unavailable_reason() is not None:
        return "there are no CPU kernels"
    if row_multiple != 1:  # rows are padded for torch itself
        return "linear layers run in torch"
    return None


class RecordedInputs:
    """A step's inputs in memory that stays, for as many rows as a step may have."""

    def __init__(self, max_rows: int, batch: InputBatch) -> None:
        num_groups, max_num_reqs, max_blocks = batch.block_tables.shape
        block_tables = torch.empty(num_groups, max_num_reqs, max_blocks, dtype=torch.int32)
        slots = torch.empty(num_groups, max_rows, dtype=torch.int64)
        self.input_ids = torch.empty(max_rows, dtype=torch.int64)
        self.positions = torch.empty(max_rows, dtype=torch.int64)
        first = AttentionMetadata(
            query_start_loc=torch.empty(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=torch.empty(max_num_reqs, dtype=torch.int32),
            block_table=block_tables[0],
            slot_mapping=slots[0],
            max_query_len=max_rows,
            max_seq_len=max_blocks * batch.block_size,
            num_actual_tokens=max_rows,
        )
        self.metadata = for_groups(first, block_tables, slots)
        self._batch = batch
        self.state = None
        if batch.states is not None:
            self.state = empty_metadata(batch.states, first.query_start_loc)
        self._rows: DecodeInputs | None = None

    def fill_rows(self, rows: np.ndarray, counts: np.ndarray | None = None, ahead: int = 0) -> None:
        """A step of ``counts`` int64 [R] tokens, one of each by default, of the sequences ``rows`` int64 [R], as
        `StepInputs` has it: at once, since each operation of numpy takes 5 us, and of torch 50 us, when a step has
        emptied the caches. ``ahead``: the tokens are those so many places further on."""
        if self._rows is None:
            batch = self._batch
            self._rows = DecodeInputs(
                batch.num_computed,
                batch.num_kv_tokens,
                batch.token_ids,
                batch.block_tables,
                batch.block_size,
                self.input_ids,
                self.positions,
                self.metadata,
            )
        self._rows.fill(rows, counts, ahead)
        if self.state is not None and self._batch.states is not None:
            computed = self._batch.num_computed[rows]
            fill_metadata(self.state, self._batch.states.metadata(rows, computed, self.state.query_start_loc))
        if self._batch.position_shifts:
            deltas = self._batch.position_deltas[rows]  # such steps are beyond all images
            deltas = deltas if counts is None else deltas.repeat(counts)
            self.positions.numpy()[: len(deltas)] += deltas

    def fill(self, step: StepInputs) -> None:
        """Fill in the inputs of ``step``."""
        total, first = step.num_tokens, step.metadata[0]
        count, columns = first.block_table.shape
        self.input_ids[:total], self.positions[:total] = step.input_ids[:total], step.rotary_positions[:total]
        self.metadata[0].query_start_loc[: count + 1] = first.query_start_loc
        self.metadata[0].seq_lens[:count] = first.seq_lens
        if self.state is not None and step.state is not None:
            fill_metadata(self.state, step.state)
        for ours, theirs in zip(self.metadata, step.metadata, strict=True):
            ours.slot_mapping[:total] = theirs.slot_mapping[:total]
            ours.block_table[:count, :columns] = theirs.block_table


class RecordedImages:
    """Images' changes to a step, in memory that stays, for as many rows as a step may have."""

    def __init__(self, images: StepImages, x: Tensor, max_rows: int) -> None:
        """Allocate for the same kinds as in ``images``; ``x [T, H]`` enters the first layer."""
        self.embeds = x.new_empty(max_rows, x.shape[1])
        limit, cos_sin = (
            None if one is None else one.new_empty(max_rows, *one.shape[1:]) for one in (images.limit, images.cos_sin)
        )
        self.of_step = StepImages(
            None,
            None,
            tuple(torch.empty_like(self.embeds) for _ in images.deep),
            limit,
            cos_sin=cos_sin,
            order=torch.arange(max_rows),
        )

    def fill(self, images: StepImages, x: Tensor) -> None:
        """Fill in a step's embeddings ``x [T, H]`` of tokens, and ``images`` among them."""
        total, rows = len(x), images.rows
        assert rows is not None and images.embeds is not None
        self.embeds[:total] = x
        self.embeds[rows] = images.embeds
        for ours, theirs in zip(self.of_step.deep, images.deep, strict=True):
            ours[:total] = 0
            ours[rows] = theirs
        for one, other in ((self.of_step.limit, images.limit), (self.of_step.cos_sin, images.cos_sin)):
            if one is not None and other is not None:
                one[:total] = other[:total]
