"""The sampling kernels. One pass over the logits leaves, for every block of a few of them, how far its tokens can get;
all that follows looks into the few blocks that matter.

A row of logits is cut into chunks, one a program; a chunk is STEPS tiles of TILE tokens, and a block is one lane of it:
tokens ``chunk * TILE * STEPS + step * TILE + lane``. So the maxima of blocks fall out of a program's registers without
any exchange between threads. 128 rows of 151,936 tokens have 10,240 blocks of 16 each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.dependent_launch import await_previous
from octavo_kernels.triton.sampling_math import (
    BIG,
    LOG2_E,
    LOWEST,
    gumbel_bound,
    logits_of,
    open_row,
    race,
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
    CUTS: tl.constexpr,
    CONSTRAINED: tl.constexpr,
):
    """Of each block: the bound of score + noise, [R, chunks * TILE], and with CUTS the largest logit, -inf where all
    are; of each chunk then the largest logit and the sum of exp((logit - largest) / temperature), [R, chunks].

    RAW: rows ``rows`` of the logits as they are, at temperature 1 and without the bounds.
    """
    await_previous()
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
    best = tl.full((TILE,), LOWEST, tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    # Two loads under way in every thread. No load is moved across the branch on `random`; where a program has little
    # else to do, the next one is therefore asked for before it.
    AHEAD: tl.constexpr = not (CUTS or CONSTRAINED)
    first = chunk * STEPS * TILE + lane
    following = logits_of(source, first, (first < vocab) & AHEAD)
    for step in tl.range(0, STEPS, loop_unroll_factor=2):
        ids = (chunk * STEPS + step) * TILE + lane
        if AHEAD:
            x = following
            following = logits_of(source, ids + TILE, (ids + TILE < vocab) & (step + 1 < STEPS))
        else:
            x = logits_of(source, ids, ids < vocab)
        if CUTS:
            # exp of the distance to the larger one of old and new: one exponential a token, not two.
            away = tl.exp2(-tl.abs(x - best) * (inverse * LOG2_E))
            mass = tl.where(x > best, mass * away + 1.0, mass + away)
            best = tl.maximum(best, x)
        if not RAW:
            reach = x * inverse
            if random:
                reach += gumbel_bound(ids, key0, key1)
            bound = tl.maximum(bound, reach, propagate_nan=tl.PropagateNan.ALL)
    block = (row.to(tl.int64) * chunks + chunk) * TILE + lane
    if not RAW:
        tl.store(bound_ptr + block, bound)
    if CUTS:
        # A block with a token has a mass, also where the token's logit is the lowest that there is.
        tl.store(best_ptr + block, tl.where(mass == 0, float("-inf"), best))
        peak = tl.max(best)
        tl.store(peak_ptr + row * chunks + chunk, peak)
        tl.store(mass_ptr + row * chunks + chunk, tl.sum(mass * tl.exp2((best - peak) * (inverse * LOG2_E))))


@triton.jit
def is_cut(state, vocab, temperature, top_k_ptr, top_p_ptr, min_p_ptr):
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
    chunks,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CUTS: tl.constexpr,
    CONSTRAINED: tl.constexpr,
):
    """The tokens of greedy rows and of rows without a cut; which rows are invalid."""
    await_previous()
    row = tl.program_id(0)
    state = tl.load(index_ptr + row)
    if state < 0:
        tl.store(token_ptr + row, 0)
        tl.store(invalid_ptr + row, 0)
        return
    block = tl.arange(0, BLOCKS)
    mine = bound_ptr + row.to(tl.int64) * chunks * TILE
    bounds = tl.load(mine + block, mask=block < chunks * TILE, other=float("-inf"))
    broken = tl.max(((bounds != bounds) | (bounds == float("inf"))).to(tl.int32)) > 0
    top = tl.max(bounds)
    broken = broken | (top == float("-inf"))
    tl.store(invalid_ptr + row, broken.to(tl.int8))
    tl.store(token_ptr + row, 0)
    if broken:
        return
    temperature = tl.load(temperature_ptr + state)
    if CUTS:  # noqa: SIM102  (known when the kernel is compiled)
        if is_cut(state, vocab, temperature, top_k_ptr, top_p_ptr, min_p_ptr):
            return
    source = open_row(row, logits_ptr, logits_stride, vocab, constraints, CONSTRAINED)
    if temperature > 0:
        key0, key1 = stream_keys(tl.load(streams_ptr + state), tl.load(positions_ptr + row))
        token, _ = race(
            bounds, block, source, temperature, key0, key1, -2139095040, float("-inf"), 0, TILE=TILE, STEPS=STEPS
        )
        tl.store(token_ptr + row, token)
    else:
        # The bounds are the logits' maxima. The lowest id among equals is in the first chunk that has one.
        chunk = tl.min(tl.where(bounds == top, block // TILE, BIG))
        lane = tl.arange(0, TILE)
        token = tl.full((), BIG, tl.int32)
        holds = tl.load(mine + chunk * TILE + lane) == top
        for step in range(STEPS):
            ids = (chunk * STEPS + step) * TILE + lane
            x = logits_of(source, ids, holds & (ids < vocab))
            token = tl.minimum(token, tl.min(tl.where(x == top, ids, BIG)))
        tl.store(token_ptr + row, token)
