"""What the pool's blocks are, by the blocks themselves."""

from __future__ import annotations

from octavo.core.block_pool import BlockPool
from octavo.core.free_queue import KVCacheBlock
from octavo.core.state_slot import slot_of
from octavo.interface.block_map import BlockCounts


def held(block: KVCacheBlock) -> bool:
    slot = slot_of(block)
    return bool(block.ref_cnt if slot is None else slot.holders)


def offers(block: KVCacheBlock) -> bool:
    slot = slot_of(block)
    return bool(block.tokens) if slot is None else slot.snapshot is not None


def recount(pool: BlockPool) -> BlockCounts:
    """What the pool's blocks are, by the blocks themselves."""
    blocks, unused = pool.blocks[1:], pool.num_usable_blocks - len(pool.blocks) + 1
    return BlockCounts(
        num_blocks=pool.num_usable_blocks,
        free=unused + sum(not held(block) and not offers(block) for block in blocks),
        used=sum(held(block) for block in blocks),
        shared=sum(block.ref_cnt > 1 for block in blocks),
        cached=sum(not held(block) and offers(block) for block in blocks),
        partial=sum(bool(block.tokens) and block.block_hash is None for block in blocks),
    )
