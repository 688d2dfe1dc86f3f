"""Paged attention: the choice of kernels for a step, and their launches."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.triton import attention_configs as configs
from octavo_kernels.triton.attention_decode import decode_attention, reduce_chunks
from octavo_kernels.triton.attention_plan import LANES, plan_decode
from octavo_kernels.triton.attention_prefill import prefill_attention
from octavo_kernels.triton.dependent_launch import pdl_options
from octavo_kernels.triton.devices import facts

_LOG2_E = math.log2(math.e)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    limit: Tensor | None = None,
) -> Tensor:
    """See `octavo_kernels.paged_attention`. Raises ValueError for shapes and dtypes that are not supported."""
    check_attention(q, kv_cache, options.scale_of(q.shape[2]))
    return attend_pages(q, kv_cache, metadata, options, limit)


def _flags(options: AttentionOptions, limit: Tensor | None, turned: int) -> dict[str, bool | int]:
    """The constants of kernels that attend."""
    return {
        "HAS_WINDOW": options.window is not None,
        "CHUNKED": options.chunked,
        "HAS_SOFTCAP": bool(options.softcap),
        "HAS_SINKS": options.sinks is not None,
        "HAS_LIMIT": limit is not None,
        "TURNED": turned,
        "TURNED_PAD": max(16, configs.next_power_of_2(turned)),
    }


def attend_pages(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    limit: Tensor | None = None,
    turned: int = 0,
) -> Tensor:
    """Attention of ``q [T, Hq, D]``. Reads no tensor on the host, so it can be captured in a graph.

    ``turned``: so many elements of keys follow those that are values, too; the cache has no values of its own.

    Sequences of at most `configs.MAX_DECODE_QUERIES` new tokens are for the decode kernel, which splits their keys, the
    others for the prefill kernel. Programs choose their sequences by the lengths; a step may have both kinds.
    """
    num_rows, num_heads, head_size = *q.shape[:2], q.shape[2] - turned
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    if q.stride(-1) != 1:
        q = q.contiguous()
    out = q.new_empty((num_rows, num_heads, head_size))
    num_seqs = metadata.seq_lens.shape[0]
    if not num_rows:
        return out
    if not num_seqs:
        return out.zero_()
    group = num_heads // num_kv_heads
    head_pad = max(16, configs.next_power_of_2(head_size))
    exact = q.dtype == torch.float32
    kinds = (configs.LATENT if turned else max(64, head_pad), q.dtype, kv_cache.dtype, group, facts(q.device))
    max_queries = configs.MAX_DECODE_QUERIES
    longest = metadata.max_query_len
    decode = configs.decode_config(*kinds, tokens=longest if longest <= max_queries else None)
    splits = configs.splits(q.device)
    most = min(longest, max_queries)
    short_seqs, short_rows = _short(metadata, num_rows, max_queries)
    tiles = min(short_seqs * -(-most // (decode.block_m // group)), num_rows)
    # No sequence has more chunks than the longest possible one has chunks of the smallest size.
    items = tiles * -(-metadata.max_seq_len // (configs.EXACT_CHUNK if exact else splits.min_chunk))
    if not exact:
        items = min(items, tiles + splits.programs // num_kv_heads)
    elif items * num_kv_heads * decode.block_m * head_pad * 4 > configs.EXACT_SCRATCH:
        # A graph for long sequences: the prefill kernel adds the same chunks in the same order, without scratch memory.
        max_queries, items = 0, 0
        short_seqs, short_rows = _short(metadata, num_rows, max_queries)

    starts, seq_lens, table = metadata.query_start_loc, metadata.seq_lens, metadata.block_table
    rows = min(metadata.num_actual_tokens, num_rows)
    window, softcap, sinks = options.window, options.softcap, options.sinks
    factor = options.scale_of(head_size) * options.k_scale
    log2_scale = factor * _LOG2_E
    if softcap:
        factor, log2_scale = factor / softcap, softcap * _LOG2_E
    # The compiler may not fuse products and sums where results are promised bit for bit.
    head = {"GROUP": group, "HEAD_SIZE": head_size, "HEAD_PAD": head_pad, "enable_fp_fusion": not exact}
    chunk = {"FIXED_CHUNK": configs.EXACT_CHUNK if exact else 0}
    tile = {
        **head,
        **chunk,
        "BLOCK_SIZE": block_size,
        **_flags(options, limit, turned),
        "PRECISION": "ieee" if exact else "tf32",
    }
    scales = (factor, log2_scale, options.v_scale)
    sinks_of, limit_of = (q if sinks is None else sinks), (q if limit is None else limit)
    strides = (*q.stride()[:2], *kv_cache.stride()[:4], table.stride(0))
    if longest > max_queries:
        prefill = configs.prefill_config(*kinds)
        prompt_tiles = _prompt_tiles(metadata, num_rows, max_queries, prefill.block_m)
        prefill_attention[(num_heads, prompt_tiles)](
            q,
            kv_cache,
            out,
            starts,
            seq_lens,
            table,
            sinks_of,
            limit_of,
            num_seqs,
            rows,
            max_queries,
            window or 0,
            *scales,
            *strides,
            NUM_HEADS=num_heads,
            BLOCK_M=prefill.block_m,
            BLOCK_N=prefill.block_n,
            SEQS=_padded_seqs(num_seqs),
            **prefill.launch(),
            **tile,
        )
    if short_rows < num_rows:
        out[rows:].zero_()  # padding rows, which the launches below do not write
    if not short_seqs:
        return out
    splitting = (
        ("TOKENS", decode.block_m // group),
        ("BLOCK_N", decode.block_n),
        ("NUM_KV_HEADS", num_kv_heads),
        ("MIN_CHUNK", splits.min_chunk),
        ("HAS_LIMIT", limit is not None),
        ("CHUNKED", options.chunked),
        *chunk.items(),
    )
    work, row_chunks = _plan(metadata, rows, max_queries, window, splits.programs, items, short_rows, splitting)
    sums = q.new_empty((items, num_kv_heads, decode.block_m, head_pad), dtype=torch.float32)
    maxima, weights = q.new_empty((2, items, num_kv_heads, decode.block_m), dtype=torch.float32)
    rows_of = {"NUM_KV_HEADS": num_kv_heads, "BLOCK_M": decode.block_m}
    if items:
        decode_attention[(items * num_kv_heads,)](
            q,
            kv_cache,
            out,
            sums,
            maxima,
            weights,
            work,
            table,
            sinks_of,
            limit_of,
            window or 0,
            *scales,
            *strides,
            BLOCK_N=decode.block_n,
            **decode.launch(),
            **pdl_options(q.device),
            **rows_of,
            **tile,
        )
    group_pad = configs.next_power_of_2(group)
    block_d = min(head_pad, configs.REDUCED // group_pad)
    reduced = (short_rows, num_kv_heads, head_pad // block_d)
    at_once, reduce_warps = configs.reduction(group_pad * block_d, math.prod(reduced), splits)
    reduce_chunks[reduced](
        out,
        sums,
        maxima,
        weights,
        row_chunks,
        sinks_of,
        options.v_scale,
        GROUP_PAD=group_pad,
        BLOCK_D=block_d,
        BLOCK_C=at_once,
        HAS_SINKS=sinks is not None,
        num_warps=reduce_warps,
        **rows_of,
        **head,
        **chunk,
        **pdl_options(q.device),
    )
    return out


def _plan(
    metadata: AttentionMetadata,
    num_rows: int,
    max_queries: int,
    window: int | None,
    programs: int,
    num_items: int,
    num_planned_rows: int,
    splitting: tuple[tuple[str, int], ...],
) -> tuple[Tensor, Tensor]:
    """The work lists of a step, see `plan_decode`. The first layer makes them."""
    key = (num_rows, max_queries, window, programs, num_items, num_planned_rows, splitting)
    if key not in metadata.plans:
        seq_lens = metadata.seq_lens
        num_seqs = len(seq_lens)
        plan = seq_lens.new_empty(num_items, 8), seq_lens.new_empty(num_planned_rows, 4)
        plan_decode[(num_seqs,)](
            metadata.query_start_loc,
            seq_lens,
            *plan,
            num_seqs,
            num_rows,
            max_queries,
            window or 0,
            programs,
            num_items,
            num_planned_rows,
            HAS_WINDOW=window is not None,
            SEQS=_padded_seqs(num_seqs),
            LANES=LANES,
            **dict(splitting),
            **pdl_options(seq_lens.device),
        )
        metadata.plans[key] = plan
    return metadata.plans[key]


def _prompt_tiles(metadata: AttentionMetadata, num_rows: int, max_queries: int, block_m: int) -> int:
    """The number of tiles of prompts, at least 1; an upper bound if the host has no lengths."""
    starts = metadata.query_start_loc_cpu
    if starts is None:
        return num_rows // block_m + min(metadata.seq_lens.shape[0], num_rows // (max_queries + 1))
    lengths = np.diff(starts)
    return max(1, int((-(-lengths[lengths > max_queries] // block_m)).sum()))


def _short(metadata: AttentionMetadata, num_rows: int, max_queries: int) -> tuple[int, int]:
    """Upper bounds of the number of decoded sequences and of their rows; all if the host has no lengths."""
    starts = metadata.query_start_loc_cpu
    if starts is None:
        return metadata.seq_lens.shape[0], num_rows
    short = np.flatnonzero(np.diff(starts) <= max_queries)
    return len(short), int(starts[short[-1] + 1]) if len(short) else 0


def attention_problem(block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int) -> str | None:
    """Explain why these shapes and dtypes are not supported, beginning with the name of one; None if they are."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype: attention in {dtype} is not supported; use float16, bfloat16 or float32"
    if kv_dtype not in (dtype, configs.FLOAT8):
        return f"kv_cache_dtype: a KV cache in {kv_dtype} does not go with queries in {dtype}"
    if kv_dtype == configs.FLOAT8 and not configs.has_float8():
        return "kv_cache_dtype: an fp8 cache needs a GPU of compute capability 8.9 or more"
    if block_size % 16:
        return f"block_size={block_size} is not a multiple of 16"
    if head_size > 512:
        return f"head_size={head_size} exceeds 512"
    return None


def check_attention(q: Tensor, kv_cache: Tensor, scale: float) -> None:
    """Raise ValueError for queries ``[T, Hq, D]`` and a cache that the kernels do not take."""
    problem = attention_problem(kv_cache.shape[3], q.dtype, kv_cache.dtype, q.shape[2])
    if problem:
        raise ValueError(problem)
    if q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {kv_cache.shape[2]} key/value heads")
    most = 64 if q.shape[2] > 256 else 128
    if q.shape[1] // kv_cache.shape[2] > most:
        raise ValueError(
            f"{q.shape[1]} query heads of size {q.shape[2]} are more than {most} for each of {kv_cache.shape[2]} "
            "key/value heads"
        )
    if kv_cache.stride(4) != 1:
        raise ValueError("the elements of a head must be contiguous in the KV cache")
    if not scale > 0:
        raise ValueError(f"scale={scale} must be greater than 0")


def _padded_seqs(num_seqs: int) -> int:
    """The number of sequences, padded to one of few sizes, so that few kernels are compiled."""
    return max(256, configs.next_power_of_2(num_seqs))
