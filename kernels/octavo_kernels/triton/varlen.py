"""Attention of whole sequences without a KV cache: each row attends to its whole sequence, or to a window around it.

FlashAttention-2 (Dao 2023) over rows of q, k and v as the projection leaves them. The tiles of a sequence are counted
from its first row, so that a row's result does not depend on the other sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N = 64, 64
MAX_HEAD_SIZE = 256


@triton.jit(do_not_specialize=["num_seqs", "window"])
def varlen_attention_kernel(
    qkv_ptr,
    starts_ptr,
    seq_lens_ptr,
    out_ptr,
    num_seqs,
    window,
    log2_scale,
    stride_row,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (heads, tiles): BLOCK_M rows of one sequence; programs beyond the last tile end at once."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    lanes = tl.arange(0, SEQS)
    lengths = tl.load(seq_lens_ptr + lanes, mask=lanes < num_seqs, other=0)
    tiles = (lengths + BLOCK_M - 1) // BLOCK_M
    if tile >= tl.sum(tiles):
        return
    before = tl.cumsum(tiles, 0) <= tile
    r = tl.sum(before.to(tl.int32))
    first = (tile - tl.sum(tl.where(before, tiles, 0))) * BLOCK_M

    begin = tl.load(starts_ptr + r).to(tl.int64)
    length = tl.load(seq_lens_ptr + r)
    rows = first + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_PAD)
    inside = (rows < length)[:, None] & (d < HEAD_SIZE)[None, :]
    q = tl.load(qkv_ptr + (begin + rows)[:, None] * stride_row + head * HEAD_SIZE + d[None, :], mask=inside, other=0.0)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    keys_ptr = qkv_ptr + begin * stride_row + (NUM_HEADS + kv_head) * HEAD_SIZE

    low = 0
    high = length
    if HAS_WINDOW:
        low = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(length, first + BLOCK_M - 1 + window)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    for start in tl.range(low, high, BLOCK_N):
        keys = start + n
        there = (keys < length)[:, None] & (d < HEAD_SIZE)[None, :]
        pointers = keys_ptr + keys[:, None].to(tl.int64) * stride_row + d[None, :]
        k = tl.load(pointers, mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        visible = (keys < length)[None, :]
        if HAS_WINDOW:
            apart = rows[:, None] - keys[None, :]
            visible = visible & (apart < window) & (apart > -window)
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * log2_scale)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * log2_scale - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        v = tl.load(pointers + NUM_KV_HEADS * HEAD_SIZE, mask=there, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_offset = ((begin + rows)[:, None] * NUM_HEADS + head) * HEAD_SIZE + d[None, :]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=inside)


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
    """See `octavo_kernels.varlen_attention`. Raises ValueError for heads that the kernel does not take."""
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"head_size={head_size} exceeds {MAX_HEAD_SIZE}")
    qkv = qkv.contiguous()
    out, num_seqs = qkv.new_zeros(len(qkv), num_heads * head_size), len(seq_lens)
    most = triton.cdiv(len(qkv), BLOCK_M) + num_seqs  # tiles: at most one of each sequence is not full
    varlen_attention_kernel[(num_heads, most)](
        qkv,
        query_start_loc,
        seq_lens,
        out,
        num_seqs,
        window or 0,
        scale * 1.4426950408889634,
        qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_PAD=max(16, triton.next_power_of_2(head_size)),
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        SEQS=max(256, triton.next_power_of_2(num_seqs)),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )
    return out
