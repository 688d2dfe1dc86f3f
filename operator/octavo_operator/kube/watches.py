"""Keeps what the operator knows of the cluster current.

Watches report changes, but can miss some: while a watch restarts (the API server was restarted, or no longer has the
version at which the watch was interrupted), and when a connection dies silently. So everything is listed after each
restart of a watch, and periodically in any case, and a silent watch is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import kopf

from octavo_operator.api import KIND, gateway
from octavo_operator.config import OperatorConfig
from octavo_operator.kube import handlers
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.resources import (
    IMAGE_VOLUMES,
    IMAGE_VOLUMES_VERSION,
    OPTIONAL_KINDS,
    RESOURCES,
    WATCHED_KINDS,
)
from octavo_operator.kube.store import Key
from octavo_operator.kube.thread_loop import run_in_thread_loop
from octavo_operator.kube.watch_health import WatchHealth

logger = logging.getLogger("octavo.operator.watches")

_DISCOVERY_SECONDS = 10.0  # until a newly installed kind is used
_START_TIMEOUT_SECONDS = 10.0  # of watches, before a listing: they must have started first
_RETRY_SECONDS = 2.0


class Watches:
    """Watches and lists all WATCHED_KINDS, and reports to `controller`. Create it in the controller's event loop."""

    def __init__(self, client: KubeClient, config: OperatorConfig, controller: handlers.ChangeHandler) -> None:
        self._client, self._config, self._controller = client, config, controller
        self._served: frozenset[str] | None = None  # of KIND, OPTIONAL_KINDS and IMAGE_VOLUMES, what the cluster has
        self._restart = asyncio.Event()
        self._listing_wanted = asyncio.Event()
        self._listing_wanted.set()
        self.health = WatchHealth(time.monotonic)
        self._call_soon = asyncio.get_running_loop().call_soon_threadsafe  # from kopf's thread
        self.health.on_restart = lambda path: self._call_soon(self._listing_wanted.set)
        self.silence_limit = 2 * config.watch_seconds + 10

    def unhealthy_reason(self) -> str | None:
        """Return why the operator should be restarted; None while what it knows is current."""
        if self._controller.listed_at is None:
            return None  # not ready, but a restart would not help: the API server may be down
        now, answers = time.monotonic(), self._client.answers
        if answers.are_missing(now):
            return None  # the API server is away, and a restart would not bring it back
        age = now - max(self._controller.listed_at, answers.since)
        if age > self._config.resync_seconds + 60:
            return f"last complete listing {age:.0f} s ago"
        path = self.health.silent_for(self.silence_limit)
        if path and now - answers.since > self.silence_limit:
            return f"no events or bookmarks from the watch of {path} for {self.silence_limit:.0f} s"
        return None

    def on_break(self, anew: bool) -> None:
        """The API server was away, or its store was restored: watches may have missed changes. `anew`: they may be
        deaf, too, and start again."""
        self._listing_wanted.set()
        if anew:
            self._restart.set()

    async def run(self) -> None:
        """Runs kopf, again whenever it fails. Until cancelled."""
        while self._served is None:
            await self._discover()
        while True:
            watching = asyncio.create_task(self._watch())
            restart = asyncio.create_task(self._restart.wait())
            try:
                await asyncio.wait({watching, restart}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (watching, restart):
                    task.cancel()
                await asyncio.gather(watching, restart, return_exceptions=True)
            self._restart.clear()
            self.health.reset()
            self._listing_wanted.set()
            if not watching.cancelled():
                logger.warning("watches failed, starting them again: %r", watching.exception())
                await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self) -> None:
        """kopf cancels all tasks of its event loop when it ends, ours as well, and takes the process's signals: so it
        has a loop and a thread of its own."""
        namespaces = list(self._config.watch_namespaces)
        registry = handlers.registry(self._client, self._controller, self.health, self._call_soon)
        settings = handlers.settings(self._config)
        await run_in_thread_loop(
            "kopf",
            lambda: kopf.operator(
                registry=registry, settings=settings, standalone=True, clusterwide=not namespaces, namespaces=namespaces
            ),
        )

    # Optional kinds.

    async def keep_discovering(self) -> None:
        """Follows CRDs that are installed and removed. Until cancelled."""
        while True:
            await asyncio.sleep(_DISCOVERY_SECONDS)
            await self._discover()

    async def _discover(self) -> None:
        wanted = (KIND, *OPTIONAL_KINDS)
        try:
            served: set[str] = set()
            for version in {RESOURCES[kind].api_version for kind in wanted}:
                served |= await self._client.kinds(version)
            if await self._client.version() >= IMAGE_VOLUMES_VERSION:
                served.add(IMAGE_VOLUMES)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("API discovery failed: %s", str(error) or type(error).__name__)
            await asyncio.sleep(_RETRY_SECONDS)
            return
        found = frozenset(served & {*wanted, IMAGE_VOLUMES})
        if found == self._served:
            return
        logger.info("optional kinds and features of this cluster: %s", ", ".join(sorted(found)) or "none")
        first = self._served is None
        if {KIND} == found & {KIND, gateway.KIND} and (first or gateway.KIND in (self._served or ())):
            logger.warning(
                "the CRD of LLMGateway is not installed, so there are no gateways; this version's chart installs it"
            )
        self._served = found
        namespaces = self._config.watch_namespaces or (None,)
        expected = [kind for kind in WATCHED_KINDS if kind not in wanted or kind in found]
        self.health.expect(RESOURCES[kind].path(namespace) for kind in expected for namespace in namespaces)
        self._controller.on_optional_kinds(found)
        if not first:
            self._listing_wanted.set()
            if self._config.watch_namespaces:  # kopf follows CRDs only with rights over the whole cluster
                self._restart.set()

    # Listings, for what watches have missed.

    async def keep_listing(self) -> None:
        """Lists everything every `resync_seconds`, and whenever a watch restarted. Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._listing_wanted.wait(), self._config.resync_seconds)
            deadline = time.monotonic() + _START_TIMEOUT_SECONDS
            while self._served is None or (self.health.not_started() and time.monotonic() < deadline):
                await asyncio.sleep(0.05)
            self._listing_wanted.clear()
            try:
                await self._list_all()
            except (*TRANSPORT_ERRORS, ApiError) as error:
                self._controller.on_listing_failed()
                logger.warning("listing failed: %s", str(error) or type(error).__name__)
                self._listing_wanted.set()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _list_all(self) -> None:
        for kind in WATCHED_KINDS:
            is_served = kind not in (KIND, *OPTIONAL_KINDS) or kind in (self._served or ())
            for namespace in self._config.watch_namespaces or (None,):
                self._controller.on_listing(kind, await self._list(kind, namespace, is_served))
        self._controller.on_all_listed()

    async def _list(self, kind: str, namespace: str | None, is_served: bool) -> set[Key]:
        selector = handlers.label_selector(kind, self._config)
        listing, version = self._controller.store.listing(kind, namespace), None
        if is_served:
            async for page in self._client.list_pages(kind, namespace, selector):
                if page.is_first and version is not None:  # the list was restarted
                    listing = self._controller.store.listing(kind, namespace)
                version = page.version
                for number, body in enumerate(page.items):
                    listing.add(RESOURCES[kind].api_version, body)
                    if number % 50 == 0:
                        await asyncio.sleep(0)  # let other tasks run
        return listing.finish(version)
