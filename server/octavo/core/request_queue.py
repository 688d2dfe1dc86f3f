"""Waiting sequences, first come first served or by priority. Removal from the middle is O(1) or lazy."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from octavo.core.request import Request


class RequestQueue(Protocol):
    """The waiting sequences in the order in which they are to be admitted."""

    def add(self, request: Request) -> None:
        """Queue a new sequence."""

    def add_front(self, request: Request) -> None:
        """Queue a preempted sequence or a forked sample, before new ones."""

    def peek(self) -> Request | None:
        """The next sequence; the queue must not be empty. None: none of them can start."""

    def pop(self) -> Request:
        """Take the next sequence out."""

    def remove(self, request: Request) -> None:
        """Take a queued sequence out, wherever it is."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """A queue in order of arrival; preempted sequences and forked samples come to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Queue behind all others."""
        self._requests[request.req_id] = request

    def add_front(self, request: Request) -> None:
        """Queue before all others."""
        self._requests[request.req_id] = request
        self._requests.move_to_end(request.req_id, last=False)

    def peek(self) -> Request:
        """The next request; the queue must not be empty."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Take the next request out."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it is."""
        del self._requests[request.req_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue:
    """Lowest ``priority`` first, then arrival. Removed sequences leave the heap when they surface."""

    def __init__(self) -> None:
        self._heap: list[Request] = []
        self._present: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Queue by priority."""
        self._present[request.req_id] = request
        heapq.heappush(self._heap, request)

    add_front = add

    def peek(self) -> Request:
        """The next request; the queue must not be empty."""
        while self._present.get(self._heap[0].req_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def pop(self) -> Request:
        """Take the next request out."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._present[request.req_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it is."""
        del self._present[request.req_id]
        if len(self._heap) > 2 * len(self._present) + 16:
            self._heap = list(self._present.values())
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._present.values()))


def make_request_queue(policy: str) -> FCFSRequestQueue | PriorityRequestQueue:
    """The queue of a SchedulerConfig.policy, "fcfs" or "priority"."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
