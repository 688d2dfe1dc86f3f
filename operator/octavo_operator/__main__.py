"""`python -m octavo_operator`: run the operator, configured by its environment (config.py), until told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from typing import Any

from octavo_operator import __version__, health
from octavo_operator.autoscaling.autoscaler import Autoscaler
from octavo_operator.config import ConfigError, OperatorConfig
from octavo_operator.controller import Controller
from octavo_operator.kube.client import Cluster
from octavo_operator.kube.credentials import CredentialsError
from octavo_operator.kube.lease import LeaseHolder
from octavo_operator.kube.watches import Watching

logger = logging.getLogger("octavo.operator")


async def run(config: OperatorConfig) -> int:
    """0 after a signal, 1 when the Lease was lost or a part failed: Kubernetes starts us anew then."""
    cluster = Cluster.connect()
    lease = LeaseHolder(cluster, config)
    controller = Controller(cluster, config, lease)
    watching = Watching(cluster, config, controller)
    autoscaler = Autoscaler(cluster, config, controller.store, lease, controller.queue.add)
    controller.scaling = autoscaler.scaling
    controller.metrics.watch_decisions(autoscaler.reader.decisions)
    stop = asyncio.Event()

    async def lead() -> None:
        await controller.knows_all.wait()
        await lease.run()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    web = await health.serve(controller, watching, config, *autoscaler.routes())
    try:
        workers = [asyncio.create_task(controller.work()) for _ in range(config.workers)]
        others: list[asyncio.Task[Any]] = [
            asyncio.create_task(part)
            for part in (
                watching.run(), watching.keep_discovering(), watching.keep_listing(), lead(),
                autoscaler.run(), stop.wait(),
            )
        ]  # fmt: skip
        logger.info(
            "octavo operator %s watches %s", __version__, ", ".join(config.watch_namespaces) or "all namespaces"
        )
        done, _ = await asyncio.wait([*workers, *others], return_when=asyncio.FIRST_COMPLETED)
        await _end(workers)  # first: nothing is written after the Lease is given back
        await autoscaler.withdraw()
        await lease.release()
        await _end(others)
        for part in done:
            if not part.cancelled() and (error := part.exception()):
                logger.error("a part of the operator failed", exc_info=error)
        return 0 if stop.is_set() else 1
    finally:
        await autoscaler.close()
        await web.cleanup()
        await cluster.close()


async def _end(parts: list[asyncio.Task[Any]]) -> None:
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _shorten(record: logging.LogRecord) -> bool:
    """kopf shows where in it a watch broke; that one did, and why, is enough: watching.py starts it anew."""
    if record.name.startswith("kopf") and record.exc_info:
        record.exc_info = None
    return True


def main() -> int:
    try:
        config = OperatorConfig.from_environment()
    except ConfigError as error:
        print(f"octavo-operator: {error}", file=sys.stderr)
        return 2
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if config.log_format == "json" else text)
    handler.addFilter(_shorten)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        return asyncio.run(run(config))
    except CredentialsError as error:
        print(f"octavo-operator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
