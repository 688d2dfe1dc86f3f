"""Events of the prefix cache, for routers: blocks that it gains and loses. Whole blocks only, no partly filled ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.prefix_hash import HASH_BYTES


@dataclass(slots=True)
class BlockStored:
    """Blocks of one group, each the one before's continuation, are found from now on."""

    group: int
    hashes: list[bytes]
    parent: bytes | None  # of the first block; None: it begins a sequence
    tokens: list[int]  # of all the blocks
    cache_salt: str | None  # of a sequence that begins here
    adapter: str | None = None  # the key of the sequence's LoRA adapter


@dataclass(slots=True)
class BlockRemoved:
    """Blocks of one group are no longer found."""

    group: int
    hashes: list[bytes]


@dataclass(slots=True)
class AllBlocksCleared:
    """The prefix cache was emptied: no group finds a block any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
# A block that was stored (group, its hash, the one before or None, tokens, cache_salt, adapter), the key of one that
# was removed (`FullAttentionManager.key`), or None: all were. To keep that costs a step next to nothing.
LogEntry = tuple[int, bytes, bytes | None, tuple[int, ...], str | None, str | None] | bytes | None


class KVEventLog:
    """Events since the last `take`, in order."""

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self.add = self._entries.append

    def take(self) -> list[LogEntry]:
        """The entries, which are forgotten here."""
        entries, self._entries = self._entries, []
        self.add = self._entries.append
        return entries


def merge_events(entries: Iterable[LogEntry]) -> list[KVEvent]:
    """Entries of a log as events. Neighbours are one event, where that changes nothing."""
    events: list[KVEvent] = []
    runs: dict[int, BlockStored] = {}  # the last of each group that may be continued
    for entry in entries:
        if entry is None:
            events = [AllBlocksCleared()]
            runs.clear()
        elif isinstance(entry, bytes):
            runs.clear()
            own, group = entry[:HASH_BYTES], entry[HASH_BYTES] if len(entry) > HASH_BYTES else 0
            last = events[-1] if events else None
            if isinstance(last, BlockRemoved) and last.group == group:
                last.hashes.append(own)
            else:
                events.append(BlockRemoved(group, [own]))
        else:
            group, own, parent, tokens, salt, adapter = entry
            run = runs.get(group)
            if run is not None and parent is not None and run.hashes[-1] == parent:
                run.hashes.append(own)
                run.tokens += tokens
            else:
                runs[group] = BlockStored(group, [own], parent, list(tokens), salt, adapter)
                events.append(runs[group])
    return events
