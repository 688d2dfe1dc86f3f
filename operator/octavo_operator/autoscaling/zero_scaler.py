"""Starts LLMDeployments with minReplicas 0 when their routers hold requests, and stops them when they are idle.

While there is no replica, one connection to each router waits for the first request: nothing is asked again and again,
and nothing in the data path has rights on the API server. What is decided: zero.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import FIELD_MANAGER, KIND, LLMDeployment
from octavo_operator.autoscaling.condition import SCALE_TO_ZERO_UNAVAILABLE
from octavo_operator.autoscaling.load_reader import LoadReader, MetricUnavailableError
from octavo_operator.autoscaling.zero import (
    Idle,
    RouterLoad,
    Sample,
    is_settled,
    may_stop,
    picker_addresses,
    sample_seconds,
    start_failure,
    watch_idle,
)
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.pod_client import PodClient, PodUnreadableError
from octavo_operator.kube.store import Key, Store
from octavo_operator.observed import workload
from octavo_operator.observed.children import pods_of
from octavo_operator.render import names

Json = dict[str, Any]

logger = logging.getLogger("octavo.operator.autoscaling")

WAIT_SECONDS = 55  # of one long poll; load balancers and proxies cut what is silent for a minute
STARTING_SECONDS = 1  # of a poll while the first replica starts: if it fails, who waits is told at once
PAUSE_SECONDS = 30  # until routers know that the replicas are gone; an operator that dies meanwhile costs that wait
TIMEOUT_SECONDS = 2.0  # of everything but waiting
_RETRY_SECONDS = 0.25
_PERIOD_SECONDS = 1.0
_MAX_BYTES = 1 << 20  # of an answer

Post = Callable[[LLMDeployment, str, str], Awaitable[None]]  # an event: its reason and message


@dataclass(frozen=True)
class _RouterRequests:
    arrivals: int  # so many requests have ever waited in this router
    held: Mapping[str, int]  # by pool
    in_flight: Mapping[str, int]


class ZeroScaler:
    """`wakes`: how often each LLMDeployment was started for a request. `may_write`: whether we are the leader."""

    def __init__(
        self,
        client: KubeClient,
        store: Store,
        reader: LoadReader,
        post: Post,
        may_write: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        gateways: Callable[[LLMDeployment], Sequence[Key]] = lambda _: (),
    ) -> None:
        """`gateways`: keys of the LLMGateways that select an LLMDeployment: their routers hold its requests, too."""
        self.wakes: dict[Key, int] = {}
        self._client, self._store, self._reader = client, store, reader
        self._post, self._may_write, self._clock, self._gateways = post, may_write, clock, gateways
        self._polls: dict[tuple[Key, str], asyncio.Task[None]] = {}  # by the routers' uids
        self._idle: dict[Key, Idle | None] = {}
        self._due: dict[Key, float] = {}  # of the next sample
        self._addresses: dict[Key, tuple[tuple[tuple[str, str], ...], dict[str, str | None]]] = {}
        self._http = PodClient(TIMEOUT_SECONDS, _MAX_BYTES, max_concurrent=0)

    async def run(self, leading: asyncio.Event) -> None:
        """Runs until cancelled."""
        try:
            while True:
                await leading.wait()
                found = [one for one in self._reader.scaled() if one.scales_to_zero]
                self._keep(
                    {(one.namespace, one.name) for one in found}, {key for one in found for key in self._gateways(one)}
                )
                self._follow_routers(found)
                await self._start_unheld(found)
                await self._stop_idle(found)
                await asyncio.sleep(_PERIOD_SECONDS)
        finally:
            for poll in self._polls.values():
                poll.cancel()

    async def close(self) -> None:
        """Closes connections."""
        await self._http.close()

    def _keep(self, known: set[Key], gateways: set[Key]) -> None:
        memories: list[dict[Key, Any]] = [self._idle, self._due, self.wakes]
        for memory in memories:
            for gone in memory.keys() - known:
                del memory[gone]
        for gone in self._addresses.keys() - known - gateways:
            del self._addresses[gone]
        for key in known:
            self.wakes.setdefault(key, 0)

    # From zero.

    def _follow_routers(self, found: list[LLMDeployment]) -> None:
        """One poll for each router of those that have no replica."""
        wanted = {
            ((one.namespace, one.name), uid): url
            for one in found
            if one.is_woken_by_requests or not (one.spec.suspend or one.status.get("availableReplicas"))
            for uid, url in self._routers(one).items()
            if url
        }
        for router in [router for router, poll in self._polls.items() if router not in wanted or poll.done()]:
            self._polls.pop(router).cancel()
        for router in wanted.keys() - self._polls.keys():
            self._polls[router] = asyncio.create_task(self._poll(router[0], wanted[router]))

    async def _poll(self, key: Key, url: str) -> None:
        since = -1  # no router has had so few: it answers at once
        while (deployment := self._reader.deployment(key)) is not None:
            try:
                wait = WAIT_SECONDS if deployment.is_woken_by_requests else STARTING_SECONDS
                found = await self._ask(url, key[1], since, wait, **_known(deployment))
                since = found.arrivals
                held = found.held.get(key[1], 0)
                if held and not await self._help(key, url, held):
                    since = -1
                    await asyncio.sleep(_RETRY_SECONDS)
                await asyncio.sleep(0.02)
            except PodUnreadableError:  # it starts, or ends
                since = -1
                await asyncio.sleep(_PERIOD_SECONDS)
            except Exception:
                logger.exception("%s/%s: internal error", *key)
                await asyncio.sleep(_PERIOD_SECONDS)

    async def _help(self, key: Key, url: str, held: int) -> bool:
        """Something is done for requests that wait. False: look again soon."""
        seen, deployment = self._store.get(KIND, *key), self._reader.deployment(key)
        if seen is None or deployment is None:
            return True
        if deployment.is_woken_by_requests:
            if await self._scale(deployment, 1, seen.resource_version):
                self.wakes[key] = self.wakes.get(key, 0) + 1
                count = "a request waits" if held == 1 else f"{held} requests wait"
                await self._post(deployment, "ScaledFromZero", f"{count} in a router: the first replica starts")
            return False
        if why := start_failure(deployment):
            await self._post_to(url, "refuse", pool=key[1], reason=why)
        return True

    async def _start_unheld(self, found: list[LLMDeployment]) -> None:
        """Start a replica where no router holds requests: no request could start it."""
        for one in found:
            if not one.is_woken_by_requests or one.routers_hold or self._gateways(one):
                continue
            seen = self._store.get(KIND, one.namespace, one.name)
            if seen and await self._scale(one, 1, seen.resource_version):
                await self._post(one, "ScaleToZeroUnavailable", SCALE_TO_ZERO_UNAVAILABLE)

    # To zero.

    async def _stop_idle(self, found: list[LLMDeployment]) -> None:
        now, due = self._clock(), []
        for one in found:
            key = (one.namespace, one.name)
            if one.replicas == 0:
                self._idle[key] = None
            elif now >= self._due.get(key, 0.0):
                self._due[key] = now + sample_seconds(one)
                due.append(self._stop_if_idle(key))
        for failure in await asyncio.gather(*due, return_exceptions=True):
            if isinstance(failure, BaseException):
                logger.error("internal error", exc_info=failure)

    async def _stop_if_idle(self, key: Key) -> None:
        seen, deployment = self._store.get(KIND, *key), self._reader.deployment(key)
        if seen is None or deployment is None:
            return
        sample = await self._sample(key, deployment)
        now = self._clock()
        self._idle[key] = idle = watch_idle(self._idle.get(key), sample, now)
        # The version is from before the sample: nothing of the LLMDeployment has changed since.
        if may_stop(deployment, idle, now):
            await self._stop(key, deployment, seen.resource_version)

    async def _stop(self, key: Key, deployment: LLMDeployment, version: str) -> None:
        """Routers hold what comes from now on: until they know that a replica is gone, they would send it there."""
        urls = [url for url in self._routers(deployment).values() if url]
        pausing = (self._post_to(url, "pause", pool=key[1], seconds=str(PAUSE_SECONDS)) for url in urls)
        answers = await asyncio.gather(*pausing, return_exceptions=True)
        is_paused = all(isinstance(one, dict) and one.get("paused") is True for one in answers)
        if is_paused and await self._scale(deployment, 0, version):
            return
        self._idle[key] = None
        resuming = (self._post_to(url, "resume", pool=key[1]) for url in urls)
        await asyncio.gather(*resuming, return_exceptions=True)

    async def _sample(self, key: Key, deployment: LLMDeployment) -> Sample:
        if not is_settled(deployment, workload.find(deployment, self._store.children(key))):
            return Sample(False, None, ())
        try:
            engines = await self._reader.read(key)
        except MetricUnavailableError:
            return Sample(True, None, ())
        loads = await asyncio.gather(*(self._load(url, key[1]) for url in self._routers(deployment).values()))
        return Sample(True, engines, loads)

    async def _load(self, url: str | None, pool: str) -> RouterLoad | None:
        if url is None:
            return None
        try:
            found = await self._ask(url, pool, -1, 0)
        except PodUnreadableError:
            return None
        return RouterLoad(found.held.get(pool, 0), found.in_flight.get(pool, 0))

    # The API server and routers.

    async def _scale(self, deployment: LLMDeployment, replicas: int, version: str) -> bool:
        """True if it was written."""
        if not self._may_write():
            return False
        key = (deployment.namespace, deployment.name)
        try:
            await self._client.scale(KIND, *key, replicas, version, FIELD_MANAGER)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            if not (isinstance(error, ApiError) and error.status == 409):  # it has changed meanwhile
                logger.warning("%s/%s: scaling to %d failed: %s", *key, replicas, str(error) or type(error).__name__)
            return False
        logger.info("%s/%s: scaled to %d", *key, replicas)
        return True

    def _routers(self, deployment: LLMDeployment) -> dict[str, str | None]:
        """Addresses of the pickers by uid, of its own routers and of its gateways'; None: of a router without one."""
        keys = ((deployment.namespace, deployment.name), *self._gateways(deployment))
        return {uid: url for key in keys for uid, url in self._routers_of(key).items()}

    def _routers_of(self, key: Key) -> dict[str, str | None]:
        children = self._store.children(key)
        seen = tuple((one.name, one.resource_version) for one in children if one.kind == "Pod")
        known = self._addresses.get(key)
        if known is None or known[0] != seen:
            known = self._addresses[key] = (seen, picker_addresses(pods_of(children, names.ROUTER)))
        return known[1]

    async def _ask(self, url: str, pool: str, since: int, wait: int, **more: str) -> _RouterRequests:
        params = {"pool": pool, "since": str(since), "wait": str(wait), **more}
        answer = await self._call("GET", f"{url}/held", params, wait)
        try:
            held, under_way = dict(answer["held"]), dict(answer["in_flight"])
            return _RouterRequests(int(answer["arrivals"]), held, under_way)
        except (KeyError, TypeError, ValueError) as error:
            raise PodUnreadableError(str(error)) from error

    async def _post_to(self, url: str, what: str, **params: str) -> Json:
        return await self._call("POST", f"{url}/{what}", params, 0)

    async def _call(self, method: str, url: str, params: dict[str, str], wait: float) -> Json:
        text = await self._http.call(url, method, params, wait)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise PodUnreadableError(f"the answer is no JSON: {error}") from error
        if not isinstance(answer, dict):
            raise PodUnreadableError("the answer is no JSON object")
        return answer


def _known(deployment: LLMDeployment) -> dict[str, str]:
    """Return what a router needs to know of the replicas that it waits for: the duration of the last start, for its
    Retry-After until it has seen one itself, and how many requests a replica handles at once: as observed, and at most
    as the spec allows."""
    seconds = (deployment.status.get("start") or {}).get("ready")
    rooms = [one for one in (deployment.status.get("replicaCapacity"), deployment.spec.engine.max_num_seqs) if one]
    start = {} if seconds is None else {"start": f"{seconds:g}"}
    return {**start, "room": str(min(rooms))} if rooms else start
