"""`python -m octavo_operator`: run the operator, configured by its environment (config.py), until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from typing import Any

import kopf

from octavo_operator import __version__, handlers, health
from octavo_operator.cluster import TRANSPORT_ERRORS, ApiError, Cluster, CredentialsError
from octavo_operator.config import ConfigError, OperatorConfig
from octavo_operator.controller import Controller
from octavo_operator.lease import LeaseHolder

logger = logging.getLogger("octavo.operator")


async def run(config: OperatorConfig) -> int:
    """0 after a signal, 1 when the Lease was lost or a part failed: Kubernetes starts us anew then."""
    started = time.monotonic()
    cluster = Cluster.connect()
    lease = LeaseHolder(cluster, config)
    controller = Controller(cluster, config, lease.leading)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    web = await health.serve(controller, config, started, time.monotonic)
    try:
        if not await _first_listing(controller, stop):
            return 0
        namespaces = list(config.watch_namespaces)
        watching = kopf.operator(
            registry=handlers.registry(cluster, controller), settings=handlers.settings(config), standalone=True,
            clusterwide=not namespaces, namespaces=namespaces,
        )  # fmt: skip
        parts: list[asyncio.Task[Any]] = [
            asyncio.create_task(part) for part in (watching, lease.run(), controller.keep_listing())
        ]
        parts += [asyncio.create_task(controller.work()) for _ in range(config.workers)]
        parts.append(asyncio.create_task(stop.wait()))
        logger.info("octavo operator %s watches %s", __version__, ", ".join(namespaces) or "all namespaces")
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in parts[3:-1]:  # the workers first: nothing is written after the Lease is given back
            part.cancel()
        await asyncio.gather(*parts[3:-1], return_exceptions=True)
        await lease.release()
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        for part in done:
            if not part.cancelled() and (error := part.exception()):
                logger.error("a part of the operator failed", exc_info=error)
        # kopf takes signals for itself once it runs, and ends without an error then.
        return 0 if stop.is_set() or (parts[0] in done and parts[0].exception() is None) else 1
    finally:
        await web.cleanup()
        await cluster.close()


async def _first_listing(controller: Controller, stop: asyncio.Event) -> bool:
    """Nothing is done before everything is known. False when told to stop meanwhile."""
    while not stop.is_set():
        try:
            await controller.list_all()
            return True
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("waiting for the API server: %s", error or type(error).__name__)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 2)
    return False


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def main() -> int:
    try:
        config = OperatorConfig.from_environment()
    except ConfigError as error:
        print(f"octavo-operator: {error}", file=sys.stderr)
        return 2
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if config.log_format == "json" else text)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        return asyncio.run(run(config))
    except CredentialsError as error:
        print(f"octavo-operator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
