"""Attention of prompts and their chunks: a tile of queries of one head against all of its keys.

FlashAttention-2 (Dao 2023) over pages: only the tiles of keys at the diagonal and at the lower end of the window are
masked, and those that no row attends to are skipped.
"""

# Triton reads these functions' source: annotations must not be strings (no `from __future__ import annotations`).

import triton
import triton.language as tl

from octavo_kernels.triton.attention_tiles import add_sinks, attend, first_seen, merge


# The block table of an eager step is as wide as its longest sequence needs: its stride differs between steps.
@triton.jit(do_not_specialize=["num_seqs", "num_rows", "max_queries", "window", "stride_table"])
def prefill_attention(
    q_ptr,
    kv_ptr,
    out_ptr,
    starts_ptr,
    seq_lens_ptr,
    table_ptr,
    sinks_ptr,
    limit_ptr,
    num_seqs,
    num_rows,
    max_queries,
    window,
    scale,
    log2_scale,
    out_scale,
    stride_q_row,
    stride_q_head,
    stride_half,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PAD: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid (heads, tiles): BLOCK_M queries of a sequence that has more than ``max_queries`` of them.

    The heads of a group are neighbours, so that they share keys in the L2 cache. The last queries of a sequence attend
    to most keys, so they start first.
    """
    head = tl.program_id(0)
    lanes = tl.arange(0, SEQS)
    real = lanes < num_seqs
    begins = tl.load(starts_ptr + lanes, mask=real, other=0)
    counts = tl.load(starts_ptr + 1 + lanes, mask=real, other=0) - begins
    lengths = tl.load(seq_lens_ptr + lanes, mask=real, other=0)
    tiles = tl.where((counts > max_queries) & (lengths > 0), (counts + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, 0)
    tile = tl.sum(tiles) - 1 - tl.program_id(1)
    if tile < 0:
        return
    before = ends <= tile
    r = tl.sum(before.to(tl.int32))
    token = (tile - tl.sum(tl.where(before, tiles, 0))) * BLOCK_M

    begin = tl.load(starts_ptr + r)
    queries = tl.load(starts_ptr + r + 1) - begin
    length = tl.load(seq_lens_ptr + r)
    tokens = token + tl.arange(0, BLOCK_M)
    t = begin + tokens
    live = (tokens < queries) & (t < num_rows)
    earliest = length - queries + token  # the position of the first row
    latest = length - queries + tl.minimum(token + BLOCK_M, queries) - 1
    positions = earliest + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PAD)
    inside = live[:, None] & (d < HEAD_SIZE)[None, :]
    q_offset = t.to(tl.int64) * stride_q_row + head * stride_q_head
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=inside, other=0.0)
    q_turned = q
    if TURNED > 0:
        e = tl.arange(0, TURNED_PAD)
        turned = live[:, None] & (e < TURNED)[None, :]
        q_turned = tl.load(q_ptr + q_offset[:, None] + HEAD_SIZE + e[None, :], mask=turned, other=0.0)
    keys_ptr = kv_ptr + (head // GROUP).to(tl.int64) * stride_head
    pages_ptr = table_ptr + r.to(tl.int64) * stride_table

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    limits = positions
    least = earliest
    high = latest + 1
    if HAS_LIMIT:
        limits = tl.minimum(tl.load(limit_ptr + t, mask=live, other=0), length - 1)
        least = tl.min(tl.where(live, limits, length))
        high = tl.max(limits) + 1
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_seen(earliest, window, CHUNKED), 0)
    if FIXED_CHUNK > 0:
        for low in tl.range(first_key // FIXED_CHUNK * FIXED_CHUNK, high, FIXED_CHUNK):
            part = tl.minimum(low + FIXED_CHUNK, high)
            m_next = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l_next = tl.zeros([BLOCK_M], tl.float32)
            acc_next = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
            m_next, l_next, acc_next = attend(
                m_next,
                l_next,
                acc_next,
                q,
                q_turned,
                positions,
                limits,
                keys_ptr,
                pages_ptr,
                low,
                part,
                first_key,
                part,
                window,
                scale,
                log2_scale,
                stride_half,
                stride_block,
                stride_slot,
                BLOCK_N,
                BLOCK_SIZE,
                HEAD_SIZE,
                HEAD_PAD,
                TURNED,
                TURNED_PAD,
                True,
                HAS_WINDOW,
                CHUNKED,
                HAS_SOFTCAP,
                PRECISION,
            )
            m, l, acc = merge(m, l, acc, m_next, l_next, acc_next)  # noqa: E741
    else:
        low = first_key // BLOCK_N * BLOCK_N
        full_high = tl.maximum((least + 1) // BLOCK_N * BLOCK_N, low)
        if HAS_WINDOW:
            # From this key on, every row's window includes all keys up to the diagonal.
            full_low = tl.maximum(first_seen(latest, window, CHUNKED) + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
            full_low = tl.minimum(tl.maximum(full_low, low), full_high)
            m, l, acc = attend(  # noqa: E741
                m,
                l,
                acc,
                q,
                q_turned,
                positions,
                limits,
                keys_ptr,
                pages_ptr,
                low,
                full_low,
                first_key,
                high,
                window,
                scale,
                log2_scale,
                stride_half,
                stride_block,
                stride_slot,
                BLOCK_N,
                BLOCK_SIZE,
                HEAD_SIZE,
                HEAD_PAD,
                TURNED,
                TURNED_PAD,
                True,
                HAS_WINDOW,
                CHUNKED,
                HAS_SOFTCAP,
                PRECISION,
            )
            low = full_low
        m, l, acc = attend(  # noqa: E741
            m,
            l,
            acc,
            q,
            q_turned,
            positions,
            limits,
            keys_ptr,
            pages_ptr,
            low,
            full_high,
            first_key,
            high,
            window,
            scale,
            log2_scale,
            stride_half,
            stride_block,
            stride_slot,
            BLOCK_N,
            BLOCK_SIZE,
            HEAD_SIZE,
            HEAD_PAD,
            TURNED,
            TURNED_PAD,
            False,
            HAS_WINDOW,
            CHUNKED,
            HAS_SOFTCAP,
            PRECISION,
        )
        m, l, acc = attend(  # noqa: E741
            m,
            l,
            acc,
            q,
            q_turned,
            positions,
            limits,
            keys_ptr,
            pages_ptr,
            full_high,
            high,
            first_key,
            high,
            window,
            scale,
            log2_scale,
            stride_half,
            stride_block,
            stride_slot,
            BLOCK_N,
            BLOCK_SIZE,
            HEAD_SIZE,
            HEAD_PAD,
            TURNED,
            TURNED_PAD,
            True,
            HAS_WINDOW,
            CHUNKED,
            HAS_SOFTCAP,
            PRECISION,
        )
    if HAS_SINKS:
        heads = tl.full([BLOCK_M], 0, tl.int32) + head
        l, acc = add_sinks(m, l, acc, sinks_ptr, heads, live)  # noqa: E741
    out = acc / l[:, None] * out_scale
    out_offset = (t.to(tl.int64) * NUM_HEADS + head) * HEAD_SIZE
    tl.store(out_ptr + out_offset[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
