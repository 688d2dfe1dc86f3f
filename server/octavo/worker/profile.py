"""How much memory a step takes at most, by running one on nothing."""

from __future__ import annotations

import torch

import octavo_kernels
from octavo.config import SchedulerConfig
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo_kernels import AttentionMetadata, SamplingRows, SamplingTable


@torch.inference_mode()
def largest_step(
    model: CausalLM, specs: list[KVCacheSpec], scheduler: SchedulerConfig, block_size: int, device: torch.device
) -> None:
    """A step of ``max_num_batched_tokens``: one token of the longest sequence there may be and prompts beside it, then
    as many logits and draws as there are sequences.

    It reads the null block and writes nothing; what it computes has no meaning, what it takes does. Its kernels are
    those of any mixed step, so that the first request does not wait for them to be compiled.
    """
    tokens, longest = scheduler.max_num_batched_tokens, scheduler.max_model_len
    caches = [
        torch.zeros(2, 2, s.num_kv_heads, block_size, s.head_size, dtype=getattr(torch, s.dtype), device=device)
        for s in specs
    ]
    length = min(tokens, longest)
    starts = [0, *range(1, tokens, length), tokens]
    seqs = len(starts) - 1
    seq_lens = torch.tensor(starts, dtype=torch.int32, device=device).diff()
    seq_lens[0] = longest
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=seq_lens,
        block_table=torch.zeros(seqs, -(-longest // block_size), dtype=torch.int32, device=device),
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        max_query_len=length,
        max_seq_len=longest,
        num_actual_tokens=tokens,
    )
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device) % length
    hidden = model(ids, positions, ForwardContext(metadata, caches))
    rows = torch.arange(scheduler.max_num_seqs, device=device)
    logits = model.compute_logits(hidden[rows % tokens])
    table = SamplingTable(
        temperature=torch.ones(len(rows), device=device),
        top_k=torch.full((len(rows),), logits.shape[1], device=device),
        top_p=torch.full((len(rows),), 0.9, dtype=torch.float64, device=device),
        min_p=torch.zeros(len(rows), dtype=torch.float64, device=device),
        streams=torch.zeros(len(rows), dtype=torch.int64, device=device),
    )
    octavo_kernels.sample(logits, SamplingRows(table, rows, rows, truncated=True))


def activation_peak(
    model: CausalLM, specs: list[KVCacheSpec], scheduler: SchedulerConfig, block_size: int, device: torch.device
) -> int:
    """Bytes that `largest_step` takes on a CUDA device beyond what is allocated now."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_step(model, specs, scheduler, block_size, device)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
