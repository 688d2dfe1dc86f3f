"""Layers that keep the same positions share block tables.

Layers with a window need only the last positions, so layers form groups with a block table each. A block holds
``block_size`` positions of one group. Groups are made so that blocks are of one size: one pool serves them all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.state_spec import StateSpec

NO_BOUND = 1 << 60
# If kinds of layers differ by less, blocks have the size of the larger: padding costs less than more groups.
NEARLY_EQUAL = 1.25


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table."""

    layers: tuple[int, ...]
    window: int | None = None  # positions that a token sees, itself included; None: all before it


def make_groups(specs: Sequence[KVCacheSpec], max_model_len: int) -> list[KVCacheGroup]:
    """Groups of the layers that ``specs`` describe, those without a window first. A window that no sequence of
    ``max_model_len`` leaves is none. One group where all layers keep the same positions.

    Otherwise a group has as many layers as fit into what the rarest kind of layers needs for a block, as in vLLM: of 29
    layers with and 5 without a window, six groups of four or five layers and one of five.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        window = spec.window if spec.window is not None and spec.window < max_model_len else None
        kinds.setdefault(window, []).append(layer)
    sizes = {window: sum(specs[layer].bytes_per_token() for layer in layers) for window, layers in kinds.items()}
    block = max(sizes.values()) if max(sizes.values()) < NEARLY_EQUAL * min(sizes.values()) else min(sizes.values())
    groups = []
    for window in sorted(kinds, key=lambda window: (window is not None, window)):
        layers = kinds[window]
        count = min(-(-sizes[window] // block), len(layers))
        ends = [i * len(layers) // count for i in range(count + 1)]
        groups += [KVCacheGroup(tuple(layers[a:b]), window) for a, b in pairwise(ends)]
    return groups


def groups_of_stage(groups: Sequence[KVCacheGroup], layers: range) -> list[KVCacheGroup]:
    """Make as many groups of each window as ``groups``, a whole model's, for ``layers`` of it, numbered from 0 on, so
    that a sequence holds the same on every stage of a pipeline. Each has an equal share of the stage's layers, if any.
    """
    found = []
    for window, alike in groupby(groups, key=lambda group: group.window):
        of_window = [group.layers for group in alike]
        own = [layer - layers.start for one in of_window for layer in one if layer in layers]
        ends = [i * len(own) // len(of_window) for i in range(len(of_window) + 1)]
        found += [KVCacheGroup(tuple(own[a:b]), window) for a, b in pairwise(ends)]
    return found


@dataclass(frozen=True)
class KVCacheLayout:
    """The layout of keys and values in blocks, and the number of blocks that sequences take.

    ``step_tokens``: maximum number of a sequence's tokens in the steps that run at the same time.
    """

    specs: tuple[KVCacheSpec, ...]
    groups: tuple[KVCacheGroup, ...]
    block_size: int
    step_tokens: int
    state: StateSpec | None = None  # of recurrent layers, in blocks of the same pool; None: there are none

    @property
    def padding(self) -> float:
        """The share of all blocks' memory that no layer uses, of sequences of which every group keeps as much."""
        used = self.block_size * sum(spec.bytes_per_token() for spec in self.specs)
        return 1 - used / (self.block_bytes * len(self.groups))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: those of the largest group. Other groups leave the rest as padding."""
        of_keys = self.block_size * max(
            sum(self.specs[layer].bytes_per_token() for layer in group.layers) for group in self.groups
        )
        return of_keys if self.state is None else self.state.block_bytes(of_keys)

    @property
    def state_blocks(self) -> int:
        """Blocks of the state of a sequence."""
        return 0 if self.state is None else self.state.num_blocks(self.block_bytes)

    def groups_of(self, layers: range) -> list[KVCacheGroup]:
        """The groups as the model has them whose layers are ``layers`` of all, numbered from 0 on."""
        return [
            replace(group, layers=tuple(i - layers.start for i in group.layers if i in layers)) for group in self.groups
        ]

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` holds at most at any time."""
        blocks = -(-num_tokens // self.block_size)
        of_keys = sum(
            min(blocks, blocks_of_group(group.window, self.block_size, self.step_tokens)) for group in self.groups
        )
        return of_keys + self.state_blocks

    def longest(self, num_blocks: int, limit: int) -> int:
        """The length up to ``limit`` of the longest sequence that ``num_blocks`` hold, in whole blocks where it is not
        ``limit``."""
        blocks = range(-(-limit // self.block_size) + 1)
        most = bisect_right(blocks, num_blocks, key=lambda count: self.most_blocks(count * self.block_size)) - 1
        return min(limit, max(0, most) * self.block_size)


def make_layout(
    specs: Sequence[KVCacheSpec],
    max_model_len: int,
    block_size: int,
    step_tokens: int,
    grouped: bool = True,
    part_of: tuple[Sequence[KVCacheSpec], int] | None = None,
    state: StateSpec | None = None,
) -> KVCacheLayout:
    """Make the layout of a model's layers. ``grouped`` False: all layers keep every position. ``part_of``: the specs of
    all layers of a model, of which these are some, and the number of the first of them. ``state``: of its recurrent
    layers."""
    groups = [KVCacheGroup(tuple(range(len(specs))))]
    if grouped and part_of is not None:
        groups = groups_of_stage(make_groups(part_of[0], max_model_len), range(part_of[1], part_of[1] + len(specs)))
    elif grouped and specs:
        groups = make_groups(specs, max_model_len)
    return KVCacheLayout(tuple(specs), tuple(groups), block_size, step_tokens, state)


def blocks_of_group(window: int | None, block_size: int, step_tokens: int) -> int:
    """Blocks that a sequence of any length holds at most in a group with that window, while ``step_tokens`` of it are
    computed."""
    if window is None:
        return NO_BOUND
    # The window before the first token, these, and what precedes them in a block that was copied: wherever that begins.
    # A cached prefix is known by its last block, also where a token sees itself alone.
    return -(-(max(window, 2) + step_tokens + block_size - 3) // block_size) + 1
