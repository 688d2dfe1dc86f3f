"""How much memory a step takes at most, by running one on nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

import octavo_kernels
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.worker.model_runner import PROMPT_LOGPROBS_ROWS
from octavo_kernels import AttentionMetadata, SamplingRows, SamplingTable


@torch.inference_mode()
def run_step(
    model: CausalLM,
    specs: list[KVCacheSpec],
    scheduler: SchedulerConfig,
    block_size: int,
    device: torch.device,
    decodes: int,
    prompts: int,
    sampled: int,
) -> None:
    """A step of ``decodes`` tokens of one sequence each and ``prompts`` tokens of prompts, then ``sampled`` logits and
    draws. What attention sets aside is for sequences of max_model_len.

    It reads the null block and writes nothing; what it computes has no meaning, what it takes does.
    """
    tokens, longest = decodes + prompts, scheduler.max_model_len
    caches = [
        torch.zeros(2, 2, s.num_kv_heads, block_size, s.head_size, dtype=getattr(torch, s.dtype), device=device)
        for s in specs
    ]
    starts = [*range(decodes), *range(decodes, tokens, longest), tokens]
    queries = torch.tensor(starts, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        query_start_loc=queries,
        seq_lens=queries.diff(),
        block_table=torch.zeros(len(starts) - 1, -(-longest // block_size), dtype=torch.int32, device=device),
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        max_query_len=max(1, min(prompts, longest)),
        max_seq_len=longest,
        num_actual_tokens=tokens,
    )
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device) % longest
    hidden = model(ids, positions, ForwardContext(metadata, caches))
    rows = torch.arange(sampled, device=device)
    logits = model.compute_logits(hidden[rows % tokens])
    table = SamplingTable(
        temperature=torch.ones(sampled, device=device),
        top_k=torch.full((sampled,), logits.shape[1], device=device),
        top_p=torch.full((sampled,), 0.9, dtype=torch.float64, device=device),
        min_p=torch.zeros(sampled, dtype=torch.float64, device=device),
        streams=torch.zeros(sampled, dtype=torch.int64, device=device),
    )
    octavo_kernels.sample(logits, SamplingRows(table, rows, rows, truncated=True))


def largest_step(
    model: CausalLM, specs: list[KVCacheSpec], scheduler: SchedulerConfig, block_size: int, device: torch.device
) -> None:
    """``max_num_batched_tokens`` tokens: of each sequence but one a single token, the rest of a prompt. Prompts'
    log-probabilities may ask for more logits than there are sequences."""
    tokens = scheduler.max_num_batched_tokens
    decodes = min(scheduler.max_num_seqs, tokens) - 1
    sampled = max(scheduler.max_num_seqs, PROMPT_LOGPROBS_ROWS)
    run_step(model, specs, scheduler, block_size, device, decodes, tokens - decodes, sampled)


def decode_step(
    model: CausalLM,
    specs: list[KVCacheSpec],
    scheduler: SchedulerConfig,
    block_size: int,
    device: torch.device,
    size: int,
) -> None:
    """A step of ``size`` sequences of one token each, the largest that is captured."""
    run_step(model, specs, scheduler, block_size, device, size, 0, size)


def prompt_step(
    model: CausalLM,
    specs: list[KVCacheSpec],
    scheduler: SchedulerConfig,
    block_size: int,
    device: torch.device,
    size: int,
) -> None:
    """A prompt beside decodes, ``size`` tokens together, the most with which such a step is captured."""
    decodes = min(scheduler.max_num_seqs, size) - 1
    run_step(model, specs, scheduler, block_size, device, decodes, size - decodes, 1)


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
