"""The application under other ASGI servers and clients than ours: streams need nothing but ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import Message

from octavo.engine.args import EngineArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.core_launcher import CoreOptions, CoreProcess
from octavo.entrypoints.app import build_app
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.server import become_ready
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.stream_body import AsgiBody
from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.prometheus import EngineMetrics
from octavo.text.tokenizer import Tokenizer

PATH = "/v1/completions"
BODY = {"prompt": "The capital of", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


class Application:
    """The application with a real engine, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, model: Path) -> None:
        self.runner = runner
        self.process = CoreProcess()
        config = EngineArgs(
            model=str(model), load_format="dummy", kv_cache_memory_bytes=32 << 20
        ).create_engine_config()
        args = ServerArgs()
        self.process.configure(config.to_dict(), CoreOptions(args.watchdog_seconds, "warning", "text"))
        runner.run(self._start(config, args))

    async def _start(self, config, args) -> None:
        metrics = EngineMetrics(config, "tiny")
        self.engine = AsyncLLM(config, Tokenizer.from_files(config.model.files), self.process, metrics)
        self.state = ServerState(self.engine, args, metrics, HttpMetrics(metrics.registry))
        self.app = build_app(self.state)
        await become_ready(self.engine, self.state)


@pytest.fixture(scope="module")
def application(tiny_model) -> Iterator[Application]:
    with asyncio.Runner() as runner:
        application = Application(runner, tiny_model)
        yield application
        application.engine.close()
        application.process.stop()


@contextlib.asynccontextmanager
async def asgi_transport(app) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
        yield client


def stock_uvicorn(protocol: str):
    @contextlib.asynccontextmanager
    async def serve(app) -> AsyncIterator[httpx.AsyncClient]:
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=protocol, log_config=None))
        task = asyncio.create_task(server._serve())  # without signal handlers
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            await task

    return serve


SERVERS = {"ASGITransport": asgi_transport, "httptools": stock_uvicorn("httptools"), "h11": stock_uvicorn("h11")}


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_plain_and_streamed_answers(application, server):
    async def run() -> None:
        async with server(application.app) as client:
            whole = (await client.post(PATH, json=BODY)).raise_for_status().json()
            text = ""
            async with client.stream("POST", PATH, json={**BODY, "stream": True}) as stream:
                assert stream.status_code == 200 and stream.headers["content-type"].startswith("text/event-stream")
                lines = [line async for line in stream.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
            assert text == whole["choices"][0]["text"] and len(text) > 20
            refused = await client.post(PATH, json={**BODY, "stream": True, "temperature": -1})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
            assert (await client.get("/v1/models")).status_code == 200

    application.runner.run(run())
    assert application.engine.num_sequences == 0 == application.state.num_responding


@pytest.mark.parametrize("protocol", ["httptools", "h11"])
def test_a_client_that_leaves_a_stream_aborts_it(application, protocol):
    async def run() -> None:
        body = {**BODY, "max_tokens": 900, "stream": True}
        async with stock_uvicorn(protocol)(application.app) as client:
            async with client.stream("POST", PATH, json=body) as stream:
                await anext(stream.aiter_lines())
                assert application.engine.num_sequences == 1
            async with asyncio.timeout(20):
                while application.engine.num_sequences or application.state.num_responding:
                    await asyncio.sleep(0.01)

    application.runner.run(run())


def test_nothing_is_lost_on_a_server_that_takes_its_time():
    """One message at a time, in order; the writer hears when it may go on."""
    taken: list[bytes] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        taken.append(message["body"])

    async def run() -> None:
        body = AsgiBody(send)
        left = [b"%d" % i for i in range(50)]

        def advance() -> None:
            if left and body.is_writable:
                body.write(left.pop(0))
                assert not body.is_writable

        body.when_writable(advance)
        advance()
        while left:
            advance()
            await asyncio.sleep(0)
        await body.drain()

    asyncio.run(run())
    assert taken == [b"%d" % i for i in range(50)]
