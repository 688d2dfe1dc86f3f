"""Attention: inputs of a decode step, rotary positions, the KV cache."""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata, DecodeStep
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.dispatch import backend_for


def decode_inputs(
    rows: Tensor,
    last_tokens: Tensor,
    num_computed: Tensor,
    num_kv_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> DecodeStep:
    """Inputs of a step in which each of ``rows`` int64 [R] computes its last token. Adds 1 to their ``num_computed``.

    ``last_tokens``, ``num_computed``, ``num_kv_tokens`` int64 [S] and ``block_tables`` int32 [groups, S, max_blocks],
    one of each group of layers, are the contiguous state that rows point into. Positions below ``num_kv_tokens`` are
    not written again. Rows are distinct except for -1, which is padding and changes nothing; the last row of the state
    belongs to no sequence.
    """
    return backend_for(rows).decode_inputs(rows, last_tokens, num_computed, num_kv_tokens, block_tables, block_size)


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Split ``qkv [T, (Hq + 2 Hkv) D]``, norm and rotate q and k, write k and v to the cache; returns ``q [T, Hq, D]``.

    ``q_norm_weight`` and ``k_norm_weight [D]`` add an RMS norm of each head (Qwen3). ``cos_sin_cache [positions,
    rot_dim]`` float32 holds the cosines in its first half and the sines in its second; the first ``rot_dim`` elements
    of a head are rotated, halves paired (GPT-NeoX style); with None nothing is rotated. Row t goes to slot
    ``slot_mapping[t]`` (int64, block * block_size + offset); -1 writes nothing. ``positions`` is int64 ``[T]``. An
    fp8 (e4m3) cache holds ``k / k_scale`` and ``v / v_scale``, clamped to +-448. Raises ValueError for a ``rot_dim``
    that is odd or above D.
    """
    if cos_sin_cache is not None and (cos_sin_cache.shape[1] > head_size or cos_sin_cache.shape[1] % 2):
        raise ValueError(
            f"cos_sin_cache: {cos_sin_cache.shape[1]} elements of a head cannot be rotated; "
            f"use an even number up to head_size={head_size}"
        )
    return backend_for(qkv).rope_and_cache(
        qkv,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_size,
        q_norm_weight,
        k_norm_weight,
        eps,
        k_scale,
        v_scale,
    )


def paged_attention(
    q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions, limit: Tensor | None = None
) -> Tensor:
    """Causal attention of every row of ``q [T, Hq, D]`` over its sequence's blocks; returns ``[T, Hq, D]`` in q.dtype.

    Row i of sequence r has position ``seq_lens[r] - query_len[r] + i`` and attends to the positions up to its own that
    ``options`` let it see. Decode and prefill rows may be mixed. Padding rows (``metadata.num_actual_tokens`` and
    later) give zeros. ``limit`` int32 ``[T]``: the last position that a row attends to instead of its own, which it
    never lies before (encoders, images). Those at or past the end of the sequence do not count.
    """
    return backend_for(q).paged_attention(q, kv_cache, metadata, options, limit)


def latent_queries(
    q: Tensor,
    latent: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    key_weight: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Queries of multi-head latent attention (DeepSeek V2); writes what is kept of each token to the cache.

    ``latent [T, L + R]`` is a token's latent, of which all heads' keys and values are made, and its rotary key. The
    cache ``[1, num_blocks, 1, block_size, L + R]`` gets the RMS norm of the first (``norm_weight [L]``) and the second
    rotated. ``q [T, Hq, N + R]``: instead of making keys ``[Hq, N]`` of each latent, the first N are multiplied with
    ``key_weight [Hq, N, L]``; the last R are rotated. Returns ``[T, Hq, L + R]``. ``cos_sin_cache [positions, R]``, and
    what else is here, as in `rope_and_cache`.
    """
    return backend_for(q).latent_queries(
        q, latent, positions, cos_sin_cache, kv_cache, slot_mapping, key_weight, norm_weight, eps
    )


def latent_attention(
    queries: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, value_weight: Tensor
) -> Tensor:
    """Causal attention of every row of ``queries [T, Hq, L + R]`` to the latents of its sequence, as `paged_attention`;
    sums of latents ``[L]`` become values by ``value_weight [Hq, L, V]``: returns ``[T, Hq, V]``."""
    return backend_for(queries).latent_attention(queries, kv_cache, metadata, scale, value_weight)


def varlen_attention(
    qkv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of whole sequences without a KV cache, in which every row sees its whole sequence: ``[T, Hq D]``.

    ``qkv [T, (Hq + 2 Hkv) D]`` holds S sequences one after the other: r is ``seq_lens[r]`` rows from
    ``query_start_loc[r]`` on (int32 [S], [S + 1]). With a ``window`` a row sees the rows less than that many away, on
    both sides. Rows of padding, after the last sequence, give zeros.
    """
    return backend_for(qkv).varlen_attention(
        qkv, query_start_loc, seq_lens, num_heads, num_kv_heads, head_size, scale, window
    )


def rope_(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, num_heads: int, head_size: int) -> None:
    """Rotate the first ``num_heads`` heads of each row ``x [T, ...]`` in place, as `rope_and_cache` does its own.

    Raises ValueError for a table of rotations that does not fit a head.
    """
    if cos_sin_cache.shape[1] > head_size or cos_sin_cache.shape[1] % 2:
        raise ValueError(f"cos_sin_cache: {cos_sin_cache.shape[1]} elements of a head of {head_size} cannot be rotated")
    backend_for(x).rope_(x, positions, cos_sin_cache, num_heads, head_size)


def copy_blocks(blocks: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks of ``blocks [num_blocks, ...]``: ``pairs [n, 2]`` int64 of (source, destination).

    All reads happen before all writes, so a block may be a source and a destination in one call.
    """
    backend_for(blocks).copy_blocks(blocks, pairs)
