"""Thin wiring: kopf keeps the watches alive and tells the controller. No kopf handler does any work, so nothing is
swallowed, no annotation is written, and no finalizer holds an object up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import kopf

from octavo_operator.api import KIND
from octavo_operator.config import OperatorConfig
from octavo_operator.controller import WATCHED, Controller
from octavo_operator.kube.client import RESOURCES, Cluster
from octavo_operator.kube.watch_health import Freshness
from octavo_operator.render.names import OWNER_LABEL


def registry(
    cluster: Cluster, controller: Controller, freshness: Freshness, tell: Callable[..., Any]
) -> kopf.OperatorRegistry:
    """One event handler a watched kind. `tell` calls a function of the controller in the controller's event loop."""
    out = kopf.OperatorRegistry()
    for kind in WATCHED:
        resource = RESOURCES[kind]

        def told(type: str | None, body: kopf.Body, kind: str = kind, **_: Any) -> None:
            raw = dict(body)
            meta = raw["metadata"]
            if type == "DELETED":
                tell(controller.lost, kind, meta["namespace"], meta["name"], meta["uid"], meta["resourceVersion"])
            else:
                tell(controller.saw, kind, raw)

        async def handler(_told: Any = told, **arguments: Any) -> None:
            _told(**arguments)

        kopf.on.event(resource.api_version, resource.plural, id=f"saw-{kind.lower()}", registry=out)(handler)

    logins: list[float] = []

    @kopf.on.login(registry=out)
    async def login(**_: Any) -> kopf.AiohttpSession:
        # kopf logs in anew whenever it is refused, for each watch: with credentials that are no longer good, never stop
        # trying, but do not knock all the time.
        now = time.monotonic()
        logins[:] = [when for when in logins if now - when < 300]
        await asyncio.sleep(min(2 ** len(logins) - 1, 30))
        logins.append(time.monotonic())
        if len(logins) > 1:
            await cluster.log_in_anew()
        return kopf.AiohttpSession(
            server=cluster.server,
            default_namespace=cluster.namespace,
            aiohttp_session=cluster.new_session(freshness.response_class()),
        )

    return out


def settings(config: OperatorConfig) -> kopf.OperatorSettings:
    out = kopf.OperatorSettings()
    for kind in WATCHED:  # the API server filters: a cluster's other pods cost nothing
        if selector := config.selector if kind == KIND else OWNER_LABEL:
            out.watching.label_selectors[RESOURCES[kind].api_version, RESOURCES[kind].plural] = selector
    out.posting.enabled = False
    out.peering.standalone = True
    out.scanning.disabled = bool(config.watch_namespaces)  # a namespaced operator may not look at CRDs
    out.watching.server_timeout = 300
    out.watching.inactivity_timeout = config.watch_seconds
    out.watching.chunk_size = 500
    out.networking.error_backoffs = (1, 1, 2, 3, 5)  # then watching.py starts over
    out.networking.connect_timeout = 5
    out.queueing.idle_timeout = 0.1  # what a worker of kopf holds in memory for an object that is quiet
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it misses the signals, which are ours
    return out
