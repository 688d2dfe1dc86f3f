"""The work lists of decode attention, made on the device once per step for all layers.

The host needs to know shapes only, so a captured step serves any lengths, and the attention kernel of each layer finds
its work with one load.
"""

# Triton reads these functions' source: annotations must not be strings (no `from __future__ import annotations`).

import triton
import triton.language as tl

from octavo_kernels.triton.attention_tiles import first_seen
from octavo_kernels.triton.dependent_launch import wait_for_previous_kernel

LANES = 128  # list entries that a program writes at once


@triton.jit
def first_visible_key(length, queries, window, CHUNKED: tl.constexpr, ALIGN: tl.constexpr):
    """The first key that a sequence's first query may attend to, rounded down to a multiple of ALIGN."""
    return tl.maximum(first_seen(length - queries, window, CHUNKED), 0) // ALIGN * ALIGN


@triton.jit(
    do_not_specialize=["num_seqs", "num_rows", "max_queries", "window", "programs", "num_items", "num_planned_rows"]
)
def plan_decode(
    starts_ptr,
    seq_lens_ptr,
    items_ptr,
    row_chunks_ptr,
    num_seqs,
    num_rows,
    max_queries,
    window,
    programs,
    num_items,
    num_planned_rows,
    NUM_KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    SEQS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (sequences). The items of a sequence are its tiles (TOKENS queries of a group of heads) times the chunks of
    its keys. A sequence with more than ``max_queries`` new tokens has none.

    ``items`` int32 [items, 8], for each item: sequence (-1: nothing to do), first row of the tile, number of queries,
    position of the first query, first key of the chunk, end of the chunk's keys, number of chunks of the sequence.
    ``row_chunks`` int32 [rows, 4], for each row: first item of its tile, place in the tile, number of chunks to sum.
    With 1 chunk its item writes the row; 0 means that the row belongs to no sequence.
    """
    wait_for_previous_kernel()
    ALIGN: tl.constexpr = FIXED_CHUNK if FIXED_CHUNK > 0 else BLOCK_N
    all_seqs = tl.arange(0, SEQS)
    real = all_seqs < num_seqs
    begins = tl.load(starts_ptr + all_seqs, mask=real, other=0)
    counts = tl.load(starts_ptr + all_seqs + 1, mask=real, other=0) - begins
    lengths = tl.load(seq_lens_ptr + all_seqs, mask=real, other=0)
    split = (counts > 0) & (counts <= max_queries) & (lengths > 0)
    tiles = tl.where(split, (counts + TOKENS - 1) // TOKENS, 0)
    keys = lengths
    if HAS_WINDOW:
        keys -= first_visible_key(lengths, counts, window, CHUNKED, ALIGN)
    if FIXED_CHUNK > 0:
        chunk = FIXED_CHUNK
    else:
        whole = tl.sum((tiles * tl.where(split, keys, 0)).to(tl.int64)) * NUM_KV_HEADS
        even = ((whole + programs - 1) // programs).to(tl.int32)
        chunk = tl.maximum((even + BLOCK_N - 1) // BLOCK_N * BLOCK_N, MIN_CHUNK)
    num_items_of = tiles * ((keys + chunk - 1) // chunk)

    r = tl.program_id(0)
    begin = tl.load(starts_ptr + r)
    queries = tl.load(starts_ptr + r + 1) - begin
    length = tl.load(seq_lens_ptr + r)
    first = 0
    if HAS_WINDOW:
        first = first_visible_key(length, queries, window, CHUNKED, ALIGN)
    chunks = tl.maximum((length - first + chunk - 1) // chunk, 1)
    if FIXED_CHUNK == 0:  # equal chunks, since a short last one would leave its program idle
        chunk = ((length - first + chunks - 1) // chunks + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    first_item = tl.sum(tl.where(all_seqs < r, num_items_of, 0))
    num_items_here = tl.sum(tl.where(all_seqs == r, num_items_of, 0))
    lane = tl.arange(0, LANES)
    for at in range(0, num_items_here, LANES):
        local = at + lane
        token = local // chunks * TOKENS
        position = length - queries + token
        low = first + local % chunks * chunk
        last = position + tl.minimum(queries - token, TOKENS)
        if HAS_LIMIT:
            last = tl.maximum(last, length)
        # Without limits no query of the tile attends to keys after its last query.
        high = tl.minimum(low + chunk, last)
        item = items_ptr + (first_item + local) * 8
        in_list = (local < num_items_here) & (first_item + local < num_items)
        tl.store(item, r, mask=in_list)
        tl.store(item + 1, begin + token, mask=in_list)
        tl.store(item + 2, tl.minimum(tl.minimum(queries - token, TOKENS), num_rows - begin - token), mask=in_list)
        tl.store(item + 3, position, mask=in_list)
        tl.store(item + 4, low, mask=in_list)
        tl.store(item + 5, high, mask=in_list)
        tl.store(item + 6, chunks, mask=in_list)
    summed = tl.where(num_items_here > 0, chunks, tl.where(length > 0, 1, 0))
    for at in range(0, queries, LANES):
        token = at + lane
        row = begin + token
        row_chunk = row_chunks_ptr + row * 4
        in_list = (token < queries) & (row < num_planned_rows)
        tl.store(row_chunk, first_item + token // TOKENS * chunks, mask=in_list)
        tl.store(row_chunk + 1, token % TOKENS, mask=in_list)
        tl.store(row_chunk + 2, tl.where(row < num_rows, summed, 0), mask=in_list)
    # Entries that belong to no sequence, distributed over all programs.
    step = tl.num_programs(0) * LANES
    for at in range(tl.sum(num_items_of) + r * LANES, num_items, step):
        tl.store(items_ptr + (at + lane) * 8, -1, mask=at + lane < num_items)
    for at in range(tl.load(starts_ptr + num_seqs) + r * LANES, num_planned_rows, step):
        tl.store(row_chunks_ptr + (at + lane) * 4 + 2, 0, mask=at + lane < num_planned_rows)
