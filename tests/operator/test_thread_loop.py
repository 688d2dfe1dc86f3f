"""A coroutine in a loop of its own: what it does to that loop is no matter of ours."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from octavo_operator.kube.thread_loop import run_in_thread_loop


async def rampage() -> None:
    """As kopf ends: every task of the loop is cancelled, but for its own."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def test_our_tasks_outlive_it() -> None:
    async def run() -> None:
        ours = asyncio.create_task(asyncio.sleep(60))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(run_in_thread_loop("test", rampage), asyncio.Event().wait()), 0.3)
        assert not ours.done()
        ours.cancel()

    asyncio.run(run())


def test_errors_of_the_coroutine_are_raised() -> None:
    async def fail() -> None:
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        asyncio.run(run_in_thread_loop("test", fail))


def test_it_ends_with_us_and_has_time_for_it() -> None:
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.set()

    async def run() -> None:
        task = asyncio.create_task(run_in_thread_loop("test", work))
        await asyncio.to_thread(began.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    start = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start < 30
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(90)
            assert not thread.is_alive()


def test_one_that_does_not_end_is_left_behind() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
                return
            except asyncio.CancelledError:
                pass

    async def run() -> None:
        task = asyncio.create_task(run_in_thread_loop("test", stubborn, stop_timeout=0.2))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task}, timeout=20)
        assert task.cancelled()

    asyncio.run(run())
