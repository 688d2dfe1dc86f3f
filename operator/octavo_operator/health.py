"""The operator's HTTP endpoints: /healthz (what it knows of the cluster is current), /readyz (everything has been
listed once) and /metrics."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from octavo_operator.config import OperatorConfig
from octavo_operator.controller import Controller
from octavo_operator.kube.watches import Watches


async def serve(controller: Controller, watches: Watches, config: OperatorConfig, *more: web.RouteDef) -> web.AppRunner:
    """Starts the server on `config.health_port`, with the routes `more` besides."""

    async def healthz(_: web.Request) -> web.Response:
        reason = watches.unhealthy_reason()
        return web.Response(text=reason or "ok", status=503 if reason else 200)

    async def readyz(_: web.Request) -> web.Response:
        synced = controller.listed_at is not None
        return web.Response(text="ok" if synced else "the first listing is not finished", status=200 if synced else 503)

    async def metrics(_: web.Request) -> web.Response:
        text = await asyncio.to_thread(controller.metrics.expose)  # thousands of lines with many pods
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics), *more])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, port=config.health_port).start()
    return runner
