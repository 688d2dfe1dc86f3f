"""Who waits, and who is next."""

from __future__ import annotations

import pytest
from core_helpers import examples, request
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.request import Request
from octavo.core.request_queue import make_request_queue


class QueueMachine(RuleBasedStateMachine):
    """Both queues against a sorted, or plain, list. Ids come back after their requests have left."""

    @initialize(policy=st.sampled_from(["fcfs", "priority"]))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.queue = make_request_queue(policy)
        self.model: list[Request] = []
        self.popped: list[Request] = []
        self.clock = 0.0

    @rule(name=st.sampled_from("abcdefgh"), priority=st.integers(-1, 1), later=st.booleans())
    def add(self, name: str, priority: int, later: bool) -> None:
        if any(r.request_id == name for r in self.model + self.popped):
            return
        self.clock += later
        new = request(name, [1], priority=priority, arrival_time=self.clock)
        self.queue.add(new)
        self.model.append(new)
        self._sort()

    def _sort(self) -> None:
        if self.policy == "priority":
            self.model.sort(key=lambda r: (r.core_request.priority, r.core_request.arrival_time, r.request_id, r.index))

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        assert self.queue.peek() is self.model[0]
        first = self.queue.pop()
        assert first is self.model.pop(0)
        self.popped.append(first)

    @precondition(lambda self: self.popped)
    @rule(which=st.integers(0, 7))
    def come_back(self, which: int) -> None:
        back = self.popped.pop(which % len(self.popped))
        self.queue.add_front(back)
        self.model.insert(0, back)
        self._sort()

    @precondition(lambda self: self.popped)
    @rule()
    def forget(self) -> None:
        self.popped.pop()

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 7))
    def remove(self, which: int) -> None:
        self.queue.remove(self.model.pop(which % len(self.model)))

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.model)
            assert list(self.queue) == self.model
            assert not self.model or self.queue.peek() is self.model[0]


TestQueue = QueueMachine.TestCase
TestQueue.settings = examples(100, stateful_step_count=40)


def test_the_priority_queue_does_not_keep_what_was_removed() -> None:
    """Thousands of clients that go away while they wait must not fill the heap."""
    queue = make_request_queue("priority")
    queue.add(request("stays", [1], priority=-1))
    for i in range(1000):
        gone = request(f"r{i}", [1])
        queue.add(gone)
        queue.remove(gone)
    assert len(queue) == 1 and queue.peek().request_id == "stays"
    assert len(queue._heap) < 40  # type: ignore[attr-defined]


def test_removing_one_that_does_not_wait_raises() -> None:
    for policy in ("fcfs", "priority"):
        with pytest.raises(KeyError):
            make_request_queue(policy).remove(request("unknown", [1]))
