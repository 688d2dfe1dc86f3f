"""The kernels of the engine: one interface, several backends.

Every function here takes torch tensors and calls the function of the same name in a backend module: ``reference``
(plain torch, which defines the results), ``cpu`` (C) or ``triton`` (CUDA). The device of the tensors decides which one,
unless `select_backend` or the environment variable ``OCTAVO_KERNEL_BACKEND`` names one.

Shapes: T rows (tokens) of a step, H hidden size, Hq query heads, Hkv key/value heads, D head size. The KV cache of one
layer is a tensor ``[2, num_blocks, Hkv, block_size, D]``: index 0 holds keys, 1 holds values. An int8 one has
`kv_scale_bytes` more than D. It may be a view of memory in which the layers of a block lie beside each other.

In float32 every row of a result depends on that row's own data only: not on the number of rows, chunks or requests in
the step, the block size or the number of threads. For ``linear``, which is torch's, this holds on CPUs only and for T a
multiple of 8: the order of cuBLAS's sums depends on T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata, DecodeStep
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.dense import DenseWeight
from octavo_kernels.dispatch import (
    BackendUnavailableError,
    attention_problem,
    available_backends,
    backend_for,
    backend_name,
    can_be_captured,
    check_device,
    kv_scale_bytes,
    select_backend,
)
from octavo_kernels.group_weight import GroupWeight
from octavo_kernels.lora import AdapterTable, RowTiles, SlotMemory, SlotTable
from octavo_kernels.moe import Experts, ExpertTable, StackedWeight
from octavo_kernels.quant import PackedLinear, QuantizedRows
from octavo_kernels.sampling_rows import Constraints, SampledRows, SamplingRows, SamplingTable
from octavo_kernels.scaled_weight import ScaledWeight

__all__ = [
    "AdapterTable",
    "AttentionMetadata",
    "AttentionOptions",
    "BackendUnavailableError",
    "Constraints",
    "DecodeStep",
    "DenseWeight",
    "ExpertTable",
    "Experts",
    "GroupWeight",
    "PackedLinear",
    "QuantizedRows",
    "RowTiles",
    "SampledRows",
    "SamplingRows",
    "SamplingTable",
    "ScaledWeight",
    "SlotMemory",
    "SlotTable",
    "StackedWeight",
    "activate",
    "add",
    "attention_problem",
    "available_backends",
    "backend_name",
    "can_be_captured",
    "check_device",
    "concat",
    "copy_blocks",
    "decode_inputs",
    "dense_embedding",
    "dense_linear",
    "embedding",
    "fused_add_rms_norm",
    "fused_moe",
    "gated_linear_quantize",
    "group_dequantize",
    "group_linear",
    "group_row_counts",
    "kv_scale_bytes",
    "latent_attention",
    "latent_queries",
    "layer_norm",
    "linear",
    "lora_expand_",
    "lora_gather",
    "lora_shrink",
    "lora_tiles",
    "match_rms_",
    "mix_streams",
    "moe_row_counts",
    "paged_attention",
    "quantize_rows",
    "quantize_tokens",
    "quantized_embedding",
    "quantized_linear",
    "rms_norm",
    "rms_norm_",
    "rms_norm_quantize",
    "rope_",
    "rope_and_cache",
    "sample",
    "sample_part",
    "scale",
    "scaled_linear",
    "scaled_row_counts",
    "select_backend",
    "silu_and_mul",
    "silu_and_mul_quantize",
    "sparsify_",
    "take_columns",
    "top_logprobs",
    "topk_route",
    "varlen_attention",
]


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each row of ``x [T, H]``: computed in float32, rounded to x.dtype, then times ``weight [H]``.

    A weight in float32 is applied before anything is rounded (as in Gemma): so it is in all operations with a norm.
    """
    return backend_for(x).rms_norm(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` (rounded to x.dtype) and its RMS norm: returns ``(normed [T, H], new_residual [T, H])``."""
    return backend_for(x).fused_add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(x[:, :I]) * x[:, I:]`` of ``x [T, 2I]``: ``[T, I]``, the gate rounded to x.dtype before the product."""
    return backend_for(x).silu_and_mul(x)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Layer norm of each row of ``residual + x [T, H]`` (of ``x`` without one), computed in float32 and rounded once.

    ``weight`` and ``bias [H]`` may be None. Returns ``(normed [T, H], new_residual [T, H])``.
    """
    return backend_for(x).layer_norm(x, weight, bias, eps, residual)


def activate(x: Tensor, kind: str, gated: bool = False, up: Tensor | None = None) -> Tensor:
    """``f(x)`` of every element of ``x [T, I]``, with ``up [T, I]`` times that; ``gated``: ``f(x[:, :I]) * x[:, I:]``
    of ``x [T, 2I]``. Returns ``[T, I]``.

    ``kind``: "relu", "silu", "gelu", "gelu_tanh" or "none" (x itself). A gate is rounded to x.dtype before the product.
    ``x`` and ``up`` may be some columns of wider tensors, and all rows of ``up`` the same one.
    """
    return backend_for(x).activate(x, kind, gated, up)


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, of one shape and dtype."""
    return backend_for(x).add(x, y)


def scale(x: Tensor, factor: float, cap: float | None = None) -> Tensor:
    """``x * factor``, with ``cap`` then ``cap * tanh(x * factor / cap)``: computed in float32, rounded once."""
    return backend_for(x).scale(x, factor, cap)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` in place, of ``x [T, n H]`` for ``weight [H]``: of each H columns. ``x`` may be some columns of a
    wider tensor."""
    backend_for(x).rms_norm_(x, weight, eps)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Columns ``columns`` int32 [I], each below K, of ``x [T, K]``: ``[T, I]``."""
    return backend_for(x).take_columns(x, columns)


def concat(*parts: Tensor) -> Tensor:
    """``parts``, ``[T, H]`` each, side by side: ``[T, n H]``. Values that are not finite may spoil those beside."""
    return backend_for(parts[0]).concat(*parts)


def mix_streams(
    x: Tensor, constants: Tensor, y: Tensor | None = None, matrix: Tensor | None = None, given: Tensor | None = None
) -> Tensor:
    """Sums of streams of hidden states: M streams ``[T, M H]`` of the S of ``x`` and ``y``, ``[T, a H]`` and ``[T, b
    H]`` with a + b = S, in each row one behind the other.

    Stream m is the sum over s of stream s times ``constants[m, s]``, with ``matrix [M, S, D]`` times that plus
    ``matrix[m, s] . given[t]`` of ``given [T, D]``. Factors are float32; what is summed is rounded once.
    """
    return backend_for(x).mix_streams(x, constants, y, matrix, given)


def match_rms_(x: Tensor, like: Tensor, floor: float) -> None:
    """Multiply each H columns of ``x [T, n H]``, in place, by what gives them the root mean square of the row of ``like
    [T, H]``, which may be some columns of a wider tensor; their own mean square counts as ``floor`` at least."""
    backend_for(x).match_rms_(x, like, floor)


def sparsify_(x: Tensor, factor: float) -> None:
    """``max(0, x - mean - factor * deviation)`` in place, with the mean and the standard deviation of each row of ``x
    [T, I]``, which may be some columns of a wider tensor."""
    backend_for(x).sparsify_(x, factor)


# ---- low-rank adapters: row t has the one in slot ``slots[t]`` int32 [T] of a layer's `AdapterTable`, none below 0


def lora_tiles(slots: Tensor, num_slots: int) -> RowTiles | None:
    """The rows sorted by slot, once for all layers of a step, for kernels that want them so; None: they do not."""
    return backend_for(slots).lora_tiles(slots, num_slots)


def lora_shrink(x: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> Tensor:
    """``A x`` of each row of ``x [T, K]``: float32 ``[T, table.width]``, of which a row's adapter of rank R defines the
    first ``parts R``; sums in float32. Of a `SlotTable` each part has ``max_rank`` numbers, and on a GPU all may be in
    several parts to be added, ``[S, T, table.width]``."""
    return backend_for(x).lora_shrink(x, table, slots, tiles)


def lora_gather(ids: Tensor, table: AdapterTable, slots: Tensor, first: int, count: int) -> Tensor:
    """The same of an embedding: columns ``ids`` int64 [T] of A, which holds ``first`` and the ``count - 1`` ids after
    it; 0 for others."""
    return backend_for(ids).lora_gather(ids, table, slots, first, count)


def lora_expand_(y: Tensor, h: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> None:
    """Add ``B h`` to each row of ``y [T, N]``, with ``h`` as `lora_shrink` makes it; sums in float32, rounded once.
    Rows without an adapter keep their bits."""
    backend_for(y).lora_expand_(y, h, table, slots, tiles)


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
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    limit: Tensor | None = None,
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


def embedding(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """Rows ``ids`` int64 [T] of a table ``weight [rows, H]``: ``[T, H]``.

    ``first``: the table holds those of ids from that one on, and rows of ids that it does not hold are 0 (None: it
    holds all of them)."""
    return backend_for(weight).embedding(ids, weight, first)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, K] @ weight [N, K]^T (+ bias [N])``, all in one floating-point dtype. Returns ``[T, N]``."""
    return backend_for(x).linear(x, weight, bias)


def dense_linear(
    x: Tensor, weight: DenseWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x [T, K]`` (float32 or bfloat16) times a packed weight ``[N, K]`` plus ``bias [N]``: ``[T, N]``, in x.dtype or
    ``out_dtype``.

    Products are exact in float32 and added up in float32. The result of a row does not depend on T. Raises ValueError
    if widths do not match.
    """
    return backend_for(x).dense_linear(x, weight, bias, out_dtype)


def dense_embedding(ids: Tensor, weight: DenseWeight, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """Rows ``ids`` int64 [T] of a packed table of 16 or 32 bits: ``[T, K]`` in ``dtype``; ``first`` as in
    `embedding`."""
    return backend_for(ids).dense_embedding(ids, weight, dtype, first)


# ---- mixtures of experts (see octavo_kernels.moe)


def topk_route(
    logits: Tensor,
    k: int,
    kind: str = "softmax",
    bias: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    renormalise: bool = False,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """The ``k`` experts of each row and their weights, from ``logits [T, E]``: ids int32 ``[T, k]``, the best first and
    the lowest id first among equals, and weights float32 ``[T, k]``. Ids are counted from expert number ``first`` on,
    so those before it are below 0.

    A score is the softmax over all experts or, ``kind`` "sigmoid", the sigmoid of the expert's logit. ``bias`` float32
    [E] is added to scores for the choice only. ``groups`` (n, m): only experts of the best m of n groups are chosen; a
    group's score is that of its best expert, for "sigmoid" the sum of its two best. ``renormalise`` divides the chosen
    scores by their sum; ``scale`` multiplies them, then that of each expert in ``expert_scale`` float32 [E]. Raises
    ValueError for a ``k`` or ``groups`` that E does not allow.
    """
    return backend_for(logits).topk_route(logits, k, kind, bias, groups, renormalise, scale, expert_scale, first)


def fused_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Each row of ``x [T, H]`` through its experts ``ids`` int32 ``[T, k]``, times ``weights`` float32 ``[T, k]``, and
    added up in that order in float32: ``[T, H]`` in ``out_dtype`` (None: x.dtype). Ids of none of ``experts``, such as
    those that another rank holds, add nothing.

    ``shared [T, H]`` is added last, times the sigmoid of ``shared_gate`` float32 ``[T, 1]`` where there is one. The
    result of a row does not depend on T.
    """
    return backend_for(x).fused_moe(x, ids, weights, experts, shared, shared_gate, out_dtype)


def moe_row_counts(experts: Experts, k: int) -> list[int]:
    """Numbers of rows which, together, have `fused_moe` launch every kernel that it has for ``k`` of these experts."""
    weight = experts.gate_up
    if isinstance(weight, StackedWeight):
        weight = next(iter(weight.tensors.values()))
    return backend_for(weight if isinstance(weight, Tensor) else weight.addresses).moe_row_counts(experts, k)


# ---- sampling


def sample(logits: Tensor, rows: SamplingRows) -> SampledRows:
    """Draw one token for each row of ``logits [R, V]`` (any floating-point dtype; not changed).

    The order of operations is constraints, temperature, min-p, top-k, top-p, then the largest score + Gumbel noise. The
    noise is a hash of (stream, position, token), so a draw depends only on its own row and is reproducible bit for bit.
    """
    return backend_for(logits).sample(logits, rows)


def sample_part(logits: Tensor, rows: SamplingRows, first: int) -> tuple[Tensor, Tensor]:
    """`sample` where ``logits [R, V]`` are a part of the vocabulary, from token ``first`` on; without constraints and
    truncation, whatever the rows have.

    Returns token ids int64 [R] of the whole vocabulary, and float64 [R] what each was chosen by: of all parts' tokens
    the one with the largest value, the lowest token among equals, is `sample`'s. A value that is not finite stands for
    an invalid row: infinity, or -infinity where the part has no token that is allowed. Padding rows have 0 and 0.
    """
    return backend_for(logits).sample_part(logits, rows, first)


def top_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ``rows`` (int64 [N]) of ``logits [R, V]``: of the sampled token, then the ``k`` largest.

    ``token_ids`` int64 [N] are the sampled ones. Returns ids int64 and values float32 ``[N, k + 1]`` (the lower id
    first among equals), and the sampled tokens' ranks int64 [N], counted from 1.
    """
    return backend_for(logits).top_logprobs(logits, rows, token_ids, k)


# ---- group-quantised linears (see octavo_kernels.quant for packing and accuracy)


def quantize_rows(x: Tensor, terms: int = 1) -> QuantizedRows:
    """Rows ``x [T, K]`` as int8 in groups of 32 with a scale each; with two ``terms`` as 15-bit numbers; with
    `octavo_kernels.quant.BY_ROW` instead of terms as 8 to 16 bits with one scale a row."""
    return backend_for(x).quantize_rows(x, terms)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    terms: int = 1,
    plain: Tensor | None = None,
) -> tuple[QuantizedRows, Tensor]:
    """`rms_norm` or, with ``residual``, `fused_add_rms_norm`, then `quantize_rows`, in one pass.

    Returns the rows and the new residual (``x`` itself without one). They are bit-equal to the separate steps, except
    for second ``terms``: only groups with a value of at least a third of the row's largest have them. The error of 8
    bits grows with a group's largest value, so nearly all of it is in these few, and the others cost no arithmetic.
    ``plain``, like x and contiguous, is filled with the rows as they are.
    """
    return backend_for(x).rms_norm_quantize(x, weight, eps, residual, terms, plain)


def silu_and_mul_quantize(x: Tensor, terms: int = 1, plain: Tensor | None = None) -> QuantizedRows:
    """`silu_and_mul`, then `quantize_rows`, in one pass; bit-equal to the separate steps. ``plain``, contiguous, is
    filled with the rows as they are."""
    return backend_for(x).silu_and_mul_quantize(x, terms, plain)


def quantized_linear(x: Tensor | QuantizedRows, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """``x [T, K]`` times a packed weight ``[N, K]`` plus ``bias [N]``: ``[T, N]`` in x.dtype (float32 or bfloat16), or
    in float32 if the weight has a margin.

    The result of a row does not depend on T. Raises ValueError if widths or terms do not match.
    """
    return backend_for(x.pairs if isinstance(x, QuantizedRows) else x).quantized_linear(x, packed, bias)


def gated_linear_quantize(x: QuantizedRows, packed: PackedLinear, terms: int = 1) -> QuantizedRows:
    """`silu_and_mul_quantize` of `quantized_linear` with gates and ups ``[2 I, K]``, bit-equal to the separate steps.

    Returns rows of I values. Raises ValueError if widths or terms do not match.
    """
    return backend_for(x.pairs).gated_linear_quantize(x, packed, terms)


def quantized_embedding(ids: Tensor, packed: PackedLinear, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """Rows ``ids`` int64 [T] of a packed table, dequantised: ``[T, K]`` in ``dtype``; ``first`` as in `embedding`."""
    return backend_for(ids).quantized_embedding(ids, packed, dtype, first)


# ---- weights in groups, for GPUs (see octavo_kernels.group_weight)


def group_linear(x: Tensor, weight: GroupWeight, bias: Tensor | None = None) -> Tensor:
    """``x [T, K]`` times a weight ``[N, K]`` in groups plus ``bias [N]``: ``[T, N]`` in x.dtype, sums in float32."""
    return backend_for(x).group_linear(x, weight, bias)


def group_dequantize(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """The weight ``[N, K]`` in ``dtype``: each element computed in float32, then rounded."""
    return backend_for(weight.codes).group_dequantize(weight, dtype)


def group_row_counts(weight: GroupWeight) -> list[int]:
    """Numbers of rows which, together, have `group_linear` launch every kernel that it has for this weight."""
    return backend_for(weight.codes).group_row_counts(weight)


# ---- 8-bit weights with 8-bit activations, for GPUs (see octavo_kernels.scaled_weight)


def quantize_tokens(x: Tensor, dtype: torch.dtype, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """Rows ``x [T, K]`` as int8 or float8_e4m3fn ``[T, K]``, and their scales float32 ``[T, blocks]``.

    One scale for a row, or with several ``blocks`` one for each of its blocks of 128 columns. A row, or block, with NaN
    has an infinite scale.
    """
    return backend_for(x).quantize_tokens(x, dtype, blocks)


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """`quantize_tokens` of ``x [T, K]``, then their product with an 8-bit weight ``[N, K]``: ``[T, N]`` in x.dtype."""
    return backend_for(x).scaled_linear(x, weight, bias)


def scaled_row_counts(weight: ScaledWeight) -> list[int]:
    """Numbers of rows which, together, have `scaled_linear` launch every kernel that it has for this weight."""
    return backend_for(weight.values).scaled_row_counts(weight)
