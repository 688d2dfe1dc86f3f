"""The memory that a step takes at most, measured by running one on dummy inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import EngineConfig, SchedulerConfig
from octavo.interface.kv_cache_layout import KVCacheLayout
from octavo.layers.attention import ForwardContext
from octavo.loader.lora import ModelAdapters
from octavo.memory.capture_sizes import decode_sizes, draft_sizes, drafter_sizes, prefill_sizes, result_bytes
from octavo.memory.images import largest_image
from octavo.models.base import CausalLM, Model
from octavo.models.state_reader import StateReader
from octavo.worker.image_encoder import ImageEncoder
from octavo.worker.kv_cache import allocate_kv_cache
from octavo.worker.prompt_logprobs import MAX_LOGITS_ROWS
from octavo_kernels import AttentionMetadata, SamplingRows, SamplingTable


@dataclass(frozen=True)
class DummySteps:
    """Steps that read the null block and write nothing. Their results have no meaning."""

    model: CausalLM
    layout: KVCacheLayout
    scheduler: SchedulerConfig
    device: torch.device
    first_layer: int = 0  # of the layout's: the model's first one
    reader: StateReader | None = None  # what guesses from the steps' states, and its first layer
    readers_layer: int = 0
    adapters: ModelAdapters | None = None  # that rows may have: they take those of empty slots
    images: ImageEncoder | None = None  # of prompts that are nothing else

    def run_largest(self) -> None:
        """``max_num_batched_tokens`` tokens: one of each sequence but the last, whose prompt takes the rest. Prompts'
        log-probabilities may take more logits than there are sequences."""
        tokens = self.scheduler.max_num_batched_tokens
        decodes = min(self.scheduler.max_num_seqs, tokens) - 1
        self._run(decodes, tokens - decodes, max(self.scheduler.max_num_seqs, MAX_LOGITS_ROWS), images=self.images)

    def run_decode(self, size: int) -> None:
        """``size`` sequences of one token each."""
        self._run(size, 0, size)

    def run_drafts(self, size: int, num_drafts: int) -> None:
        """``size`` tokens of sequences with ``num_drafts`` each, and places for as many sequences as may be."""
        self._run(size, 0, size, num_drafts + 1)

    def run_prefill(self, size: int) -> None:
        """A prompt beside decodes, ``size`` tokens together."""
        decodes = min(self.scheduler.max_num_seqs, size) - 1
        self._run(decodes, size - decodes, 1)

    @torch.inference_mode()
    def _run(self, decodes: int, prompt: int, sampled: int, width: int = 1, images: ImageEncoder | None = None) -> None:
        """``decodes`` tokens, ``width`` of each sequence, ``prompt`` tokens of prompts, ``sampled`` logits and draws.
        Attention's scratch memory is for sequences of max_model_len."""
        device, tokens, longest = self.device, decodes + prompt, self.scheduler.max_model_len
        kv_cache = allocate_kv_cache(self.layout, 2, device)
        kv_cache.blocks.zero_()
        starts = [*range(0, decodes, width), *range(decodes, tokens, longest), tokens]
        if width > 1:
            starts += [tokens] * (min(self.scheduler.max_num_seqs, tokens) + 1 - len(starts))
        queries = torch.tensor(starts, dtype=torch.int32, device=device)
        max_blocks = -(-longest // self.layout.block_size)
        metadata = AttentionMetadata(
            query_start_loc=queries,
            seq_lens=queries.diff(),
            block_table=torch.zeros(len(starts) - 1, max_blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            max_query_len=max(width, min(prompt, longest)),
            max_seq_len=longest,
            num_actual_tokens=tokens,
        )
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        positions = torch.arange(tokens, device=device) % min(longest, self.model.config.max_model_len)
        context = ForwardContext([metadata] * len(self.layout.groups), kv_cache.layers[self.first_layer :])
        if images is not None:
            context.images = images.outline_of_step(tokens, decodes)
        with self._applied(tokens):
            deferred = self.model.begin(ids, positions, context)
            hidden = self.model.finish(*deferred)
        rows = torch.arange(sampled, device=device)
        with self._applied(sampled):
            logits = self.model.compute_logits(hidden[rows % tokens])
        self._sample(logits, rows)
        if self.reader is not None:
            context = replace(context, kv_caches=kv_cache.layers[self.readers_layer :])
            states = self.reader.read(self.model, deferred, hidden)
            states = self.reader.predict(ids, states, positions, context)
            self._sample(self.reader.guess(states[rows % tokens], 0), rows)

    def _applied(self, count: int) -> AbstractContextManager[None]:
        if self.adapters is None:
            return nullcontext()
        return self.adapters.applied(torch.zeros(count, dtype=torch.int32, device=self.device))

    def _sample(self, logits: Tensor, rows: Tensor) -> None:
        sampled, device = len(rows), self.device
        table = SamplingTable(
            temperature=torch.ones(sampled, device=device),
            top_k=torch.full((sampled,), logits.shape[1], device=device),
            top_p=torch.full((sampled,), 0.9, dtype=torch.float64, device=device),
            min_p=torch.zeros(sampled, dtype=torch.float64, device=device),
            streams=torch.zeros(sampled, dtype=torch.int64, device=device),
        )
        octavo_kernels.sample(logits, SamplingRows(table, rows, rows, truncated=True))


@dataclass(frozen=True)
class StepModels:
    """The models that a step runs, and where their layers are."""

    model: CausalLM
    layout: KVCacheLayout
    num_layers: int  # of the model; those after them are the drafter's
    drafter: Model | None = None
    adapters: ModelAdapters | None = None
    images: ImageEncoder | None = None


@dataclass(frozen=True)
class Peaks:
    """Bytes that steps take beside weights and the KV cache."""

    activations: int
    graphs: int
    encoder: int


def measure_peaks(config: EngineConfig, models: StepModels, device: torch.device, captures: bool) -> Peaks:
    """Run the largest steps on ``device``. ``captures``: steps are captured in graphs, which keep memory."""
    scheduler, drafter, num_layers = config.scheduler, models.drafter, models.num_layers
    reader = drafter if isinstance(drafter, StateReader) else None
    steps = DummySteps(
        models.model,
        models.layout,
        scheduler,
        device,
        reader=reader,
        readers_layer=num_layers,
        adapters=models.adapters,
        images=models.images,
    )
    drafting: DummySteps | None = None
    if isinstance(drafter, CausalLM) and reader is None:
        drafting = DummySteps(drafter, models.layout, scheduler, device, num_layers)
    activations = max(peak_of(each.run_largest, device) for each in (steps, drafting) if each is not None)
    graphs = _graph_bytes(config, steps, drafting) if captures else 0
    encoder, largest = 0, largest_image(config)
    if models.images is not None and largest is not None:
        encoder = peak_of(partial(models.images.run_outline, largest.tensors), device)
    return Peaks(activations, graphs, encoder)


def _graph_bytes(config: EngineConfig, steps: DummySteps, drafting: DummySteps | None) -> int:
    """Intermediate tensors of the largest step, which the others share; results of all; the driver's part."""
    multiple, most = steps.model.row_multiple, config.speculative.num_speculative_tokens
    sizes, prefills = decode_sizes(config, multiple), prefill_sizes(config)
    drafts, guesses = draft_sizes(config, multiple), drafter_sizes(config, multiple)
    largest = [partial(steps.run_decode, sizes[-1])]
    if drafts:
        largest.append(partial(steps.run_drafts, drafts[-1], most))
    if drafting is not None:
        largest.append(partial(drafting.run_drafts, 2 * guesses[-1], 1))
    if prefills:
        largest.append(partial(steps.run_prefill, prefills[-1]))
    return max(peak_of(run, steps.device) for run in largest) + result_bytes(config, sizes + drafts, prefills, guesses)


def peak_of(step: Callable[[], None], device: torch.device) -> int:
    """Bytes that ``step`` takes on a CUDA device beyond what is allocated now."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
