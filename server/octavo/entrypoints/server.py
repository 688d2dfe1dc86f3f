"""The lifecycle of the API process: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette

from octavo.chat.earlier_thoughts import earlier_thoughts_of, warn_where_lost
from octavo.chat.report import tool_format
from octavo.chat.thoughts import thoughts_of
from octavo.chat.tools.harmony import speaks_harmony
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.core_launcher import CoreProcess, CoreProcesses
from octavo.entrypoints.announcement import announcement
from octavo.entrypoints.app import build_app, build_management_app
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.state import FAILED_SECONDS, Phase, ServerState, served_names
from octavo.entrypoints.transport.http11 import LimitedHttpProtocol
from octavo.entrypoints.transport.http_server import FLUSH_SECONDS, HttpServer, make_http_server
from octavo.interface.engine_config import EngineConfig
from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.log_line import LoadLog
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.tracing import Tracer

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between looks at the core's heartbeat


@dataclass(frozen=True)
class Started:
    """The start's begin, by `time.perf_counter`, and the seconds that it took to find or fetch the model's files."""

    at: float
    fetch_seconds: float


async def serve(
    config: EngineConfig,
    args: ServerArgs,
    tokenizer: Tokenizer | None,
    process: CoreProcess | CoreProcesses,
    sockets: list[socket.socket],
    started: Started,
) -> int:
    """Serve until a signal or the core's end. Returns the exit code; raises OctavoError if the engine cannot start."""
    loop = asyncio.get_running_loop()
    metrics = EngineMetrics(config, served_names(config, args)[0])
    load_log = None if args.disable_log_stats else LoadLog()
    tracer = Tracer(args.otlp_traces_endpoint, metrics.model_name) if args.otlp_traces_endpoint else None
    engine = AsyncLLM(config, tokenizer, process, metrics, load_log, tracer)
    stop = _StopSignals(loop)
    state: ServerState | None = None
    servers: list[HttpServer] = []
    apps: list[Starlette] = []
    tasks: list[asyncio.Task[Any]] = []
    frozen: asyncio.Task[None] | None = None
    try:
        metrics.watch_device_memory(engine.client.heartbeat.read_device_memory)
        metrics.watch_core_process(process.pid)
        state = ServerState(engine, args, metrics, HttpMetrics(metrics.registry))
        metrics.watch_progress(state.progress)
        apps += [build_app(state)] + ([build_management_app(state)] if args.management_port is not None else [])
        servers = [make_http_server(app, args, main=i == 0) for i, app in enumerate(apps)]
        tasks = [
            asyncio.create_task(server.serve(sockets=[sock])) for server, sock in zip(servers, sockets, strict=True)
        ]
        ready = asyncio.create_task(become_ready(engine, state))
        await _first_of(ready, stop.first)
        if not ready.done():
            ready.cancel()
            return 0
        ready.result()
        metrics.record_startup("fetch", started.fetch_seconds)
        metrics.record_startup("ready", time.perf_counter() - started.at)
        apps[0].state.background.begin()
        generates = "generate" in config.model.pooler.tasks
        logger.info("%s", announcement(state.model_names, sockets[0], args, generates))
        frozen = asyncio.create_task(_fail_frozen(engine))
        core_exit = asyncio.create_task(engine.core_exited.wait())
        await _first_of(core_exit, stop.first)
        if core_exit.done():
            await asyncio.sleep(0.2)  # for the errors of requests in progress
            return 1
        core_exit.cancel()
        await _drain(state, stop, servers[0].server_state.connections)
        return 0
    finally:
        if frozen is not None:
            frozen.cancel()
        if state is not None:
            await state.adapter_list.close()
        for server in servers:
            server.should_exit = True
            server.force_exit = stop.second.is_set()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * FLUSH_SECONDS)
        for app in apps:
            await app.state.background.close()
            if (batches := getattr(app.state, "batches", None)) is not None:
                await batches.close()
            app.state.server.images.close()
        if state is not None:
            state.store.close()
        engine.close(grace=1.0 if stop.second.is_set() else 5.0)
        if args.uds:
            Path(args.uds).unlink(missing_ok=True)


class _StopSignals:
    """SIGTERM and SIGINT: the first begins a drain, the second stops at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if not self.first.is_set():
            logger.info("%s: draining", signal.Signals(number).name)
            self.first.set()
        else:
            logger.info("second %s: stopping at once", signal.Signals(number).name)
            self.second.set()


async def _first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    waiter = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


def _find_chat_format(state: ServerState) -> None:
    """Find the formats of tool calls and thoughts, and log them, before the first request needs them."""
    tokenizer, options = state.engine.tokenizer, state.chat_options
    if tokenizer is None or "generate" not in state.engine.config.model.pooler.tasks:
        return
    with suppress(ValueError):  # the model has no chat template
        for tools in (True, False):  # of which some models have a template each
            template = tokenizer.get_chat_template(options.chat_template, tools=tools)
            if tools and (name := tool_format(template, options)) is not None:
                state.tool_format = name
                state.metrics.record_tool_format(name)
            if speaks_harmony(options, template):
                logger.info("chat template: answers, thoughts and calls are harmony")
            else:
                thoughts_of(template, options.thought_format)
                earlier_thoughts_of(template, options.thought_format)
                if options.preserve_reasoning == "always":
                    warn_where_lost(template, options.thought_format)


async def become_ready(engine: AsyncLLM, state: ServerState) -> None:
    """Wait until the engine has loaded its model, then admit requests. Raises OctavoError if it cannot."""
    ready, _ = await asyncio.gather(engine.wait_ready(), state.images.prepare())
    state.metrics.record_cache(engine.config, ready.num_blocks, ready.blocks_of_longest)
    state.metrics.record_memory(ready.weight_bytes, ready.memory_shares)
    await state.adapters.load_modules(state.args.lora_modules)
    await state.adapter_list.start()
    _find_chat_format(state)
    state.phase = Phase.SERVING
    for phase, seconds in ready.phases.items():
        logger.info("the core's %s took %.2f s", phase, seconds)
        state.metrics.record_startup(phase, seconds)


async def _fail_frozen(engine: AsyncLLM) -> None:
    """End requests of a core that stands still (a hung disk or driver, SIGSTOP): their clients would wait for as long.
    Looks again first where this process has stood still, too."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)
        if time.monotonic() - before < 2 * _LOOK_SECONDS:
            engine.fail_frozen(FAILED_SECONDS)


async def _drain(state: ServerState, stop: _StopSignals, connections: Iterable[Any]) -> None:
    """Refuse new connections' requests; wait for those in progress and on kept-alive connections; abort the rest."""
    state.phase = Phase.DRAINING
    deadline = time.monotonic() + state.args.shutdown_timeout
    open_connections: list[LimitedHttpProtocol] = list(connections)
    for connection in open_connections:
        connection.begin_drain()
    if state.num_responding:
        logger.info("waiting up to %.0f s for %d requests", state.args.shutdown_timeout, state.num_responding)
    while time.monotonic() < deadline and not stop.second.is_set() and state.engine.dead is None:
        if not state.num_responding and not any(connection.is_open for connection in open_connections):
            break
        await asyncio.sleep(0.05)
    if state.num_responding:
        logger.warning("aborting %d requests", state.num_responding)
        state.engine.abort_all()
        await asyncio.sleep(0.1)
