"""The states of running sequences: where they lie, and what of a step is committed to them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.interface.kv_cache_layout import KVCacheLayout
from octavo_kernels import LayerState, StateMetadata

_NUMBERS = ("num_tokens", "num_pending", "num_kept", "num_before", "batch_rows")
_TABLES = ("read_pages", "write_pages", "snapshot_pages")


class SequenceStates:
    """One row for each of up to S sequences, beside those of `InputBatch`."""

    def __init__(self, max_num_reqs: int, num_blocks: int) -> None:
        """``num_blocks``: of a state."""
        self.read_pages = np.zeros((max_num_reqs, num_blocks), dtype=np.int32)
        self.write_pages = np.zeros((max_num_reqs, num_blocks), dtype=np.int32)
        self.snapshot_pages = np.zeros((max_num_reqs, num_blocks), dtype=np.int32)
        self.snapshot_at = np.zeros(max_num_reqs, dtype=np.int64)  # tokens that this step's snapshot has seen; 0: none
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)  # that the state in `read_pages` has seen
        self.num_kept = np.zeros(max_num_reqs, dtype=np.int64)  # rows that this step leaves pending
        self._moved: set[int] = set()  # rows whose state this step writes elsewhere
        self._snapshots: list[int] = []  # rows of which this step takes one

    def add(self, row: int, pages: list[int], num_tokens: int) -> None:
        """A sequence whose state lies in ``pages``."""
        self.read_pages[row] = self.write_pages[row] = pages
        self.num_tokens[row], self.snapshot_at[row] = num_tokens, 0

    def move(self, row: int, pages: list[int]) -> None:
        """Have the next step write the state to ``pages``."""
        self.write_pages[row] = pages
        self._moved.add(row)

    def snapshot(self, row: int, position: int, pages: list[int]) -> None:
        """Have the next step write the state before ``position`` to ``pages`` too."""
        self.snapshot_pages[row], self.snapshot_at[row] = pages, position
        self._snapshots.append(row)

    def begin_step(self, rows: np.ndarray, num_kept: list[int]) -> None:
        """The next step is of ``rows`` int64 [R], and leaves so many rows of each pending."""
        self.num_kept[rows] = num_kept

    def end_step(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """The step is computed, of ``rows`` up to the positions ``computed``, int64 [R] both."""
        self.num_tokens[rows] = computed - self.num_kept[rows]
        for row in self._moved:
            self.read_pages[row] = self.write_pages[row]
        self._moved.clear()
        if self._snapshots:
            self.snapshot_at[self._snapshots] = 0
            self._snapshots.clear()

    def metadata(self, rows: np.ndarray, computed: np.ndarray, query_start_loc: Tensor) -> StateMetadata:
        """Describe a step of ``rows``, which had ``computed`` tokens before it, int64 [R] both."""
        seen = self.num_tokens[rows]
        write_pages = _int32(self.write_pages[rows])
        snapshot_pages = _int32(self.snapshot_pages[rows]) if self._snapshots else write_pages
        return StateMetadata(
            query_start_loc=query_start_loc,
            num_tokens=_int32(seen),
            num_pending=_int32(computed - seen),
            num_kept=_int32(self.num_kept[rows]),
            num_before=_int32(np.maximum(self.snapshot_at[rows] - seen, 0)),
            batch_rows=_int32(rows),
            read_pages=_int32(self.read_pages[rows]),
            write_pages=write_pages,
            snapshot_pages=snapshot_pages,
        )


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32, copy=False))


def empty_metadata(states: SequenceStates, query_start_loc: Tensor) -> StateMetadata:
    """Room for that of any step, in memory that stays."""
    count, pages = states.read_pages.shape
    numbers = {name: torch.zeros(count, dtype=torch.int32) for name in _NUMBERS}
    tables = {name: torch.zeros(count, pages, dtype=torch.int32) for name in _TABLES}
    return StateMetadata(query_start_loc=query_start_loc, **numbers, **tables)


def fill_metadata(ours: StateMetadata, theirs: StateMetadata) -> None:
    """Copy ``theirs`` into ``ours``, but for where rows begin."""
    count = len(theirs.num_tokens)
    for name in (*_NUMBERS, "read_pages", "write_pages"):
        getattr(ours, name)[:count] = getattr(theirs, name)
    if theirs.snapshot_pages is not theirs.write_pages:
        ours.snapshot_pages[:count] = theirs.snapshot_pages


def allocate_states(layout: KVCacheLayout, blocks: Tensor, max_num_reqs: int, num_pending: int) -> list[LayerState]:
    """Lay out the states of each recurrent layer in the ``blocks`` of the pool, with room beside them for
    ``num_pending`` rows of each sequence."""
    spec = layout.state
    if spec is None:
        return []
    of_windows = spec.num_layers * spec.matrix_granules

    def pending(*shape: int) -> Tensor:
        return torch.zeros(max_num_reqs, num_pending, *shape, dtype=torch.float32, device=blocks.device)

    return [
        LayerState(
            blocks,
            layout.block_bytes // spec.granule_bytes,
            spec.granule_bytes,
            layer * spec.matrix_granules,
            of_windows + layer * spec.window_granules,
            spec.columns,
            spec.channels_of_granule,
            pending(spec.channels),
            pending(spec.key_heads, spec.key_size),
            pending(spec.value_heads, spec.value_size),
            pending(spec.value_heads),
        )
        for layer in range(spec.num_layers)
    ]
