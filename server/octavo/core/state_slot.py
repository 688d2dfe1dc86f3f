"""A state of recurrent layers in the pool's blocks, and what it is to others: see `octavo.core.states`."""

from __future__ import annotations

from octavo.core.free_queue import KVCacheBlock
from octavo.core.retention import MINUTE

RETAINED = 1e12  # more than anything is worth that nobody wants kept; the seconds at which its time ends come to it


class StateBlock(KVCacheBlock):
    """A block of a pool that holds states as well as keys and values."""

    __slots__ = ("slot", "worth")

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self.slot: StateSlot | None = None  # of which it holds a part, instead of keys and values
        self.worth = 0.0  # when its last holder left it


class StateSlot:
    """Blocks that hold one state. ``holders``: sequences that read or write it, and steps under way that do."""

    __slots__ = ("blocks", "holders", "pages", "snapshot")

    def __init__(self, blocks: list[StateBlock]) -> None:
        self.blocks = blocks
        self.pages = [block.block_id for block in blocks]
        self.holders = 0
        self.snapshot: Snapshot | None = None  # what it is, or will be, to others: then nobody may add to it


class Snapshot:
    """The state before the token at ``position``. ``point`` says why it is kept, ``base`` which snapshot of the same
    tokens comes before it."""

    __slots__ = ("base", "end", "level", "parent_hash", "point", "position", "seconds", "serial", "slot", "tokens")

    def __init__(self, position: int, point: str, base: Snapshot | None) -> None:
        self.position, self.point, self.base = position, point, base
        self.slot: StateSlot | None = None  # None once it is forgotten
        self.level = 0.0  # when it was last left or used
        self.serial = 0  # of its place in the queue; 0: it is held, or forgotten
        self.parent_hash: bytes | None = None  # of its whole blocks; None: it cannot be found yet
        self.tokens: tuple[int, ...] = ()  # behind these
        self.seconds = 0.0  # that a client wants it kept after each use
        self.end = 0.0  # until when it is kept; 0: it is worth what it saves


def slot_of(block: KVCacheBlock) -> StateSlot | None:
    """The slot that the block is a part of, if it is one."""
    return block.slot if isinstance(block, StateBlock) else None


def worth_of(block: KVCacheBlock) -> float:
    """The worth of a cached block without holders."""
    if block.bucket is not None:
        return RETAINED + block.bucket * MINUTE
    return block.worth if isinstance(block, StateBlock) else 0.0
