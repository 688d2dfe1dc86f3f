"""What somebody who is told of the prefix cache's events alone knows of it."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, LogEntry, merge_events
from octavo.core.prefix_hash import block_hash, root_hash


class CacheMirror:
    """Applies events, and checks that each says what happened: nothing is stored twice, nothing unknown removed, and
    hashes are those of the tokens told."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._found: set[tuple[int, bytes]] = set()

    @property
    def keys(self) -> set[bytes]:
        """What the prefix cache calls the blocks that it finds."""
        return {own + (bytes([group]) if group else b"") for group, own in self._found}

    def apply(self, entries: Iterable[LogEntry]) -> None:
        for event in merge_events(entries):
            if isinstance(event, AllBlocksCleared):
                self._found.clear()
                continue
            blocks = {(event.group, own) for own in event.hashes}
            assert len(blocks) == len(event.hashes) > 0
            if isinstance(event, BlockRemoved):
                assert blocks <= self._found, "removed without having been there"
                self._found -= blocks
            else:
                assert not blocks & self._found, "stored twice"
                self._check_hashes(event)
                self._found |= blocks

    def _check_hashes(self, event: BlockStored) -> None:
        size = self._block_size
        assert len(event.tokens) == size * len(event.hashes)
        assert event.parent is None or event.cache_salt is None
        parent = root_hash(event.cache_salt, event.adapter) if event.parent is None else event.parent
        for i, own in enumerate(event.hashes):
            assert own == block_hash(parent, event.tokens[i * size : (i + 1) * size])
            parent = own
