"""Top-k, top-p and min-p, and the most likely tokens of a row, from the results of `scan_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.dependent_launch import wait_for_previous_kernel
from octavo_kernels.triton.sampling_kernels import is_truncated
from octavo_kernels.triton.sampling_math import (
    LOG2_E,
    LOWEST_FLOAT,
    MAX_INT32,
    gumbel,
    gumbel_argmax,
    gumbel_bound,
    logits_of,
    min_p_threshold,
    open_row,
    rank_threshold,
    sort_key,
    stream_keys,
)


@triton.jit
def _gather(source, bests, block, floor, list_ptr, temperature, KEEP, TILE: tl.constexpr, STEPS: tl.constexpr):
    """The tokens of at most KEEP blocks whose best score reaches the key ``floor``: ids and scores [KEEP, STEPS], -inf
    below the floor. ``list_ptr`` is scratch memory for KEEP numbers."""
    chosen = bests >= floor
    place = tl.cumsum(chosen.to(tl.int32)) - 1
    tl.store(list_ptr + place, block, mask=chosen)
    tl.debug_barrier()  # other threads read these values
    slot = tl.arange(0, KEEP)
    taken = slot < tl.sum(chosen.to(tl.int32))
    at = tl.load(list_ptr + slot, mask=taken, other=0)
    ids = ((at // TILE) * (TILE * STEPS) + at % TILE)[:, None] + (tl.arange(0, STEPS) * TILE)[None, :]
    scores = tl.div_rn(logits_of(source, ids, taken[:, None] & (ids < source[1])), temperature)
    return ids, tl.where(sort_key(scores) >= floor, scores, float("-inf"))


@triton.jit
def _gumbel_argmax_tile(bounds, ids, scores, key0, key1):
    """`gumbel_argmax` among tokens in registers. Returns (token, score)."""
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), -1, tl.int32)
    score = tl.full((), float("-inf"), tl.float32)
    floor = tl.full((), LOWEST_FLOAT, tl.float32)
    top = tl.max(tl.max(bounds, axis=1), axis=0)
    while top >= floor:
        at = tl.min(tl.min(tl.where(bounds == top, ids, MAX_INT32), axis=1), axis=0)
        s = tl.max(tl.max(tl.where(ids == at, scores, float("-inf")), axis=1), axis=0)
        value = s.to(tl.float64) + gumbel(at, key0, key1)
        if value > best:
            best = value
            token = at
            score = s
            floor = tl.maximum((best - (1e-3 + 1e-6 * tl.abs(best))).to(tl.float32), LOWEST_FLOAT)
        bounds = tl.where(ids == at, float("-inf"), bounds)
        top = tl.max(tl.max(bounds, axis=1), axis=0)
    return token, score


@triton.jit
def required_mass(top_p, total):
    """The mass that top-p keeps. Never 0: the best token, before which there is no mass, stays for top_p = 0 too."""
    return tl.maximum(top_p * total, 1e-300)


@triton.jit
def truncated_kernel(
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
    best_ptr,
    peak_ptr,
    mass_ptr,
    list_ptr,
    token_ptr,
    invalid_ptr,
    pending_ptr,
    total_ptr,
    chunks,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP: tl.constexpr,
    CONSTRAINED: tl.constexpr,
):
    """Rows with top-k, top-p or min-p that the tokens of their KEEP best blocks decide: nearly all. The others are
    marked as pending.

    At least k tokens reach the best score of the k-th best block, so tokens below it are never among the top k. The
    token is drawn among those above the top-k and min-p threshold. If the tokens ranked above it have the mass of top-p
    or more, it and all below are excluded, and the draw is repeated with the same noise (rejection as in FlashInfer's
    sorting-free sampling, Ye et al. 2025, with fixed noise).
    """
    wait_for_previous_kernel()
    row = tl.program_id(0)
    state = tl.load(index_ptr + row)
    tl.store(pending_ptr + row, 0)
    if state < 0:
        return
    temperature = tl.load(temperature_ptr + state)
    if tl.load(invalid_ptr + row) != 0:
        return
    if not is_truncated(state, vocab, temperature, top_k_ptr, top_p_ptr, min_p_ptr):
        return
    top_k = tl.load(top_k_ptr + state).to(tl.int32)
    top_p = tl.load(top_p_ptr + state)
    min_p = tl.load(min_p_ptr + state)
    key0, key1 = stream_keys(tl.load(streams_ptr + state), tl.load(positions_ptr + row))
    source = open_row(row, logits_ptr, logits_stride, vocab, constraints, CONSTRAINED)
    block = tl.arange(0, BLOCKS)
    bests = tl.load(
        best_ptr + row.to(tl.int64) * chunks * TILE + block, mask=block < chunks * TILE, other=float("-inf")
    )
    bests = tl.div_rn(bests, temperature)
    peak = tl.max(bests)
    keys = sort_key(bests)
    line = min_p_threshold(peak, min_p)

    floor = line
    least = tl.where(top_k <= KEEP, top_k, KEEP // 2)
    whole = tl.sum((keys >= line).to(tl.int32)) <= KEEP
    if not whole:
        floor = rank_threshold(keys, line, sort_key(peak) + 1, least, KEEP)
        if tl.sum((keys >= floor).to(tl.int32)) > KEEP:  # ties
            floor += 1
        whole = tl.sum((keys >= floor).to(tl.int32)) >= top_k
    # Without top-k and min-p, the blocks only need to have the mass that top-p keeps.
    undecided = (whole == 0) & ((top_k < vocab) | (min_p > 0) | (top_p >= 1))
    needed = tl.full((), 2.0, tl.float64)
    if (whole == 0) & (top_p < 1):
        chunk = tl.arange(0, CHUNKS)
        known = chunk < chunks
        peaks = tl.load(peak_ptr + row * chunks + chunk, mask=known, other=LOWEST_FLOAT)
        masses = tl.load(mass_ptr + row * chunks + chunk, mask=known, other=0.0)
        # The largest logit is peak * temperature, but for its rounding.
        total = tl.sum(masses * tl.exp2((peaks - tl.max(peaks)) * (LOG2_E / temperature)))
        tl.store(total_ptr + row, total)
        needed = required_mass(top_p, total)
        # No block has more than STEPS times its best; the margin is for rounding.
        most = tl.sum(tl.where(keys >= floor, tl.exp2((bests - peak) * LOG2_E), 0.0)) * (STEPS * 1.001)
        undecided = undecided | (most < needed)
    if undecided:
        tl.store(pending_ptr + row, 1)
        return
    ids, scores = _gather(source, keys, block, floor, list_ptr + row * KEEP, temperature, KEEP, TILE, STEPS)
    token_keys = tl.reshape(sort_key(scores), (KEEP * STEPS,))
    if whole and tl.sum((token_keys >= floor).to(tl.int32)) > top_k:
        floor = rank_threshold(token_keys, floor, sort_key(peak) + 1, top_k, top_k)
    alive = sort_key(scores) >= floor

    weights = tl.zeros_like(scores)
    if top_p < 1:
        weights = tl.where(alive, tl.exp2((scores - peak) * LOG2_E), 0.0)
        inside = tl.sum(tl.sum(weights, axis=1), axis=0)
        if whole:
            needed = required_mass(top_p, inside)
        else:
            whole = inside >= needed
    if not whole:
        tl.store(pending_ptr + row, 1)
        return

    bounds = tl.where(alive, scores + gumbel_bound(ids, key0, key1), float("-inf"))
    token, score = _gumbel_argmax_tile(bounds, ids, scores, key0, key1)
    if top_p < 1:
        ahead = (scores > score) | ((scores == score) & (ids < token))
        while tl.sum(tl.sum(tl.where(ahead, weights, 0.0), axis=1), axis=0).to(tl.float64) >= needed:
            bounds = tl.where(ahead, bounds, float("-inf"))
            token, score = _gumbel_argmax_tile(bounds, ids, scores, key0, key1)
            ahead = (scores > score) | ((scores == score) & (ids < token))
    tl.store(token_ptr + row, token)


# ---- a whole row by one program: thresholds in the long tail


@triton.jit
def _tokens_before(source, best_ptr, chunks, temperature, peak, key, token, TILE, STEPS: tl.constexpr):
    """The number of tokens that rank before (``key``, ``token``), and the sum of exp(score - peak) over them. Only
    blocks whose best score reaches the key are read."""
    part: tl.constexpr = min(STEPS, 4)
    lane = tl.arange(0, TILE)
    step = tl.arange(0, part)
    count = tl.zeros((part, TILE), tl.int32)
    mass = tl.zeros((part, TILE), tl.float32)
    for at in range(chunks * (STEPS // part)):
        chunk = at // (STEPS // part)
        live = sort_key(tl.div_rn(tl.load(best_ptr + chunk * TILE + lane), temperature)) >= key
        ids = (at * part + step)[:, None] * TILE + lane[None, :]
        scores = tl.div_rn(logits_of(source, ids, live[None, :] & (ids < source[1])), temperature)
        keys = sort_key(scores)
        before = (keys > key) | ((keys == key) & (ids < token))
        count += before.to(tl.int32)
        mass += tl.where(before, tl.exp2((scores - peak) * LOG2_E), 0.0)
    return tl.sum(tl.sum(count, axis=1), axis=0), tl.sum(tl.sum(mass, axis=1), axis=0)


@triton.jit
def _write_bounds_before(
    source, best_ptr, bound_ptr, chunks, temperature, key0, key1, low, pivot, pivot_id, TILE, STEPS: tl.constexpr
):
    """Recompute the bounds of all blocks from those tokens only that reach the key ``low`` and rank before (``pivot``,
    ``pivot_id``)."""
    part: tl.constexpr = min(STEPS, 4)
    lane = tl.arange(0, TILE)
    step = tl.arange(0, part)
    tl.debug_barrier()
    for chunk in range(chunks):
        live = sort_key(tl.div_rn(tl.load(best_ptr + chunk * TILE + lane), temperature)) >= low
        bound = tl.full((TILE,), float("-inf"), tl.float32)
        for first in range(0, STEPS, part):
            ids = (chunk * STEPS + first + step)[:, None] * TILE + lane[None, :]
            scores = tl.div_rn(logits_of(source, ids, live[None, :] & (ids < source[1])), temperature)
            runs = (sort_key(scores) >= low) & ((scores > pivot) | ((scores == pivot) & (ids < pivot_id)))
            bound = tl.maximum(bound, tl.max(tl.where(runs, scores + gumbel_bound(ids, key0, key1), float("-inf")), 0))
        tl.store(bound_ptr + chunk * TILE + lane, bound)
    tl.debug_barrier()  # other threads read these values


@triton.jit
def full_row_kernel(
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
    best_ptr,
    token_ptr,
    pending_ptr,
    total_ptr,
    chunks,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONSTRAINED: tl.constexpr,
):
    """The rows that `truncated_kernel` marked as pending: the same algorithm, but each step reads the whole row."""
    wait_for_previous_kernel()
    row = tl.program_id(0)
    if tl.load(pending_ptr + row) == 0:
        return
    state = tl.load(index_ptr + row)
    temperature = tl.load(temperature_ptr + state)
    top_k = tl.load(top_k_ptr + state).to(tl.int32)
    top_p = tl.load(top_p_ptr + state)
    key0, key1 = stream_keys(tl.load(streams_ptr + state), tl.load(positions_ptr + row))
    source = open_row(row, logits_ptr, logits_stride, vocab, constraints, CONSTRAINED)
    best_row = best_ptr + row.to(tl.int64) * chunks * TILE
    bound_row = bound_ptr + row.to(tl.int64) * chunks * TILE
    block = tl.arange(0, BLOCKS)
    bests = tl.load(best_row + block, mask=block < chunks * TILE, other=float("-inf"))
    bests = tl.div_rn(bests, temperature)
    peak = tl.max(bests)
    keys = sort_key(bests)
    least = sort_key(tl.full((), LOWEST_FLOAT, tl.float32))
    low = min_p_threshold(peak, tl.load(min_p_ptr + state))
    if top_k < vocab:
        reach, _ = _tokens_before(source, best_row, chunks, temperature, peak, low, MAX_INT32, TILE, STEPS)
        if reach > top_k:
            high = sort_key(peak) + 1
            if tl.sum((keys >= low).to(tl.int32)) >= top_k:
                low = rank_threshold(keys, low, high, top_k, top_k + top_k // 8)
            while low + 1 < high:
                middle = (low >> 1) + (high >> 1) + (low & high & 1)
                reach, _ = _tokens_before(source, best_row, chunks, temperature, peak, middle, MAX_INT32, TILE, STEPS)
                low = tl.where(reach >= top_k, middle, low)
                high = tl.where(reach > top_k, high, tl.where(reach == top_k, middle + 1, middle))

    if low > least:
        _write_bounds_before(
            source, best_row, bound_row, chunks, temperature, key0, key1, low, float("-inf"), 0, TILE, STEPS
        )
    bounds = tl.load(bound_row + block, mask=block < chunks * TILE, other=float("-inf"))
    token, score, _noisy = gumbel_argmax(
        bounds, block, source, temperature, key0, key1, low, float("-inf"), 0, TILE=TILE, STEPS=STEPS
    )
    if top_p < 1:
        total = tl.load(total_ptr + row)
        if low > least:
            _, total = _tokens_before(source, best_row, chunks, temperature, peak, low, MAX_INT32, TILE, STEPS)
        needed = required_mass(top_p, total)
        _, mass = _tokens_before(source, best_row, chunks, temperature, peak, sort_key(score), token, TILE, STEPS)
        while mass.to(tl.float64) >= needed:
            _write_bounds_before(
                source, best_row, bound_row, chunks, temperature, key0, key1, low, score, token, TILE, STEPS
            )
            bounds = tl.load(bound_row + block, mask=block < chunks * TILE, other=float("-inf"))
            token, score, _noisy = gumbel_argmax(
                bounds, block, source, temperature, key0, key1, low, score, token, TILE=TILE, STEPS=STEPS
            )
            _, mass = _tokens_before(source, best_row, chunks, temperature, peak, sort_key(score), token, TILE, STEPS)
    tl.store(token_ptr + row, token)


# ---- log-probabilities


@triton.jit
def _next_with_value(source, best_ptr, chunks, key, after, TILE, STEPS: tl.constexpr):
    """The lowest id above ``after`` whose logit has this key; MAX_INT32 if there is none."""
    lane = tl.arange(0, TILE)
    found = tl.full((), MAX_INT32, tl.int32)
    chunk = tl.maximum(after, 0) // (TILE * STEPS)
    while (chunk < chunks) & (found == MAX_INT32):
        live = sort_key(tl.load(best_ptr + chunk * TILE + lane)) >= key
        for step in range(STEPS):
            ids = (chunk * STEPS + step) * TILE + lane
            wanted = live & (ids < source[1])
            same = wanted & (sort_key(logits_of(source, ids, wanted)) == key) & (ids > after)
            found = tl.minimum(found, tl.min(tl.where(same, ids, MAX_INT32)))
        chunk += 1
    return found


@triton.jit(do_not_specialize=["k"])
def logprobs_kernel(
    logits_ptr,
    logits_stride,
    vocab,
    rows_ptr,
    chosen_ptr,
    best_ptr,
    peak_ptr,
    mass_ptr,
    list_ptr,
    ids_ptr,
    values_ptr,
    ranks_ptr,
    chunks,
    k,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Compute for each of the ``rows`` the chosen token's log-probability and rank, and the k best tokens in order."""
    wait_for_previous_kernel()
    row = tl.program_id(0)
    source = open_row(tl.load(rows_ptr + row), logits_ptr, logits_stride, vocab, (), False)
    best_row = best_ptr + row.to(tl.int64) * chunks * TILE
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(peak_ptr + row * chunks + chunk, mask=chunk < chunks, other=LOWEST_FLOAT)
    masses = tl.load(mass_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks)
    norm = peak + tl.log(tl.sum(masses * tl.exp2((peaks - peak) * LOG2_E)))

    chosen = tl.load(chosen_ptr + row).to(tl.int32)
    value = tl.load(source[0] + chosen).to(tl.float32)
    before, _ = _tokens_before(source, best_row, chunks, 1.0, peak, sort_key(value), -1, TILE, STEPS)
    out = row * (k + 1)
    tl.store(ids_ptr + out, chosen)
    tl.store(values_ptr + out, value - norm)
    tl.store(ranks_ptr + row, before + 1)
    if k > 0:
        block = tl.arange(0, BLOCKS)
        bests = tl.load(best_row + block, mask=block < chunks * TILE, other=float("-inf"))
        keys = sort_key(bests)
        lowest = sort_key(tl.full((), LOWEST_FLOAT, tl.float32))
        floor = lowest
        rest = sort_key(tl.full((), float("-inf"), tl.float32))  # the key of tokens below the floor
        if tl.sum((keys >= floor).to(tl.int32)) > KEEP:
            floor = rank_threshold(keys, lowest, sort_key(peak) + 1, k, KEEP)
            if tl.sum((keys >= floor).to(tl.int32)) > KEEP:  # ties, of which those with the lowest ids are taken
                rest = floor
                floor += 1
        ids, scores = _gather(source, keys, block, floor, list_ptr + row * KEEP, 1.0, KEEP, TILE, STEPS)
        after = -1
        for place in range(1, k + 1):
            top = tl.max(tl.max(scores, axis=1), axis=0)
            if top > float("-inf"):
                at = tl.min(tl.min(tl.where(scores == top, ids, MAX_INT32), axis=1), axis=0)
                scores = tl.where(ids == at, float("-inf"), scores)
            else:
                at = _next_with_value(source, best_row, chunks, rest, after, TILE, STEPS)
                after = at
                top = tl.load(source[0] + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            tl.store(ids_ptr + out + place, at)
            tl.store(values_ptr + out + place, top - norm)
