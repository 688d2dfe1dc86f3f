"""The work queue: no key twice at a time, no change lost, backoff."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from octavo_operator.kube.workqueue import WorkQueue


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_a_key_is_never_worked_on_twice_at_a_time_and_no_change_is_lost(steps: list[tuple[int, bool]]) -> None:
    async def run() -> None:
        queue: WorkQueue[int] = WorkQueue()
        version = dict.fromkeys(range(4), 0)
        seen = dict.fromkeys(range(4), 0)
        busy: set[int] = set()

        async def work() -> None:
            while True:
                key = await queue.get()
                assert key not in busy
                busy.add(key)
                seen[key] = version[key]
                await asyncio.sleep(0)
                busy.discard(key)
                queue.done(key)

        workers = [asyncio.create_task(work()) for _ in range(3)]
        for key, pause in steps:
            version[key] += 1
            queue.add(key)
            if pause:
                await asyncio.sleep(0)
        while len(queue):
            await asyncio.sleep(0)
        assert seen == version
        assert not any(worker.done() for worker in workers)
        for worker in workers:
            worker.cancel()

    asyncio.run(run())


def test_failures_wait_longer_and_longer_and_success_forgets_them() -> None:
    async def run() -> None:
        queue: WorkQueue[str] = WorkQueue(base_delay=1, max_delay=10)
        assert [queue.retry("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
        queue.succeeded("a")
        assert queue.retry("a") == 1
        queue.add("a")  # a change is looked at now, whatever failed before
        assert await asyncio.wait_for(queue.get(), 0.1) == "a"

    asyncio.run(run())


def test_the_earliest_of_several_appointments_counts() -> None:
    async def run() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 0.01)
        queue.add_after("a", 60)
        assert await asyncio.wait_for(queue.get(), 30) == "a"

    asyncio.run(run())
