"""`python -m octavo_operator`: runs the operator until SIGTERM, configured by environment variables (config.py)."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from typing import Any, NamedTuple

from octavo_operator import __version__, health
from octavo_operator.autoscaling.autoscaler import Autoscaler
from octavo_operator.autoscaling.zero_scaler import ZeroScaler
from octavo_operator.config import ConfigError, OperatorConfig
from octavo_operator.controller import Controller
from octavo_operator.gateway.rejection_reader import RejectionReader
from octavo_operator.kube.client import KubeClient
from octavo_operator.kube.credentials import CredentialsError
from octavo_operator.kube.lease import LeaderElector
from octavo_operator.kube.watches import Watches
from octavo_operator.lora.reader import AdapterReader

logger = logging.getLogger("octavo.operator")


async def run(config: OperatorConfig) -> int:
    """Exit status: 0 after a signal, 1 when another took the Lease or a task failed; then the pod is restarted."""
    client = KubeClient.connect()
    lease = LeaderElector(client, config)
    controller = Controller(client, config, lease)
    watches = Watches(client, config, controller)
    lease.on_break = watches.on_break
    readers = _readers(client, config, lease, controller, watches)
    autoscaler = readers.autoscaler
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def lead() -> None:
        await controller.synced.wait()
        await lease.run()

    web = await health.serve(controller, watches, config, *autoscaler.routes())
    try:
        workers = [asyncio.create_task(controller.run_worker()) for _ in range(config.workers)]
        running = (watches.run(), watches.keep_discovering(), watches.keep_listing(), lead(), autoscaler.run())
        leading = (reader.run(lease.leading) for reader in (readers.zero, readers.adapters, readers.rejections))
        others: list[asyncio.Task[Any]] = [asyncio.create_task(task) for task in (*running, *leading, stop.wait())]
        logger.info(
            "octavo operator %s: watching %s", __version__, ", ".join(config.watch_namespaces) or "all namespaces"
        )
        done, _ = await asyncio.wait([*workers, *others], return_when=asyncio.FIRST_COMPLETED)
        await _cancel(workers)  # first: nothing is written after the Lease is released
        await autoscaler.unregister()
        await lease.release()
        await _cancel(others)
        for task in done:
            if not task.cancelled() and (error := task.exception()):
                logger.error("a task of the operator failed", exc_info=error)
        return 0 if stop.is_set() else 1
    finally:
        for reader in (readers.adapters, readers.rejections, readers.zero, autoscaler):
            await reader.close()
        await web.cleanup()
        await client.close()


class _Readers(NamedTuple):
    """The tasks that read engines and routers, beside the controller."""

    autoscaler: Autoscaler
    zero: ZeroScaler
    adapters: AdapterReader
    rejections: RejectionReader


def _readers(
    client: KubeClient, config: OperatorConfig, lease: LeaderElector, controller: Controller, watches: Watches
) -> _Readers:
    """Create the readers and hand their results to the controller and its metrics."""
    store, reconcile = controller.store, controller.queue.add
    autoscaler = Autoscaler(client, config, store, lease, reconcile)
    zero = ZeroScaler(
        client, store, autoscaler.reader, controller.post, lambda: lease.is_held, gateways=controller.gateways_of
    )
    adapters = AdapterReader(store, reconcile, config.operator_id)
    rejections = RejectionReader(store, reconcile, lambda key: key not in controller.claims.others)
    controller.rejected = rejections.problem
    controller.scaling, controller.adapters = autoscaler.scaling, adapters.reports
    controller.pod_starts.read_start = autoscaler.reader.read_start
    controller.metrics.set_watch_silence(watches.health.max_silence, watches.silence_limit)
    controller.metrics.set_scaling(autoscaler.reader.decisions, zero.wakes)
    return _Readers(autoscaler, zero, adapters, rejections)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _without_kopf_traceback(record: logging.LogRecord) -> bool:
    """The message says why a watch failed, and kube/watches.py starts it again: kopf's traceback adds nothing."""
    if record.name.startswith("kopf") and record.exc_info:
        record.exc_info = None
    return True


def main() -> int:
    """Configures logging and runs the operator. Returns the exit status."""
    try:
        config = OperatorConfig.from_environment()
    except ConfigError as error:
        print(f"octavo-operator: {error}", file=sys.stderr)
        return 2
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if config.log_format == "json" else text)
    handler.addFilter(_without_kopf_traceback)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        return asyncio.run(run(config))
    except CredentialsError as error:
        print(f"octavo-operator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
