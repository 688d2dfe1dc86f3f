"""The sampling kernels. One pass over the logits computes an upper bound for the score + noise of each block of tokens;
what follows reads only the few blocks that matter.

A row of logits is divided into chunks, one per program. A chunk is STEPS tiles of TILE tokens, and a block is one lane
of it: tokens ``chunk * TILE * STEPS + step * TILE + lane``. The maxima of blocks are therefore computed in registers,
without communication between threads. A row of 151,936 tokens has 10,240 blocks of 16 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.dependent_launch import wait_for_previous_kernel
from octavo_kernels.triton.sampling_math import (
    LOG2_E,
    LOWEST_FLOAT,
    MAX_INT32,
    gumbel_argmax,
    gumbel_bound,
    logits_of,
    open_row,
    stream_keys,
)


@triton.jit
def scan_kernel(
    constraints,
    logits_ptr,
    logits_stride,
    vocab,
    rows_ptr,
    index_ptr,
    positions_ptr,
    temperature_ptr,
    streams_ptr,
    bound_ptr,
    best_ptr,
    peak_ptr,
    mass_ptr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    RAW: tl.constexpr,
    TRUNCATED: tl.constexpr,
    CONSTRAINED: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Bound score + noise of each block from above, [R, chunks * TILE].

    With TRUNCATED also the largest logit of each block (-inf if all are), and for each chunk the largest logit and the
    sum of exp((logit - largest) / temperature), [R, chunks]. RAW takes rows ``rows`` of the logits unchanged, at
    temperature 1 and without bounds. The rows' first token is FIRST of the vocabulary.
    """
    wait_for_previous_kernel()
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    inverse = 1.0
    random = False
    logits_row = row
    if RAW:
        logits_row = tl.load(rows_ptr + row).to(tl.int32)
    else:
        state = tl.load(index_ptr + row)
        if state < 0:
            return
        temperature = tl.load(temperature_ptr + state)
        random = temperature > 0
        inverse = tl.where(random, 1.0 / tl.where(random, temperature, 1.0), 1.0)
        key0, key1 = stream_keys(tl.load(streams_ptr + state), tl.load(positions_ptr + row))
    source = open_row(logits_row, logits_ptr, logits_stride, vocab, constraints, CONSTRAINED)
    lane = tl.arange(0, TILE)
    bound = tl.full((TILE,), float("-inf"), tl.float32)
    best = tl.full((TILE,), LOWEST_FLOAT, tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    # Every thread has two loads in flight. The compiler moves no load across the branch on `random`, so a program with
    # little other work issues the next load before it.
    PREFETCH: tl.constexpr = not (TRUNCATED or CONSTRAINED)
    first = chunk * STEPS * TILE + lane
    next_x = logits_of(source, first, (first < vocab) & PREFETCH)
    for step in tl.range(0, STEPS, loop_unroll_factor=2):
        ids = (chunk * STEPS + step) * TILE + lane
        if PREFETCH:
            x = next_x
            next_x = logits_of(source, ids + TILE, (ids + TILE < vocab) & (step + 1 < STEPS))
        else:
            x = logits_of(source, ids, ids < vocab)
        if TRUNCATED:
            # exp of the distance to the larger of old and new maximum: one exponential per token, not two.
            away = tl.exp2(-tl.abs(x - best) * (inverse * LOG2_E))
            mass = tl.where(x > best, mass * away + 1.0, mass + away)
            best = tl.maximum(best, x)
        if not RAW:
            score = x * inverse
            if random:
                score += gumbel_bound(ids + FIRST, key0, key1)
            bound = tl.maximum(bound, score, propagate_nan=tl.PropagateNan.ALL)
    block = (row.to(tl.int64) * chunks + chunk) * TILE + lane
    if not RAW:
        tl.store(bound_ptr + block, bound)
    if TRUNCATED:
        # A block with a token has a mass even if the token's logit is the lowest finite one.
        tl.store(best_ptr + block, tl.where(mass == 0, float("-inf"), best))
        peak = tl.max(best)
        tl.store(peak_ptr + row * chunks + chunk, peak)
        tl.store(mass_ptr + row * chunks + chunk, tl.sum(mass * tl.exp2((best - peak) * (inverse * LOG2_E))))


@triton.jit
def is_truncated(state, vocab, temperature, top_k_ptr, top_p_ptr, min_p_ptr):
    """True if a row is sampled with top-k, top-p or min-p."""
    cut = (tl.load(top_k_ptr + state) < vocab) | (tl.load(top_p_ptr + state) < 1) | (tl.load(min_p_ptr + state) > 0)
    return (temperature > 0) & cut


@triton.jit
def draw_kernel(
    constraints,
    logits_ptr,
    logits_stride,
    vocab,
    index_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    streams_ptr,
    bound_ptr,
    token_ptr,
    invalid_ptr,
    value_ptr,
    chunks,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TRUNCATED: tl.constexpr,
    CONSTRAINED: tl.constexpr,
    PART: tl.constexpr = False,
    FIRST: tl.constexpr = 0,
):
    """The tokens of greedy rows and of rows without truncation; which rows are invalid.

    PART: rows are a part of the vocabulary, from token FIRST on. Then ``value`` float64 [R] is what the token was
    chosen by: its logit, or its score with noise; of invalid rows infinity, or -infinity where no token is allowed.
    """
    wait_for_previous_kernel()
    row = tl.program_id(0)
    state = tl.load(index_ptr + row)
    if state < 0:
        tl.store(token_ptr + row, 0)
        tl.store(invalid_ptr + row, 0)
        if PART:
            tl.store(value_ptr + row, 0.0)
        return
    block = tl.arange(0, BLOCKS)
    mine = bound_ptr + row.to(tl.int64) * chunks * TILE
    bounds = tl.load(mine + block, mask=block < chunks * TILE, other=float("-inf"))
    is_invalid = tl.max(((bounds != bounds) | (bounds == float("inf"))).to(tl.int32)) > 0
    top = tl.max(bounds)
    if PART:
        value = tl.where(is_invalid, float("inf"), top).to(tl.float64)
        tl.store(value_ptr + row, value)
    is_invalid = is_invalid | (top == float("-inf"))
    tl.store(invalid_ptr + row, is_invalid.to(tl.int8))
    tl.store(token_ptr + row, 0)
    if is_invalid:
        return
    temperature = tl.load(temperature_ptr + state)
    if TRUNCATED:  # noqa: SIM102  (known when the kernel is compiled)
        if is_truncated(state, vocab, temperature, top_k_ptr, top_p_ptr, min_p_ptr):
            return
    source = open_row(row, logits_ptr, logits_stride, vocab, constraints, CONSTRAINED)
    if temperature > 0:
        key0, key1 = stream_keys(tl.load(streams_ptr + state), tl.load(positions_ptr + row))
        token, _, best = gumbel_argmax(
            bounds, block, source, temperature, key0, key1, -2139095040, float("-inf"), 0, TILE, STEPS, FIRST
        )
        tl.store(token_ptr + row, token + FIRST)
        if PART:
            tl.store(value_ptr + row, best)
    else:
        # The bounds are the logits' maxima. The lowest id among equals is in the first chunk that has one.
        chunk = tl.min(tl.where(bounds == top, block // TILE, MAX_INT32))
        lane = tl.arange(0, TILE)
        token = tl.full((), MAX_INT32, tl.int32)
        holds = tl.load(mine + chunk * TILE + lane) == top
        for step in range(STEPS):
            ids = (chunk * STEPS + step) * TILE + lane
            x = logits_of(source, ids, holds & (ids < vocab))
            token = tl.minimum(token, tl.min(tl.where(x == top, ids, MAX_INT32)))
        tl.store(token_ptr + row, token + FIRST)
