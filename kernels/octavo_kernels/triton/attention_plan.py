"""Who does which part of a step's decode attention: work lists made on the device, once for all of its layers.

The host knows shapes alone, so a captured step serves any lengths; and a kernel that runs in every layer finds what
it has to do with one load.
"""

# Triton reads these functions' source: annotations must not be strings (no `from __future__ import annotations`).

import triton
import triton.language as tl

from octavo_kernels.triton.dependent_launch import await_previous

LANES = 128  # entries that a program writes at once


@triton.jit
def first_seen(length, queries, window, ALIGN: tl.constexpr):
    """The key, a multiple of ALIGN, from which a sequence's first query may look."""
    return tl.maximum(length - queries - window + 1, 0) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["num_seqs", "num_rows", "max_queries", "window", "programs", "num_items", "num_owners"])
def plan_decode(
    starts_ptr,
    seq_lens_ptr,
    items_ptr,
    owners_ptr,
    num_seqs,
    num_rows,
    max_queries,
    window,
    programs,
    num_items,
    num_owners,
    NUM_KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (sequences). A sequence has as many items as tiles, of TOKENS queries of a group of heads, times chunks of
    its keys; one with more than ``max_queries`` new tokens has none.

    ``items`` int32 [items, 8], of each: its sequence (-1: there is nothing to do), the tile's first row, its queries,
    the first one's position, the chunk's first key and the key after its last, how many chunks the sequence has.
    ``owners`` int32 [rows, 4], of each row: the first item of its tile, its place in the tile, and how many chunks it
    is the sum of: 1 is written by whoever has it, 0 says that the row belongs to no sequence.
    """
    await_previous()
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
        keys -= first_seen(lengths, counts, window, ALIGN)
    if FIXED_CHUNK > 0:
        chunk = FIXED_CHUNK
    else:
        whole = tl.sum((tiles * tl.where(split, keys, 0)).to(tl.int64)) * NUM_KV_HEADS
        even = ((whole + programs - 1) // programs).to(tl.int32)
        chunk = tl.maximum((even + BLOCK_N - 1) // BLOCK_N * BLOCK_N, MIN_CHUNK)
    shares = tiles * ((keys + chunk - 1) // chunk)

    r = tl.program_id(0)
    begin = tl.load(starts_ptr + r)
    queries = tl.load(starts_ptr + r + 1) - begin
    length = tl.load(seq_lens_ptr + r)
    first = 0
    if HAS_WINDOW:
        first = first_seen(length, queries, window, ALIGN)
    chunks = tl.maximum((length - first + chunk - 1) // chunk, 1)
    if FIXED_CHUNK == 0:  # a last chunk that is short would leave its program idle: equal parts instead
        chunk = ((length - first + chunks - 1) // chunks + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    first_item = tl.sum(tl.where(all_seqs < r, shares, 0))
    share = tl.sum(tl.where(all_seqs == r, shares, 0))
    lane = tl.arange(0, LANES)
    for at in range(0, share, LANES):
        local = at + lane
        token = local // chunks * TOKENS
        position = length - queries + token
        low = first + local % chunks * chunk
        # A tile of the chunk sees no further than its last query.
        high = tl.minimum(low + chunk, position + tl.minimum(queries - token, TOKENS))
        item = items_ptr + (first_item + local) * 8
        mine = (local < share) & (first_item + local < num_items)
        tl.store(item, r, mask=mine)
        tl.store(item + 1, begin + token, mask=mine)
        tl.store(item + 2, tl.minimum(tl.minimum(queries - token, TOKENS), num_rows - begin - token), mask=mine)
        tl.store(item + 3, position, mask=mine)
        tl.store(item + 4, low, mask=mine)
        tl.store(item + 5, high, mask=mine)
        tl.store(item + 6, chunks, mask=mine)
    summed = tl.where(share > 0, chunks, tl.where(length > 0, 1, 0))
    for at in range(0, queries, LANES):
        token = at + lane
        row = begin + token
        owner = owners_ptr + row * 4
        mine = (token < queries) & (row < num_owners)
        tl.store(owner, first_item + token // TOKENS * chunks, mask=mine)
        tl.store(owner + 1, token % TOKENS, mask=mine)
        tl.store(owner + 2, tl.where(row < num_rows, summed, 0), mask=mine)
    # What no sequence has, shared out among all programs.
    step = tl.num_programs(0) * LANES
    for at in range(tl.sum(shares) + r * LANES, num_items, step):
        tl.store(items_ptr + (at + lane) * 8, -1, mask=at + lane < num_items)
    for at in range(tl.load(starts_ptr + num_seqs) + r * LANES, num_owners, step):
        tl.store(owners_ptr + (at + lane) * 4 + 2, 0, mask=at + lane < num_owners)
