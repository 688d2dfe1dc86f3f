"""Shared by the sampling kernels: logits with their constraints, random bits, sort keys.

``source`` stands for one row of logits: (pointer, vocabulary size, constrained, bitmask, edits' begin, end, ids and
values, seen tokens, counts, repetition, frequency, presence); `open_row` makes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_INT32 = tl.constexpr(2**31 - 1)
LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)  # of float32's finite numbers
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def open_row(row, logits_ptr, logits_stride, vocab, constraints, CONSTRAINED: tl.constexpr):
    """The ``source`` of a row, see above."""
    logits = logits_ptr + row.to(tl.int64) * logits_stride
    if CONSTRAINED:
        bitmask_ptr, bitmask_index_ptr, edit_start_ptr, edit_ids_ptr, edit_values_ptr = constraints[:5]
        seen_ptr, seen_index_ptr, counts_ptr, counts_index_ptr = constraints[5:9]
        repetition_ptr, frequency_ptr, presence_ptr = constraints[9:]
        words = ((vocab + 31) // 32).to(tl.int64)
        mask = tl.load(bitmask_index_ptr + row)
        seen = tl.load(seen_index_ptr + row)
        counts = tl.load(counts_index_ptr + row)
        source = (
            logits,
            vocab,
            CONSTRAINED,
            mask,
            bitmask_ptr + tl.maximum(mask, 0) * words,
            tl.load(edit_start_ptr + row),
            tl.load(edit_start_ptr + row + 1),
            edit_ids_ptr,
            edit_values_ptr,
            seen,
            seen_ptr + tl.maximum(seen, 0) * words,
            counts,
            counts_ptr + tl.maximum(counts, 0).to(tl.int64) * vocab,
            tl.load(repetition_ptr + row),
            tl.load(frequency_ptr + row),
            tl.load(presence_ptr + row),
        )
    else:
        source = (logits, vocab, CONSTRAINED)  # type: ignore[assignment]
    return source


@triton.jit
def logits_of(source, ids, wanted):
    """float32 logits of ``ids`` after the row's constraints; -inf where not ``wanted``."""
    x = tl.load(source[0] + ids, mask=wanted, other=float("-inf")).to(tl.float32)
    if len(source) > 3:  # has constraints
        if source[3] >= 0:
            word = tl.load(source[4] + (ids >> 5), mask=wanted, other=0)
            x = tl.where((word >> (ids & 31)) & 1 != 0, x, float("-inf"))
        for edit in range(source[5], source[6]):
            changed = ids == tl.load(source[7] + edit)
            x = tl.where(changed, x + tl.load(source[8] + edit), x)
        if source[9] >= 0:
            word = tl.load(source[10] + (ids >> 5), mask=wanted, other=0)
            seen = ((word >> (ids & 31)) & 1 != 0) & wanted
            penalized = tl.where(x > 0, tl.div_rn(x, source[13]), x * source[13])
            if source[11] >= 0:
                # Counts are read only for tokens that were seen: the cost is that of the history, not the vocabulary.
                count = tl.load(source[12] + ids, mask=seen, other=0)
                penalized = penalized - source[14] * count.to(tl.float32)
                penalized = penalized - tl.where(count > 0, source[15], 0.0)
            x = tl.where(seen, penalized, x)
    return x


# ---- random bits: the same as octavo.sample.gumbel draws, bit for bit


@triton.jit
def stream_keys(stream, position):
    """Two 32-bit keys of the draw at ``position`` (both int64): one output of splitmix64."""
    x = stream.to(tl.uint64, bitcast=True) + (position.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _mix(x, added):
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = (x + added) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits(ids, key0, key1):
    """uint32 in [1, 2**31) for each token."""
    salt = ids.to(tl.uint32)
    salt = _mix(salt ^ (salt >> 16), tl.zeros_like(salt))
    return (_mix(salt ^ key0, key1) & 0x7FFFFFFF) | 1


@triton.jit
def gumbel(ids, key0, key1):
    """Standard Gumbel noise, float64. 1 - u is exact, so log(1 - u) is as good as log1p(-u)."""
    u = random_bits(ids, key0, key1).to(tl.float64) * 4.656612873077393e-10  # 2**-31
    return -tl.log(-tl.log(1.0 - u))


@triton.jit
def gumbel_bound(ids, key0, key1):
    """A float32 upper bound of the noise, at most 0.06 too large for large noise: G <= -log(u), and a float's bits,
    read as an integer, bound log2 from below. This takes one conversion per token instead of two logarithms."""
    bits = random_bits(ids, key0, key1)
    u = (0x3F800000 | (bits >> 8)).to(tl.float32, bitcast=True) - 1.0  # rounded down to 23 bits
    u = tl.maximum(u, 4.656612873077393e-10)
    return (
        88.02969193111305 - u.to(tl.int32, bitcast=True).to(tl.float32) * 8.262958294867817e-08
    )  # ln 2 * 127, / 2**23


# ---- order


@triton.jit
def sort_key(x):
    """int32 keys with the order of float32 ``x``; -0 and 0 have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_threshold(keys, low, high, least, most):
    """The largest int32 key that at least ``least`` of ``keys`` reach, or any such key that at most ``most`` reach.

    By bisection between ``low``, which enough of them reach, and ``high``, which too few do.
    """
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reach = tl.sum((keys >= middle).to(tl.int32))
        enough = reach >= least
        low = tl.where(enough, middle, low)
        high = tl.where(enough & (reach > most), high, tl.where(enough, middle + 1, middle))
    return low


@triton.jit
def min_p_threshold(peak, min_p):
    """The sort key that a token's score must reach: that of the best score + log(min_p). Scores of -inf never do."""
    line = peak.to(tl.float64) + tl.log(tl.where(min_p > 0, min_p, 1.0))
    line = tl.where(min_p > 0, line.to(tl.float32), LOWEST_FLOAT)
    return sort_key(tl.maximum(line, LOWEST_FLOAT))


# ---- the draw


@triton.jit
def gumbel_argmax(
    bounds,
    block,
    source,
    temperature,
    key0,
    key1,
    low,
    pivot,
    pivot_id,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """The Gumbel-max draw among the tokens of blocks with these ``bounds`` (float32): the largest score + noise.

    Only blocks whose bound reaches the best value so far are read, hardly more than two per row. Tokens below ``low``
    (a sort key) and those not ranked above (``pivot``, ``pivot_id``) are excluded. A block is one lane of a chunk of
    STEPS tiles. The row's first token is FIRST of the vocabulary. Returns (token of the row, score, score + noise);
    token -1 if all are excluded.
    """
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), -1, tl.int32)
    score = tl.full((), float("-inf"), tl.float32)
    floor = tl.full((), LOWEST_FLOAT, tl.float32)
    top = tl.max(bounds)
    while top >= floor:
        at = tl.min(tl.where(bounds == top, block, MAX_INT32))
        ids = (at // TILE) * (TILE * STEPS) + at % TILE + tl.arange(0, STEPS) * TILE
        s = tl.div_rn(logits_of(source, ids, ids < source[1]), temperature)
        runs = (sort_key(s) >= low) & ((s > pivot) | ((s == pivot) & (ids < pivot_id)))
        value = tl.where(runs, s.to(tl.float64) + gumbel(ids + FIRST, key0, key1), float("-inf"))
        first = tl.max(value)
        if first > best:
            best = first
            token = tl.min(tl.where(value == first, ids, MAX_INT32))
            score = tl.max(tl.where(ids == token, s, float("-inf")))
            # Bounds are computed in float32 with the reciprocal of the temperature: leave room for their rounding.
            floor = tl.maximum((best - (1e-3 + 1e-6 * tl.abs(best))).to(tl.float32), LOWEST_FLOAT)
        bounds = tl.where(block == at, float("-inf"), bounds)
        top = tl.max(bounds)
    return token, score, best
