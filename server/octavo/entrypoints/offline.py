"""The application without a port: an engine that answers a file of requests, and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.app import build_app
from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.batches.lines import Limits, Line
from octavo.entrypoints.batches.runner import StoppedError, answer_lines, client_of, limits_of
from octavo.entrypoints.server import become_ready
from octavo.entrypoints.state import ServerState, served_names
from octavo.entrypoints.storage.places import MEMORY
from octavo.errors import OctavoError
from octavo.interface.engine_config import EngineConfig
from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.prometheus import EngineMetrics

if TYPE_CHECKING:
    from octavo.engine.core_launcher import CoreProcess, CoreProcesses
    from octavo.text.tokenizer import Tokenizer


async def answer_offline(
    config: EngineConfig,
    args: ServerArgs,
    tokenizer: Tokenizer | None,
    process: CoreProcess | CoreProcesses,
    lines: Callable[[Limits], Iterable[Line]],
    width: int,
    write: Callable[[Line, bytes, bool], None],
) -> None:
    """Load the model, answer the lines as `answer_lines` does, stop. Raises OctavoError if the engine ends before."""
    args = replace(args, responses_store=MEMORY)
    metrics = EngineMetrics(config, served_names(config, args)[0])
    engine = AsyncLLM(config, tokenizer, process, metrics)
    try:
        state = ServerState(engine, args, metrics, HttpMetrics(metrics.registry))
        await become_ready(engine, state)
        async with client_of(build_app(state), state) as client:
            await answer_lines(client, lines(limits_of(state)), width, write)
    except* StoppedError as stopped:
        raise OctavoError(f"{stopped.exceptions[0]}; run the same command again for the lines that are left") from None
    finally:
        engine.close()
