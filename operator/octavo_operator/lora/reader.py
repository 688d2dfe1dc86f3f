"""Asks pods which LoRA adapters they have, and those that lack some to read their list: summary.py says whom."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.autoscaling.load_reader import management_url
from octavo_operator.claims.own_deployments import OwnDeployments
from octavo_operator.kube.pod_client import PodClient
from octavo_operator.kube.store import Key, Store
from octavo_operator.lora.summary import AdapterReports, PodAdapters, is_behind, next_to_ask, parse_report, serving_uids
from octavo_operator.observed.children import pods_of
from octavo_operator.render.lora import list_digest

Json = dict[str, Any]

logger = logging.getLogger("octavo.operator.adapters")

PERIOD_SECONDS = 0.5
BEHIND_SECONDS = 0.5  # between readings of a pod that lacks something
SETTLED_SECONDS = 15.0  # of another: it may have been restarted
TIMEOUT_SECONDS = 2.0
SILENT_SECONDS = 10.0  # until what a pod has said last no longer counts
_MAX_BYTES = 1 << 20


@dataclass
class _Memory:
    """State of one LLMDeployment, by the uids of its pods."""

    reports: dict[str, PodAdapters] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)  # when each was read last
    silent: dict[str, float] = field(default_factory=dict)  # since when
    busy: set[str] = field(default_factory=set)
    reloading: str | None = None

    def keep(self, uids: set[str]) -> None:
        memories: list[dict[str, Any]] = [self.reports, self.asked, self.read, self.silent]
        for memory in memories:
            for gone in memory.keys() - uids:
                del memory[gone]


class AdapterReader:
    """`changed` is called with a key when a pod says something new."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[Key], None],
        operator: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`operator`: our name in claims; LLMDeployments of other operators are left out."""
        self._store, self._changed, self._clock = store, changed, clock
        self._memory: dict[Key, _Memory] = {}
        self._deployments = OwnDeployments(store, "adapters", operator)
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = PodClient(TIMEOUT_SECONDS, _MAX_BYTES)

    def reports(self, key: Key) -> AdapterReports:
        """Return the last reports of the pods of an LLMDeployment."""
        memory = self._memory.get(key)
        return memory.reports if memory else {}

    async def run(self, leading: asyncio.Event) -> None:
        """Run until cancelled."""
        while True:
            await leading.wait()
            found = self._deployments.all()
            for gone in self._memory.keys() - found.keys():
                del self._memory[gone]
            for key, one in found.items():
                self._look_after(key, one)
            await asyncio.sleep(PERIOD_SECONDS)

    async def close(self) -> None:
        """Cancels what is asked and closes connections."""
        for task in self._tasks:
            task.cancel()
        await self._client.close()

    def _look_after(self, key: Key, deployment: LLMDeployment) -> None:
        memory, now = self._memory.setdefault(key, _Memory()), self._clock()
        pods = {str(pod["metadata"]["uid"]): pod for pod in pods_of(self._store.children(key))}
        uids = serving_uids(pods.values())
        memory.keep(set(uids))
        digest = list_digest(deployment)
        asked = next_to_ask(digest, uids, memory.reports, memory.asked, now) if memory.reloading is None else None
        for uid in uids:
            url = management_url(pods[uid])
            pause = BEHIND_SECONDS if is_behind(digest, memory.reports.get(uid)) else SETTLED_SECONDS
            if url is None or uid in memory.busy or now - memory.read.get(uid, float("-inf")) < pause:
                continue
            memory.read[uid] = now
            if uid == asked:
                memory.asked[uid], memory.reloading = now, uid
            memory.busy.add(uid)
            task = asyncio.create_task(self._ask(key, memory, uid, url, reload=uid == asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: Key, memory: _Memory, uid: str, url: str, reload: bool) -> None:
        """Reads a pod; `reload`: after it has read its list."""
        try:
            method, path = ("POST", "/v1/adapters/reload") if reload else ("GET", "/v1/adapters")
            found = parse_report(json.loads(await self._client.call(f"{url}{path}", method)))
        except ValueError as error:
            logger.debug("%s/%s: a pod's adapters cannot be read: %r", *key, error)
            now = self._clock()
            if now - memory.silent.setdefault(uid, now) >= SILENT_SECONDS and memory.reports.pop(uid, None) is not None:
                self._changed(key)
            return
        finally:
            memory.busy.discard(uid)
            if reload:
                memory.reloading = None
        memory.silent.pop(uid, None)
        if memory.reports.get(uid) != found:
            memory.reports[uid] = found
            self._changed(key)
