"""kopf's part in the operator, and its limits.

kopf opens one watch a kind (and namespace), lists before it where the API server no longer has the version at which it
was interrupted, opens it again when it ends, and follows CRDs and namespaces that come and go. Each event is passed on
to the controller, in the controller's event loop.

All else that kopf could do is done elsewhere or not at all. No handler of it does any work, so there are no finalizers,
annotations, progress records, timers, daemons, webhooks or peering of kopf's: reconciling, retries and backoff are
controller.py and workqueue.py, leader election is lease.py, credentials are credentials.py. Watches that fall silent
and changes that watches missed, which kopf does not notice, are found by watch_health.py and watches.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import kopf

from octavo_operator.api import FIELD_MANAGER
from octavo_operator.api.common import MANAGED_BY_LABEL
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import KubeClient
from octavo_operator.kube.resources import RESOURCES, WATCHED_KINDS
from octavo_operator.kube.store import OWNER_KINDS, Key, Store
from octavo_operator.kube.watch_health import WatchHealth


class ChangeHandler(Protocol):
    """The receiver of watches and listings: the controller. All methods are called in its event loop."""

    store: Store
    listed_at: float | None  # time.monotonic() of the last complete listing

    def on_change(self, kind: str, body: Any) -> None:
        """A watch reported an object as new or changed."""

    def on_delete(self, kind: str, namespace: str, name: str, uid: str, version: str) -> None:
        """A watch reported an object as deleted, or as no longer selected."""

    def on_optional_kinds(self, kinds: frozenset[str]) -> None:
        """The cluster has these of OPTIONAL_KINDS."""

    def on_listing(self, kind: str, changed: set[Key]) -> None:
        """A kind was listed; that changed what is known of these owners."""

    def on_all_listed(self) -> None:
        """All kinds were listed."""

    def on_listing_failed(self) -> None:
        """The API server did not list everything."""


def registry(
    client: KubeClient, controller: ChangeHandler, health: WatchHealth, call_soon: Callable[..., Any]
) -> kopf.OperatorRegistry:
    """One event handler a watched kind. `call_soon` calls a function in the controller's event loop."""
    out = kopf.OperatorRegistry()
    for kind in WATCHED_KINDS:
        resource = RESOURCES[kind]

        async def on_event(type: str | None, body: kopf.Body, _kind: str = kind, **_: Any) -> None:
            raw = dict(body)
            meta = raw["metadata"]
            if type == "DELETED":
                identity = (meta["namespace"], meta["name"], meta["uid"], meta["resourceVersion"])
                call_soon(controller.on_delete, _kind, *identity)
            else:
                call_soon(controller.on_change, _kind, raw)

        kopf.on.event(resource.api_version, resource.plural, id=f"on-{kind.lower()}", registry=out)(on_event)

    logins: list[float] = []

    @kopf.on.login(registry=out)
    async def login(**_: Any) -> kopf.AiohttpSession:
        # kopf logs in again after each 401, for each watch. With expired credentials it must never give up, nor flood
        # the API server.
        now = time.monotonic()
        logins[:] = [when for when in logins if now - when < 300]
        await asyncio.sleep(min(2 ** len(logins) - 1, 30))
        logins.append(time.monotonic())
        if len(logins) > 1:
            await client.reauthenticate()
        return kopf.AiohttpSession(
            server=client.server,
            default_namespace=client.namespace,
            aiohttp_session=client.new_session(health.response_class()),
        )

    return out


def label_selector(kind: str, config: OperatorConfig) -> str:
    """Return the selector of the objects of a kind that are watched and listed; empty: all. A selector cannot name the
    label of LLMDeployments or that of LLMGateways, so it names one that the objects of both have."""
    return config.selector if kind in OWNER_KINDS else f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"


def settings(config: OperatorConfig) -> kopf.OperatorSettings:
    """kopf's settings: watches filtered by label, and everything else switched off."""
    out = kopf.OperatorSettings()
    for kind in WATCHED_KINDS:  # filtered by the API server: a cluster's other pods cost nothing
        if selector := label_selector(kind, config):
            out.watching.label_selectors[RESOURCES[kind].api_version, RESOURCES[kind].plural] = selector
    out.posting.enabled = False
    out.peering.standalone = True
    out.scanning.disabled = bool(config.watch_namespaces)  # a namespaced operator may not list CRDs
    out.watching.server_timeout = 300
    out.watching.inactivity_timeout = config.watch_seconds
    out.watching.chunk_size = 500
    out.networking.error_backoffs = (1, 1, 2, 3, 5)  # then watches.py starts over
    out.networking.connect_timeout = 5
    out.queueing.idle_timeout = 0.1  # until a kopf worker of an idle object is freed
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it misses the signals, which are ours
    return out
