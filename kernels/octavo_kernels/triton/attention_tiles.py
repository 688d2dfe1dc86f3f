"""Shared by the attention kernels: online softmax over tiles of keys and values, and the merging of chunks."""

# Triton reads these functions' source: annotations must not be strings (no `from __future__ import annotations`).

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh in float32, exact to the last bits also near zero, where the formula with exponentials is not."""
    size = tl.abs(x)
    e = tl.exp2(size * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = 1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.0539682540 + square * 0.0218694885)))
    return tl.where(size < 0.3, x * near, tl.where(x < 0, -far, far))


@triton.jit
def merge(m, l, acc, m_next, l_next, acc_next):  # noqa: E741
    """Merge the sums of two sets of keys: row maxima (in log2), sums of weights, weighted values."""
    m_new = tl.maximum(m, m_next)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2(m - m_safe)
    b = tl.exp2(m_next - m_safe)
    return m_new, l * a + l_next * b, acc * a[:, None] + acc_next * b[:, None]


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """The first key that a row at ``position`` may attend to, below 0 where that is all of them.

    With CHUNKED windows do not slide: they begin at multiples of ``window``.
    """
    if CHUNKED:
        first = position // window * window
    else:
        first = position - window + 1
    return first


@triton.jit
def add_sinks(m, l, acc, sinks_ptr, heads, there):  # noqa: E741
    """Add each row's sink to the sums over all keys: one more score, of its head, whose value is zeros."""
    sink = tl.load(sinks_ptr + heads, mask=there, other=0.0) * 1.4426950408889634
    m_new = tl.maximum(m, sink)
    keep = tl.exp2(m - m_new)
    return l * keep + tl.exp2(sink - m_new), acc * keep[:, None]


@triton.jit
def load_rows(pointers, there, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Rows of keys or values, zeros where they are not ``there`` (MASKED) and where elements are not ``inside``."""
    if MASKED:
        rows = tl.load(pointers, mask=there[:, None] & inside[None, :], other=0.0)
    elif PADDED:
        rows = tl.load(pointers, mask=inside[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def attend(
    m,
    l,  # noqa: E741
    acc,
    q,
    q_turned,
    positions,
    limits,
    kv_ptr,
    table_ptr,
    low,
    high,
    first_key,
    last_key,
    window,
    scale,
    log2_scale,
    stride_half,
    stride_block,
    stride_slot,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PAD: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax of rows ``q [M, HEAD_PAD]`` over the keys from ``low`` to ``high`` in tiles of BLOCK_N.

    With MASKED only keys in [first_key, last_key) are read (other pages may hold anything), and a row attends to those
    up to its limit; without, every row attends to every key. With TURNED, values are the first HEAD_SIZE elements of
    keys, and TURNED more of them meet ``q_turned [M, TURNED_PAD]``. Maxima are in units of log2, so that an exponential
    is one multiply-add and one exp2.
    """
    d = tl.arange(0, HEAD_PAD)
    n = tl.arange(0, BLOCK_N)
    inside = d < HEAD_SIZE
    e = tl.arange(0, TURNED_PAD)
    for start in tl.range(low, high, BLOCK_N):
        keys = start + n
        there = (keys >= first_key) & (keys < last_key)
        if MASKED:
            page = tl.load(table_ptr + keys // BLOCK_SIZE, mask=there, other=0)
        else:
            page = tl.load(table_ptr + keys // BLOCK_SIZE)
        slot = page.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * stride_slot
        pointers = kv_ptr + slot[:, None] + d[None, :]
        k = load_rows(pointers, there, inside, MASKED, HEAD_SIZE != HEAD_PAD)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if TURNED > 0:
            ends = kv_ptr + slot[:, None] + HEAD_SIZE + e[None, :]
            more = load_rows(ends, there, e < TURNED, MASKED, TURNED != TURNED_PAD)
            s = tl.dot(q_turned, tl.trans(more.to(q.dtype)), s, input_precision=PRECISION)
        if HAS_SOFTCAP:
            s = tanh(s * scale)
        if MASKED:
            visible = there[None, :] & (keys[None, :] <= limits[:, None])
            if HAS_WINDOW:
                visible = visible & (keys[None, :] >= first_seen(positions, window, CHUNKED)[:, None])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * log2_scale)
        if MASKED:  # a row may have had no visible key yet
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_safe = m_new
        p = tl.exp2(s * log2_scale - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        acc = acc * alpha[:, None]
        if TURNED > 0:
            v = k
        else:
            v = load_rows(pointers + stride_half, there, inside, MASKED, HEAD_SIZE != HEAD_PAD)
        v = v.to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    return m, l, acc
