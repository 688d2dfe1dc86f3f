"""States of running sequences: from which snapshot one begins, where each step writes it, and what is kept of it.

A snapshot is a state that is not overwritten: what a step adds to it goes to another slot, as with a state that samples
of one prompt share. On its way through a prompt a step may also write the state, as it is between two tokens, to a slot
of its own. Only what is committed is kept, and only of steps that have reported back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.core.prefix_finder import PrefixFinder, PrefixHit, parent_hash
from octavo.core.request import NO_LIMIT, Request
from octavo.core.state_slot import Snapshot, StateSlot
from octavo.core.states.points import DEFAULT_GAP, END, INTERVAL, Points
from octavo.core.states.slots import StatePool
from octavo.core.states.snapshots import count
from octavo.interface.messages import StateStats


@dataclass(frozen=True)
class StateSettings:
    """A model's states as the core knows them."""

    num_blocks: int  # that a state takes
    headroom: int = 0  # blocks that a step may need, which are not spent on snapshots
    interval: int = 0  # tokens between snapshots of long texts; 0: there are none of these
    gap: int = DEFAULT_GAP  # tokens between two snapshots of a sequence at least, others than these


@dataclass(slots=True)
class SequenceState:
    """One sequence's state, from its first allocation until it is freed."""

    slot: StateSlot
    base: Snapshot | None = None  # the last one of its tokens
    num_confirmed: int = -1  # tokens that it has seen after the last step that has reported back
    pending: list[Snapshot] = field(default_factory=list)  # which steps write that have not


@dataclass(slots=True)
class StatePlaces:
    """Block ids at which a step reads and writes a sequence's state."""

    read: list[int]
    write: list[int] | None = None  # None: where it is read
    snapshot: tuple[int, list[int]] | None = None  # where it is written too, as it is before a position
    limit: int = 0  # until so many tokens are computed there is nothing more to decide


class StateManager:
    """The states of all sequences, in slots of ``pool``."""

    def __init__(self, pool: StatePool, finder: PrefixFinder, points: Points | None, headroom: int) -> None:
        """``points``: where snapshots are taken, None without a prefix cache; ``headroom``: see `StateSettings`."""
        self.pool, self.num_blocks = pool, pool.state_blocks
        self._finder, self._points, self._headroom = finder, points, headroom
        self._gap = points.gap if points is not None else 0
        self._pinned: list[StateSlot] = []  # read or written in the last scheduled step, beside those that are held

    # -- prefixes ----------------------------------------------------------------------------------------------------

    def cut(self, request: Request, hit: PrefixHit) -> PrefixHit:
        """``hit``, as far as a snapshot reaches."""
        for snapshot in self._candidates(request, hit.num_tokens):
            cut = self._finder.find_until(request, snapshot.position, hit)
            if cut is not None:
                cut.snapshot = snapshot
                return cut
        cut = self._finder.find_until(request, 0, hit)
        assert cut is not None
        return cut

    def _candidates(self, request: Request, found: int) -> Iterator[Snapshot]:
        """Snapshots of the sequence's first ``found`` tokens, the longest first."""
        size, tokens, snapshots = self._finder.block_size, request.key_token_ids, self.pool.snapshots
        for start in snapshots.starts(found):
            rest = tuple(tokens[start : min(start + size, found)])
            yield from snapshots.behind(parent_hash(request, size, start // size), rest)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def start(self, request: Request, hit: PrefixHit) -> SequenceState:
        """Have a sequence hold the snapshot of its hit, or a slot of its own."""
        snapshot, stats = hit.snapshot, self.pool.snapshots.stats
        stats.num_tokens_without_state += hit.num_found - hit.num_tokens
        if snapshot is not None:
            assert snapshot.slot is not None
            count(stats.hits, snapshot.point)
            self.pool.hold(snapshot.slot)
            for used in (snapshot, *self._own(request, snapshot.position)):
                self.pool.snapshots.renew(used)
                self._retain(request, used)
            request.num_state_tokens = hit.num_tokens
            return SequenceState(snapshot.slot, snapshot)
        request.num_state_tokens = 0
        return SequenceState(self.pool.take())

    def _own(self, request: Request, until: int) -> Iterator[Snapshot]:
        """Snapshots at the prompt's own boundaries before ``until``."""
        size, tokens = self._finder.block_size, request.key_token_ids
        ends = (wish.num_tokens for wish in request.core_request.retain or ())
        for position in {*(request.core_request.boundaries or ()), *ends}:
            if position < until:
                index = position // size
                rest = tuple(tokens[index * size : position])
                found = self.pool.snapshots.behind(parent_hash(request, size, index), rest)
                yield from (one for one in found if one.position == position)

    def _retain(self, request: Request, snapshot: Snapshot) -> None:
        """Keep a snapshot that its request wants kept: the last one of what is to be found again."""
        for wish in request.core_request.retain or ():
            if wish.num_tokens - self._gap < snapshot.position <= wish.num_tokens:
                self.pool.retain_snapshot(snapshot, wish.seconds)

    def plan(self, request: Request, hit: PrefixHit) -> None:
        """Choose where snapshots of its tokens are taken; it begins with ``hit``."""
        if self._points is not None and not request.skip_prefix_cache:
            request.snapshot_points = self._points.choose(request, hit)

    def must_move(self, request: Request, state: SequenceState, until: int) -> bool:
        """Return whether the tokens up to ``until`` add to a state that others hold."""
        return state.slot.holders > 1 and committed_tokens(request, until) > request.num_state_tokens

    def place(self, request: Request, state: SequenceState, until: int) -> StatePlaces:
        """Decide where a step writes what the tokens up to ``until`` add. There must be room if it must move."""
        slot, committed = state.slot, committed_tokens(request, until)
        places = StatePlaces(slot.pages)
        if committed > request.num_state_tokens:
            if slot.holders > 1 or (slot.snapshot is not None and self._has_room(slot.snapshot)):
                self._pinned.append(slot)  # our reference becomes the pin
                state.slot = self.pool.take()
                places.write = state.slot.pages
            elif slot.snapshot is not None:
                self.pool.forget(slot.snapshot)
        for position, point in self._passed(request, committed):
            snapshot = Snapshot(position, point, state.base)
            if position < committed and places.snapshot is None and self._has_room(snapshot):
                own = self.pool.take()
                self._keep(state, own, snapshot)
                self._pinned.append(own)
                places.snapshot = position, own.pages
            elif position == committed and state.slot.snapshot is None:
                self._keep(state, state.slot, snapshot)
        shared = state.slot.holders > 1 or state.slot.snapshot is not None
        places.limit = 0 if shared else self._next_point(request, committed) - 1
        return places

    def _has_room(self, snapshot: Snapshot) -> bool:
        pool, wants = self.pool, snapshot.point != INTERVAL or snapshot.parent_hash is not None
        if pool.num_free_blocks < self.num_blocks + self._headroom:
            return False
        return pool.has_room(pool.snapshots.level + pool.snapshots.credit(snapshot) if wants else -1.0)

    def _keep(self, state: SequenceState, slot: StateSlot, snapshot: Snapshot) -> None:
        self.pool.keep(slot, snapshot)
        state.pending.append(snapshot)
        state.base = snapshot

    def cut_step(self, request: Request, num_new: int) -> int:
        """``num_new`` tokens, or fewer: one snapshot may be taken within a step, and one at its end."""
        points = request.snapshot_points
        while points and points[-1][0] <= request.num_state_tokens:
            points.pop()
        if len(points) < 2 or points[-2][0] >= committed_tokens(request, request.num_computed_tokens + num_new):
            return num_new
        return points[-2][0] - request.num_computed_tokens

    def _passed(self, request: Request, committed: int) -> list[tuple[int, str]]:
        """The points that a step reaches, which commits so many tokens."""
        seen = request.num_state_tokens
        passed = [point for point in reversed(request.snapshot_points) if seen < point[0] <= committed]
        interval = self._points.interval if self._points is not None else 0
        if interval and not passed and committed // interval > seen // interval:
            at = committed // interval * interval
            passed.append((at if at > request.num_computed_tokens else committed, INTERVAL))  # not amid pending rows
        return passed

    def _next_point(self, request: Request, committed: int) -> int:
        ahead = (position for position, _ in reversed(request.snapshot_points) if position > committed)
        following = next(ahead, NO_LIMIT)
        interval = self._points.interval if self._points is not None else 0
        return min(following, (committed // interval + 1) * interval) if interval else following

    def fork(self, state: SequenceState) -> SequenceState:
        """The state of a sample that begins with what ``state`` holds."""
        self.pool.hold(state.slot)
        return SequenceState(state.slot, state.base)

    def confirm(self, request: Request, state: SequenceState, num_tokens: int) -> None:
        """A step has reported back, after which the state has seen ``num_tokens``."""
        state.num_confirmed = num_tokens
        if state.pending:
            self._offer_pending(request, state)

    def _offer_pending(self, request: Request, state: SequenceState) -> None:
        until = min(state.num_confirmed, request.num_confirmed_tokens)
        late = [one for one in state.pending if one.position > until]
        for snapshot in state.pending:
            if snapshot.position <= until:
                self._offer(request, snapshot)
        state.pending = late

    def _offer(self, request: Request, snapshot: Snapshot) -> None:
        """Let others find it, unless it is gone, they find another one or do not find the blocks before it."""
        if snapshot.slot is None:
            return
        size = self._finder.block_size
        index = snapshot.position // size
        parent = parent_hash(request, size, index)
        rest = tuple(request.key_token_ids[index * size : snapshot.position])
        reachable = not index or parent in self.pool.cached_blocks
        if not reachable or not self.pool.snapshots.offer(snapshot, parent, rest):
            self.pool.forget(snapshot)
        else:
            self._retain(request, snapshot)

    def free(self, request: Request, state: SequenceState) -> None:
        """The sequence ends, or gives way to others: what is certain of its state is kept as a snapshot."""
        self._offer_pending(request, state)
        for snapshot in state.pending:
            self.pool.forget(snapshot)
        seen, slot = state.num_confirmed, state.slot
        is_certain = 0 < seen == request.num_state_tokens and seen <= request.num_confirmed_tokens
        if self._points is not None and is_certain and slot.snapshot is None:
            snapshot = Snapshot(seen, END, state.base)
            self.pool.keep(slot, snapshot)
            self._offer(request, snapshot)
        self.pool.drop(slot)

    def take_stats(self) -> StateStats:
        """Gauges, and counts since the last call."""
        return self.pool.snapshots.take_stats(self.pool.num_held)

    def begin_step(self) -> None:
        """The step before is scheduled: what it reads and writes may be written by others."""
        for slot in self._pinned:
            self.pool.drop(slot)
        self._pinned.clear()

    def num_pinned_blocks(self) -> int:
        """Blocks of slots that only the last scheduled step holds."""
        pins = {slot: self._pinned.count(slot) for slot in self._pinned}
        return self.num_blocks * sum(slot.holders == count for slot, count in pins.items())

    def check_integrity(self, states: list[SequenceState]) -> None:
        """Raise AssertionError when holders do not add up; ``states`` are those of all sequences."""
        holders: dict[StateSlot, int] = {}
        for slot in [*(state.slot for state in states), *self._pinned]:
            holders[slot] = holders.get(slot, 0) + 1
        slots = self.pool.slots()
        assert holders.keys() <= slots
        for slot in slots:
            assert slot.holders == holders.get(slot, 0), "a slot's holders do not add up"


def committed_tokens(request: Request, until: int) -> int:
    """Tokens that the state has seen once those up to ``until`` are computed: all that are certain, but not the last
    known one. Behind it lie drafts; and samples of a prompt begin with it, from one state."""
    return min(until, request.num_tokens + request.num_output_placeholders + request.num_drafts - 1)
