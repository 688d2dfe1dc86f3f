"""Assign the device's LoRA slots to adapters, and hold back requests whose adapter has none. Pure.

A step computes rows of as many adapters as there are slots. A request whose adapter has none is passed over: it leaves
the queue for a place beside it, so that those behind it run, and comes back when its adapter is in a slot. A stream of
requests for adapters with slots could keep it waiting, so nothing new of any adapter starts once a request has been
passed over for `PATIENCE` steps: slots then become free as running requests finish. Requests that have come back start
all the same, so that a slot serves all who were waiting for it before it goes to the next adapter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from octavo.core.request import Request, RequestStatus
from octavo.core.request_queue import RequestQueue
from octavo.interface.lora import Adapter

PATIENCE = 32  # steps


@dataclass
class _Slot:
    adapter: Adapter
    number: int
    is_ready: bool = False
    running: int = 0  # sequences
    is_new: bool = True  # nothing has run in it yet


@dataclass
class _PassedOver:
    """The waiting sequences of an adapter that could not start, in order, since step ``since``."""

    adapter: Adapter
    since: int
    requests: OrderedDict[str, Request] = field(default_factory=OrderedDict)


class AdapterSlots:
    """The adapters in ``num_slots`` slots, least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._unfinished: Counter[str] = Counter()  # sequences, by `Adapter.key`
        self._names: dict[str, str] = {}  # of these adapters
        self._wanted: list[_Slot] = []
        self._placed: dict[int, Adapter] = {}
        self.has_changed = False  # what may start, since `AdapterQueue` looked

    def add(self, adapter: Adapter | None, sequences: int) -> None:
        """Add so many sequences of an adapter. Here and below, None stands for sequences without an adapter."""
        if adapter is None:
            return
        self._unfinished[adapter.key] += sequences
        self._names[adapter.key] = adapter.name

    def end(self, adapter: Adapter | None) -> None:
        """One of them is not any more; `stop` comes first if it ran."""
        if adapter is None:
            return
        self._unfinished[adapter.key] -= 1
        if not self._unfinished[adapter.key]:
            del self._unfinished[adapter.key], self._names[adapter.key]
            self.has_changed = True

    def start(self, adapter: Adapter | None) -> int:
        """A sequence runs, in the slot that is returned, -1: in none."""
        if adapter is None:
            return -1
        slot = self._slots[adapter.key]
        slot.running += 1
        slot.is_new = False
        self._slots.move_to_end(adapter.key)
        return slot.number

    def stop(self, adapter: Adapter | None) -> None:
        """A sequence runs no more."""
        if adapter is None:
            return
        slot = self._slots[adapter.key]
        slot.running -= 1
        self.has_changed |= slot.running == 0

    def is_ready(self, adapter: Adapter) -> bool:
        """True if sequences of the adapter can start."""
        slot = self._slots.get(adapter.key)
        return slot is not None and slot.is_ready

    def has_slot(self, adapter: Adapter) -> bool:
        """True if the adapter has a slot, even if it is not loaded yet."""
        return adapter.key in self._slots

    def is_new(self, adapter: Adapter) -> bool:
        """True if it is in a slot for those who wait for it."""
        slot = self._slots.get(adapter.key)
        return slot is not None and slot.is_ready and slot.is_new

    def assign(self, adapter: Adapter) -> bool:
        """Give the adapter a slot, an unused one or that of the adapter which has not run for longest. False: all are
        in use."""
        if self._free:
            number = self._free.pop()
        else:
            idle = next((slot for slot in self._slots.values() if self._is_idle(slot)), None)
            if idle is None:
                return False
            del self._slots[idle.adapter.key]
            self._placed.pop(idle.number, None)
            number = idle.number
        slot = self._slots[adapter.key] = _Slot(adapter, number)
        self._wanted.append(slot)
        return True

    def _is_idle(self, slot: _Slot) -> bool:
        return slot.is_ready and not slot.running and not (slot.is_new and slot.adapter.key in self._unfinished)

    def take_wanted(self) -> list[Adapter]:
        """Adapters that have got a slot and are to be loaded; `loaded` or `failed` is to follow."""
        wanted, self._wanted = self._wanted, []
        return [slot.adapter for slot in wanted]

    def loaded(self, adapter: Adapter) -> None:
        """Note that it is in host memory: the next step brings it into its slot."""
        slot = self._slots[adapter.key]
        slot.is_ready = self.has_changed = True
        self._placed[slot.number] = adapter

    def failed(self, adapter: Adapter) -> None:
        """Free the slot of an adapter that cannot be loaded; its sequences are to be ended."""
        self._free.append(self._slots.pop(adapter.key).number)
        self.has_changed = True

    def take_placed(self) -> dict[int, Adapter]:
        """Take the adapters to load into slots before the next step."""
        placed, self._placed = self._placed, {}
        return placed

    def names(self) -> tuple[list[str], list[str]]:
        """Names of the adapters with running sequences, and of those with waiting ones."""
        running = {key: slot.running for key, slot in self._slots.items() if slot.running}
        waiting = [self._names[key] for key, count in self._unfinished.items() if count > running.get(key, 0)]
        return [self._names[key] for key in running], waiting

    def check_integrity(self, running: Counter[str], unfinished: Counter[str]) -> None:
        """Raise AssertionError unless the books agree with these counts of sequences, by `Adapter.key`."""
        assert {key: slot.running for key, slot in self._slots.items() if slot.running} == dict(running)
        assert dict(self._unfinished) == dict(unfinished), "adapters' sequences are miscounted"
        numbers = [*self._free, *(slot.number for slot in self._slots.values())]
        assert sorted(numbers) == list(range(self.num_slots)), "a slot is lost, or has two adapters"


class AdapterQueue:
    """A `RequestQueue` whose next sequence is one that can start: its adapter is in a slot, or it has none."""

    def __init__(self, queue: RequestQueue, slots: AdapterSlots, step: Callable[[], int]) -> None:
        """``step``: the number of the step that is scheduled."""
        self._queue, self._slots, self._step = queue, slots, step
        self._passed: OrderedDict[str, _PassedOver] = OrderedDict()  # by adapter, who was passed over first first
        self._back: set[str] = set()  # who has come back, by req_id, and not started yet

    def add(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._queue.add(request)

    def add_front(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._queue.add_front(request)

    def peek(self) -> Request | None:
        """The next sequence that can start; None: none can."""
        if self._slots.has_changed:
            self._look_again()
        while len(self._queue):
            request = self._queue.peek()
            assert request is not None
            if request.adapter is None or self._may_start(request, request.adapter):
                return request
            self.pop()
            passed = self._passed.setdefault(request.adapter.key, _PassedOver(request.adapter, self._step()))
            passed.requests[request.req_id] = request
        return None

    def pop(self) -> Request:
        """See `RequestQueue`: that which `peek` has returned."""
        request = self._queue.pop()
        self._back.discard(request.req_id)
        return request

    def remove(self, request: Request) -> None:
        """See `RequestQueue`."""
        self._back.discard(request.req_id)
        passed = self._passed.get(request.adapter.key) if request.adapter is not None else None
        if passed is None or request.req_id not in passed.requests:
            self._queue.remove(request)
            return
        del passed.requests[request.req_id]
        if not passed.requests:
            del self._passed[passed.adapter.key]

    def _may_start(self, request: Request, adapter: Adapter) -> bool:
        if not self._slots.is_ready(adapter):
            if not self._slots.has_slot(adapter) and not self._has_urgent():
                self._slots.assign(adapter)
            return False
        has_begun = request.status != RequestStatus.WAITING or request.index > 0
        return has_begun or request.req_id in self._back or not self._has_urgent()

    def _has_urgent(self) -> bool:
        """True if somebody has waited too long for a slot."""
        oldest = next((p for p in self._passed.values() if not self._slots.has_slot(p.adapter)), None)
        return oldest is not None and self._step() - oldest.since >= PATIENCE

    def _look_again(self) -> None:
        """Give slots that have become free to who has waited longest, and let those come back who can start."""
        self._slots.has_changed = False
        for passed in self._passed.values():
            if not self._slots.has_slot(passed.adapter) and not self._slots.assign(passed.adapter):
                break
        comes_back = self._slots.is_new if self._has_urgent() else self._slots.is_ready
        for passed in [passed for passed in reversed(self._passed.values()) if comes_back(passed.adapter)]:
            del self._passed[passed.adapter.key]
            self._back.update(passed.requests)
            for request in reversed(passed.requests.values()):
                self._queue.add_front(request)

    def __len__(self) -> int:
        return len(self._queue) + sum(len(passed.requests) for passed in self._passed.values())

    def __iter__(self) -> Iterator[Request]:
        return chain(self._queue, *(passed.requests.values() for passed in self._passed.values()))


def check_adapters(slots: AdapterSlots, unfinished: Iterable[Request], running: Iterable[Request]) -> None:
    """Raise AssertionError unless ``slots`` agrees with these sequences."""
    counts = (Counter(r.adapter.key for r in some if r.adapter is not None) for some in (running, unfinished))
    slots.check_integrity(*counts)
