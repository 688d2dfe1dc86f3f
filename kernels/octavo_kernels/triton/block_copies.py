"""Copies of whole KV blocks, of every layer and every pair in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.devices import facts

CHUNK = 256  # words a program moves of one block
PAIRS = 16  # pairs in flight at once, also for fewer pairs, so that one compiled kernel serves all
PROGRAMS_PER_SM = 2  # that share a scratch buffer
SCRATCH = 32 << 20  # bytes of that buffer, which the memory profile does not count

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["num_items", "num_pairs"])
def copy_blocks_kernel(
    blocks_ptr,
    pairs_ptr,
    scratch_ptr,
    num_items,
    num_pairs,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """An item is one chunk of every block. Its program reads the chunk of all sources before it writes any, and no
    other program touches it: all copies happen as if at once, without a second launch."""
    mine = scratch_ptr + tl.program_id(0).to(tl.int64) * num_pairs * CHUNK
    columns = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        base = blocks_ptr + item * CHUNK
        inside = (item * CHUNK + columns < WORDS)[None, :]
        for first in range(0, num_pairs, PAIRS):
            pair = first + tl.arange(0, PAIRS)
            wanted = (pair < num_pairs)[:, None] & inside
            source = tl.load(pairs_ptr + 2 * pair, mask=pair < num_pairs, other=0)
            words = tl.load(base + source[:, None] * WORDS + columns[None, :], mask=wanted)
            tl.store(mine + pair[:, None] * CHUNK + columns[None, :], words, mask=wanted)
        tl.debug_barrier()
        for first in range(0, num_pairs, PAIRS):
            pair = first + tl.arange(0, PAIRS)
            wanted = (pair < num_pairs)[:, None] & inside
            target = tl.load(pairs_ptr + 2 * pair + 1, mask=pair < num_pairs, other=0)
            words = tl.load(mine + pair[:, None] * CHUNK + columns[None, :], mask=wanted)
            tl.store(base + target[:, None] * WORDS + columns[None, :], words, mask=wanted)
        tl.debug_barrier()


def copy_blocks(blocks: Tensor, pairs: Tensor) -> None:
    """See `octavo_kernels.copy_blocks`. Raises ValueError for blocks that are not contiguous."""
    if pairs.numel() == 0:
        return
    if not blocks.is_contiguous():
        raise ValueError(f"blocks of a KV cache with strides {blocks.stride()} are not contiguous")
    size = blocks[0].nbytes
    word = next(n for n in _WORDS if size % n == 0)
    words = size // word
    chunk = min(CHUNK, triton.next_power_of_2(words))
    items = triton.cdiv(words, chunk)
    # Each program needs scratch for its chunk of every pair: with more than 60 pairs, fewer programs are started.
    programs = max(
        1, min(items, PROGRAMS_PER_SM * facts(blocks.device).multiprocessors, SCRATCH // (len(pairs) * chunk * word))
    )
    flat = blocks.view(-1).view(_WORDS[word])
    copy_blocks_kernel[(programs,)](
        flat,
        pairs.contiguous(),
        torch.empty(programs * len(pairs) * chunk, dtype=flat.dtype, device=flat.device),
        items,
        len(pairs),
        WORDS=words,
        CHUNK=chunk,
        PAIRS=PAIRS,
        num_warps=4,
    )
