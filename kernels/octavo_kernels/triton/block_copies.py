"""Copies of whole KV blocks, of every layer and every pair in one launch."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 256  # words a program moves of one block
PAIRS = 16  # pairs in flight at once, also for fewer pairs, so that one compiled kernel serves all
PROGRAMS = 264  # that share a scratch buffer: two per multiprocessor of a Hopper GPU
SCRATCH = 32 << 20  # bytes of that buffer, which the memory profile does not count

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["num_items", "num_pairs"])
def copy_blocks_kernel(
    cache_ptr,
    layer_offsets_ptr,
    pairs_ptr,
    scratch_ptr,
    half_stride,
    block_stride,
    num_items,
    num_pairs,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """An item is one chunk of every block of one layer's keys or values. Its program reads the chunk of all sources
    before it writes any, and no other program touches it: all copies happen as if at once, without a second launch."""
    chunks: tl.constexpr = (WORDS + CHUNK - 1) // CHUNK
    mine = scratch_ptr + tl.program_id(0).to(tl.int64) * num_pairs * CHUNK
    columns = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        chunk = item % chunks
        half = (item // chunks) % 2
        base = cache_ptr + tl.load(layer_offsets_ptr + item // chunks // 2) + half * half_stride + chunk * CHUNK
        inside = (chunk * CHUNK + columns < WORDS)[None, :]
        for first in range(0, num_pairs, PAIRS):
            pair = first + tl.arange(0, PAIRS)
            wanted = (pair < num_pairs)[:, None] & inside
            source = tl.load(pairs_ptr + 2 * pair, mask=pair < num_pairs, other=0)
            words = tl.load(base + source[:, None] * block_stride + columns[None, :], mask=wanted)
            tl.store(mine + pair[:, None] * CHUNK + columns[None, :], words, mask=wanted)
        tl.debug_barrier()
        for first in range(0, num_pairs, PAIRS):
            pair = first + tl.arange(0, PAIRS)
            wanted = (pair < num_pairs)[:, None] & inside
            target = tl.load(pairs_ptr + 2 * pair + 1, mask=pair < num_pairs, other=0)
            words = tl.load(mine + pair[:, None] * CHUNK + columns[None, :], mask=wanted)
            tl.store(base + target[:, None] * block_stride + columns[None, :], words, mask=wanted)
        tl.debug_barrier()


def copy_blocks(kv_caches: list[Tensor], pairs: Tensor) -> None:
    """See `octavo_kernels.copy_blocks`. Raises ValueError for blocks that are not contiguous."""
    if pairs.numel() == 0:
        return
    for caches in _alike(kv_caches):
        _copy(caches, pairs.contiguous())


def _alike(kv_caches: list[Tensor]) -> list[list[Tensor]]:
    """The layers, grouped by layout; nearly always there is one group."""
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for cache in kv_caches:
        groups.setdefault((cache.dtype, cache.shape, cache.stride()), []).append(cache)
    return list(groups.values())


def _copy(caches: list[Tensor], pairs: Tensor) -> None:
    first = caches[0]
    if not first[0, 0].is_contiguous():
        raise ValueError(f"the blocks of a KV cache with strides {first.stride()} are not contiguous")
    size = first.element_size()
    block, half_stride, block_stride = (n * size for n in (first[0, 0].numel(), first.stride(0), first.stride(1)))
    word = next(n for n in _WORDS if not any(length % n for length in (block, half_stride, block_stride)))
    words = block // word
    chunk = min(CHUNK, triton.next_power_of_2(words))
    items = len(caches) * 2 * triton.cdiv(words, chunk)
    # Each program needs scratch for its chunk of every pair: with more than 60 pairs, fewer programs are started.
    programs = max(1, min(items, PROGRAMS, SCRATCH // (len(pairs) * chunk * word)))
    base = first[0, 0].view(-1).view(_WORDS[word])
    copy_blocks_kernel[(programs,)](
        base,
        _layer_offsets(tuple(cache.data_ptr() for cache in caches), word, first.device),
        pairs,
        torch.empty(programs * len(pairs) * chunk, dtype=base.dtype, device=first.device),
        half_stride // word,
        block_stride // word,
        items,
        len(pairs),
        WORDS=words,
        CHUNK=chunk,
        PAIRS=PAIRS,
        num_warps=4,
    )


@lru_cache(maxsize=16)
def _layer_offsets(addresses: tuple[int, ...], word: int, device: torch.device) -> Tensor:
    """int64 [layers]: the start of each layer's cache in words, relative to the first. The caches are separate
    allocations that are made once, so this address arithmetic is cached."""
    return torch.tensor([(address - addresses[0]) // word for address in addresses], device=device)
