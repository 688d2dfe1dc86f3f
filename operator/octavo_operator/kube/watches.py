"""Keeps what the operator knows of the cluster true.

kopf's watches tell of changes. They can miss some: while a watch begins anew (the API server was restarted, or forgot
the version at which the watch was interrupted), and when a connection dies without a sign. So whenever a watch has
begun anew, and now and then in any case, everything is listed, and a silent watch is opened once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import kopf

from octavo_operator.api import KIND
from octavo_operator.config import OperatorConfig
from octavo_operator.controller import OPTIONAL, WATCHED, Controller
from octavo_operator.kube import handlers
from octavo_operator.kube.client import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.kube.store import Key
from octavo_operator.kube.thread_loop import in_own_loop
from octavo_operator.kube.watch_health import Freshness
from octavo_operator.render.names import OWNER_LABEL

logger = logging.getLogger("octavo.operator.watching")

_DISCOVERY_SECONDS = 10.0  # how soon a kind that somebody installs is used
_PATIENCE_SECONDS = 10.0  # how long a listing waits for watches to begin, which must be first
_PAUSE_SECONDS = 2.0


class Watching:
    def __init__(self, cluster: Cluster, config: OperatorConfig, controller: Controller) -> None:
        self._cluster, self._config, self._controller = cluster, config, controller
        self._served: frozenset[str] | None = None  # kinds of ours that not every cluster has
        self._restart = asyncio.Event()
        self._listing_wanted = asyncio.Event()
        self._listing_wanted.set()
        self.freshness = Freshness(time.monotonic)
        self._tell = asyncio.get_running_loop().call_soon_threadsafe  # for kopf, which has another loop
        self.freshness.on_begin = lambda path: self._tell(self._listing_wanted.set)
        self._longest_silence = 2 * config.watch_seconds + 10
        controller.metrics.watch_silence(self.freshness.silence, self._longest_silence)

    def why_unwell(self) -> str | None:
        """None while what is known is fresh."""
        if self._controller.listed_at is None:
            return None  # not ready, but nothing that a restart would mend: the API server may be away
        age = time.monotonic() - self._controller.listed_at
        if age > self._config.resync_seconds + 60:
            return f"everything was last listed {age:.0f} s ago"
        if path := self.freshness.silent(self._longest_silence):
            return f"the watch of {path} is silent"
        return None

    async def run(self) -> None:
        """kopf's part, started anew whenever it breaks. Until cancelled."""
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
            self.freshness.forget()
            self._listing_wanted.set()
            if not watching.cancelled():
                logger.warning("the watches broke off: %r", watching.exception())
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _watch(self) -> None:
        """kopf cancels all tasks of its event loop when it ends, ours as well, and takes the process's signals: so it
        has a loop and a thread of its own."""
        namespaces = list(self._config.watch_namespaces)
        registry = handlers.registry(self._cluster, self._controller, self.freshness, self._tell)
        settings = handlers.settings(self._config)
        await in_own_loop(
            "kopf",
            lambda: kopf.operator(
                registry=registry, settings=settings, standalone=True, clusterwide=not namespaces, namespaces=namespaces
            ),
        )

    # Which kinds there are.

    async def keep_discovering(self) -> None:
        while True:
            await asyncio.sleep(_DISCOVERY_SECONDS)
            await self._discover()

    async def _discover(self) -> None:
        """Optional kinds come and go with their CustomResourceDefinitions."""
        wanted = (KIND, *OPTIONAL)
        try:
            served: set[str] = set()
            for version in {RESOURCES[kind].api_version for kind in wanted}:
                served |= await self._cluster.kinds(version)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("the API server does not say which kinds it has: %s", str(error) or type(error).__name__)
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        found = frozenset(served & set(wanted))
        if found == self._served:
            return
        logger.info("optional kinds that this cluster has: %s", ", ".join(sorted(found)) or "none")
        first = self._served is None
        self._served = found
        namespaces = self._config.watch_namespaces or (None,)
        there = [kind for kind in WATCHED if kind not in wanted or kind in found]
        self.freshness.expect(RESOURCES[kind].path(namespace) for kind in there for namespace in namespaces)
        self._controller.use(found)
        if not first:
            self._listing_wanted.set()
            if self._config.watch_namespaces:  # with rights in namespaces only, kopf does not see kinds come and go
                self._restart.set()

    # Lists, against what watches have missed.

    async def keep_listing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._listing_wanted.wait(), self._config.resync_seconds)
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while self._served is None or (self.freshness.missing() and time.monotonic() < deadline):
                await asyncio.sleep(0.05)
            self._listing_wanted.clear()
            try:
                await self._list_all()
            except (*TRANSPORT_ERRORS, ApiError) as error:
                self._controller.metrics.listed(succeeded=False)
                logger.warning("listing everything failed: %s", str(error) or type(error).__name__)
                self._listing_wanted.set()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _list_all(self) -> None:
        for kind in WATCHED:
            is_served = kind not in (KIND, *OPTIONAL) or kind in (self._served or ())
            for namespace in self._config.watch_namespaces or (None,):
                self._controller.listed(kind, await self._list(kind, namespace, is_served))
        self._controller.listed_all()

    async def _list(self, kind: str, namespace: str | None, is_served: bool) -> set[Key]:
        selector = self._config.selector if kind == KIND else OWNER_LABEL
        listing, version = self._controller.store.listing(kind, namespace), None
        if is_served:
            async for page in self._cluster.pages(kind, namespace, selector):
                if page.is_first and version is not None:  # the list begins once more
                    listing = self._controller.store.listing(kind, namespace)
                version = page.version
                for number, body in enumerate(page.items):
                    listing.add(RESOURCES[kind].api_version, body)
                    if number % 50 == 0:
                        await asyncio.sleep(0)  # others have work, too
        return listing.finish(version)
