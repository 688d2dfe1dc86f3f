"""What the kubelet asks the operator: alive while everything has been listed lately, ready once it has been at all.
And what Prometheus asks."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from octavo_operator.config import OperatorConfig
from octavo_operator.controller import Controller


def why_unwell(listed_seconds_ago: float | None, started_seconds_ago: float, resync_seconds: float) -> str | None:
    """Pure. A listing that is overdue by a minute and more means: what the operator knows is old."""
    age = started_seconds_ago if listed_seconds_ago is None else listed_seconds_ago
    limit = resync_seconds + 60
    return f"what is known of the cluster is {age:.0f} s old" if age > limit else None


async def serve(controller: Controller, config: OperatorConfig, started: float, clock: object) -> web.AppRunner:
    async def healthz(_: web.Request) -> web.Response:
        reason = why_unwell(controller.listed_seconds_ago, clock() - started, config.resync_seconds)  # type: ignore[operator]
        return web.Response(text=reason or "ok", status=503 if reason else 200)

    async def readyz(_: web.Request) -> web.Response:
        known = controller.listed_seconds_ago is not None
        return web.Response(text="ok" if known else "the first listing is not finished", status=200 if known else 503)

    async def metrics(_: web.Request) -> web.Response:
        text = await asyncio.to_thread(controller.metrics.expose)  # thousands of lines where there are many pods
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, port=config.health_port).start()
    return runner
