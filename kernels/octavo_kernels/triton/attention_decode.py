"""Decode attention: the rows of a group of heads form one tile, the keys of a sequence are split over programs.

This is FlashDecoding (Dao et al. 2023) with the work lists of `attention_plan`. Grids are upper bounds that depend only
on shapes, so a captured graph serves any lengths.
"""

# Triton reads these functions' source: annotations must not be strings (no `from __future__ import annotations`).

import triton
import triton.language as tl

from octavo_kernels.triton.attention_tiles import add_sinks, attend, first_seen, merge
from octavo_kernels.triton.dependent_launch import wait_for_previous_kernel


# The block table of an eager step is as wide as its longest sequence needs: its stride differs between steps.
@triton.jit(do_not_specialize=["window", "stride_table"])
def decode_attention(
    q_ptr,
    kv_ptr,
    out_ptr,
    sums_ptr,
    maxima_ptr,
    weights_ptr,
    items_ptr,
    table_ptr,
    sinks_ptr,
    limit_ptr,
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
    NUM_KV_HEADS: tl.constexpr,
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
):
    """Grid (items * kv heads): one chunk of keys for one tile of rows.

    The result of a sequence with one chunk goes to ``out``. Otherwise the tile's sums go to ``sums [item, kv head, M,
    D]``, its row maxima and weights to ``maxima`` and ``weights [item, kv head, M]``, all float32, for `reduce_chunks`.
    """
    wait_for_previous_kernel()
    head = tl.program_id(0) % NUM_KV_HEADS
    item = tl.program_id(0) // NUM_KV_HEADS
    entry = items_ptr + item * 8
    r = tl.load(entry)
    row, queries, position = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    low, high, chunks = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    if r < 0:
        return
    # With this hint, the compiler loads the pages of neighbouring keys at once.
    low = tl.multiple_of(low, BLOCK_N)

    rows = tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    t = row + tokens
    live = (tokens < BLOCK_M // GROUP) & (tokens < queries)
    heads = head * GROUP + rows % GROUP
    positions = position + tokens
    limits = positions
    if HAS_LIMIT:
        limits = tl.load(limit_ptr + t, mask=live, other=0)
    d = tl.arange(0, HEAD_PAD)
    inside = live[:, None] & (d < HEAD_SIZE)[None, :]
    q_offset = t.to(tl.int64) * stride_q_row + heads * stride_q_head
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=inside, other=0.0)
    q_turned = q
    if TURNED > 0:
        e = tl.arange(0, TURNED_PAD)
        turned = live[:, None] & (e < TURNED)[None, :]
        q_turned = tl.load(q_ptr + q_offset[:, None] + HEAD_SIZE + e[None, :], mask=turned, other=0.0)

    first_key = low
    if HAS_WINDOW:  # from the window of the tile's first query on
        first_key = tl.maximum(low, first_seen(position, window, CHUNKED))
        if FIXED_CHUNK == 0:
            low = tl.maximum(low, first_key // BLOCK_N * BLOCK_N)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    m, l, acc = attend(  # noqa: E741
        m,
        l,
        acc,
        q,
        q_turned,
        positions,
        limits,
        kv_ptr + head.to(tl.int64) * stride_head,
        table_ptr + r.to(tl.int64) * stride_table,
        low,
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
    if chunks == 1:
        if HAS_SINKS:
            l, acc = add_sinks(m, l, acc, sinks_ptr, heads, live)  # noqa: E741
        out = acc / l[:, None] * out_scale
        out_offset = (t.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * HEAD_SIZE
        tl.store(out_ptr + out_offset[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        place = (item.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_M + rows
        tl.store(maxima_ptr + place, m)
        tl.store(weights_ptr + place, l)
        tl.store(sums_ptr + place[:, None] * HEAD_PAD + d[None, :], acc)


@triton.jit
def reduce_chunks(
    out_ptr,
    sums_ptr,
    maxima_ptr,
    weights_ptr,
    row_chunks_ptr,
    sinks_ptr,
    out_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (rows, kv heads, tiles of BLOCK_D elements): combine the chunks of a row; zeros for rows without a sequence.

    With a fixed chunk size they are added in order, as in the prefill kernel; otherwise BLOCK_C of them at a time.
    """
    wait_for_previous_kernel()
    t = tl.program_id(0)
    head = tl.program_id(1)
    entry = row_chunks_ptr + t * 4
    item, place_in_tile, chunks = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if chunks == 1:  # already written, by its item or by the prefill kernel
        return
    g = tl.arange(0, GROUP_PAD)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (g < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    out_offset = (t.to(tl.int64) * NUM_KV_HEADS + head) * (GROUP * HEAD_SIZE) + g * HEAD_SIZE
    out_ptrs = out_ptr + out_offset[:, None] + d[None, :]
    if chunks == 0:
        tl.store(out_ptrs, tl.zeros([GROUP_PAD, BLOCK_D], out_ptr.dtype.element_ty), mask=inside)
        return
    base = (item.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_M + place_in_tile * GROUP
    step = NUM_KV_HEADS * BLOCK_M
    m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    l = tl.zeros([GROUP_PAD], tl.float32)  # noqa: E741
    acc = tl.zeros([GROUP_PAD, BLOCK_D], tl.float32)
    if FIXED_CHUNK > 0:
        for c in tl.range(0, chunks):
            place = base + c * step + g
            m_next = tl.load(maxima_ptr + place, mask=g < GROUP, other=float("-inf"))
            l_next = tl.load(weights_ptr + place, mask=g < GROUP, other=0.0)
            acc_next = tl.load(sums_ptr + place[:, None] * HEAD_PAD + d[None, :], mask=inside, other=0.0)
            m, l, acc = merge(m, l, acc, m_next, l_next, acc_next)  # noqa: E741
    else:
        # The next ones are loaded to shared memory meanwhile, if there is room.
        PREFETCH: tl.constexpr = 2 if BLOCK_C * GROUP_PAD * BLOCK_D <= 16384 else 1
        for first_chunk in tl.range(0, chunks, BLOCK_C, num_stages=PREFETCH):
            c = first_chunk + tl.arange(0, BLOCK_C)
            there = (c < chunks)[:, None] & (g < GROUP)[None, :]
            place = base + c.to(tl.int64)[:, None] * step + g[None, :]
            m_next = tl.load(maxima_ptr + place, mask=there, other=float("-inf"))
            l_next = tl.load(weights_ptr + place, mask=there, other=0.0)
            acc_next = tl.load(
                sums_ptr + place[:, :, None] * HEAD_PAD + d[None, None, :], mask=there[:, :, None], other=0.0
            )
            m_new = tl.maximum(m, tl.max(m_next, 0))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m - m_safe)
            w = tl.exp2(m_next - m_safe[None, :])
            l = l * alpha + tl.sum(w * l_next, 0)  # noqa: E741
            acc = acc * alpha[:, None] + tl.sum(acc_next * w[:, :, None], 0)
            m = m_new
    if HAS_SINKS:
        l, acc = add_sinks(m, l, acc, sinks_ptr, head * GROUP + g, g < GROUP)  # noqa: E741
    out = acc / l[:, None] * out_scale
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
