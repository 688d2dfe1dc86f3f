"""The picker as Envoy's external processor (ext_proc over gRPC): one call a request, which ends with it.

Requests of a pool without replicas wait here, where that is allowed: Envoy has not been answered yet.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from octavo_router.calls import INTERNAL, Stream
from octavo_router.hold import Hold, Ticket
from octavo_router.limits import Account, Refusal, Tenants
from octavo_router.management import MAX_WAIT_SECONDS, Answer, json_answer
from octavo_router.messages import answer, go_on, read, wait
from octavo_router.metrics import Metrics
from octavo_router.pick import LOAD_FACTOR, Pick, Picker
from octavo_router.prompt import blocks
from octavo_router.replicas import Replicas

ENVOY_MARGIN_SECONDS = 5.0  # so much longer than a hold Envoy waits
_UNKNOWN_START_SECONDS = 10.0
_STARTING_STATUS, _FAILED_STATUS = 425, 424  # Envoy makes a 503 of them, in the client's dialect
_LIMITED_STATUS = 423  # and a 429
_MAX_REASON = 1024
_KEY, _CLUSTER = "request.headers['x-octavo-key']", "xds.cluster_name"
_TENANT, _TENANT_ID = "request.headers['x-octavo-tenant']", "request.headers['x-octavo-tenant-id']"
_SALT, _LOAD_FACTOR = "request.headers['x-octavo-cache-salt']", "load-factor"  # percent
logger = logging.getLogger(__name__)


class Processor:
    """Answers Envoy's requests. A fault ends its stream: Envoy goes on with the ring hash."""

    def __init__(self, hold: Hold) -> None:
        self.tenants = Tenants()
        self._pools: dict[str, Picker] = {}
        self._hold = hold
        self._released: dict[int, asyncio.Future[str]] = {}  # by the tickets' numbers: why they cannot go on, or ""
        self._arrived = asyncio.Event()
        self._found: Replicas | None = None  # by Envoy; None: it has not answered yet
        self._leaving: dict[str, set[str]] = {}  # by pool: replicas that are about to be stopped, and get nothing more
        self._pauses: dict[str, asyncio.TimerHandle] = {}
        self._start_seconds: dict[str, float] = {}  # by pool: how long the last first replica took
        self.metrics = Metrics(self._pools, hold, self.tenants)

    @property
    def max_hold_seconds(self) -> float:
        """How long a request may wait."""
        return self._hold.max_seconds

    def replicas(self) -> list[str]:
        """All healthy ones."""
        return [name for healthy in (self._found or {}).values() for name in healthy]

    def limits_changed(self) -> None:
        """Of tenants."""
        for name in self.tenants.limits:
            self.metrics.tenant_requests.labels(name)
            for limit in ("tokens", "concurrent"):
                self.metrics.limited.labels(name, limit)

    def set_replicas(self, found: Replicas) -> None:
        """Pools and their healthy replicas."""
        self._found = found
        for gone in set(self._pools) - set(found):
            del self._pools[gone]
        for name, healthy in found.items():
            leaving = self._leaving.get(name, set()) & healthy
            self._leaving[name], replicas = leaving, healthy - leaving
            if name not in self._pools:
                self._pools[name] = Picker()
                for reason in ("full", "timeout", "failed"):  # 0 until then, or the first would be no increase
                    self.metrics.refused.labels(name, reason)
            self._pools[name].share = 1 / len(found)
            self._pools[name].set_replicas(replicas)
            if replicas:
                self._release(name)

    def _release(self, pool: str) -> None:
        tickets = self._hold.release(pool)
        if tickets:
            began = tickets[0].deadline - self._hold.max_seconds
            self._start_seconds[pool] = time.monotonic() - began
        self._tell(tickets, "")

    def _tell(self, tickets: list[Ticket], why: str) -> None:
        for ticket in tickets:  # their streams go on in this order
            if not self._released[ticket.number].done():  # its time may be over, or its client have gone, just now
                self._released[ticket.number].set_result(why)

    def pick(self, said: dict[str, str], body: bytes) -> tuple[Picker, Pick] | None:
        """The replica of a request, which counts until the picker's `end`. `said`: its attributes."""
        began = time.perf_counter()
        pool = said.get(_CLUSTER, "")
        picker = self._pools.get(pool)
        if picker is None:
            return None
        percent = said.get(_LOAD_FACTOR)
        picker.load_factor = int(percent) / 100 if percent else LOAD_FACTOR
        pick = picker.pick(said.get(_KEY, ""), blocks(body, said.get(_SALT, "")), time.monotonic())
        if pick is None:
            return None
        self.metrics.picks.labels(pool, pick.reason).inc()
        self.metrics.matched.labels(pool).observe(pick.matched)
        self.metrics.seconds.observe(time.perf_counter() - began)
        return picker, pick

    def holds(self, pool: str) -> bool:
        """Whether a request of the pool has to wait."""
        return bool(self._hold.max_requests) and pool in self._pools and not self._pools[pool].replicas

    async def wait(self, pool: str) -> bytes | None:
        """Until the pool has a replica: None. The answer, if no place is free, or none came in time, or none can."""
        began = time.monotonic()
        ticket = self._hold.add(pool, began)
        if ticket is None:
            self.metrics.refused.labels(pool, "full").inc()
            return self._starting(pool)
        self._arrived.set()
        self._arrived = asyncio.Event()
        self._released[ticket.number] = asyncio.get_running_loop().create_future()
        try:
            why = await asyncio.wait_for(self._released[ticket.number], ticket.deadline - began)
            if not why:
                return None
            self.metrics.refused.labels(pool, "failed").inc()
            return answer(_FAILED_STATUS, {}, f"the model cannot start: {why}")
        except TimeoutError:
            self.metrics.refused.labels(pool, "timeout").inc()
            return self._starting(pool)
        finally:  # the client may have gone
            self._hold.leave(ticket)
            del self._released[ticket.number]
            self.metrics.held_seconds.labels(pool).observe(time.monotonic() - began)

    def _starting(self, pool: str) -> bytes:
        seconds = math.ceil(self._start_seconds.get(pool, _UNKNOWN_START_SECONDS))
        text = "the model is starting: try again after the seconds of Retry-After"
        return answer(_STARTING_STATUS, {"retry-after": str(seconds)}, text)

    async def held(self, query: dict[str, str]) -> Answer:
        """GET /held?since=N&wait=S&pool=NAME: how many requests have ever waited, of the pool or of all, as soon as
        that is not N; how many wait and are under way now, by pool. &start=S: a start of the pool took so long; counts
        until one is seen."""
        since, patience, pool = int(query.get("since", 0)), float(query.get("wait", 0)), query.get("pool")
        if not 0 <= patience <= MAX_WAIT_SECONDS:
            raise ValueError(f"wait is {patience:g}; 0 to {MAX_WAIT_SECONDS:g} seconds are allowed")
        if "start" in query and math.isfinite(guess := float(query["start"])) and guess > 0:
            self._start_seconds.setdefault(pool or "", guess)
        if self._found is None:
            raise ValueError("Envoy has not told its clusters yet")  # so nothing can wait here
        deadline = time.monotonic() + patience
        while self._hold.arrivals(pool) == since and (remaining := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._arrived.wait(), remaining)
            except TimeoutError:
                pass
        under_way = {name: sum(picker.in_flight.values()) for name, picker in self._pools.items()}
        return json_answer({"arrivals": self._hold.arrivals(pool), "held": self._hold.held, "in_flight": under_way})

    async def refuse(self, query: dict[str, str]) -> Answer:
        """POST /refuse?pool=NAME&reason=TEXT: no replica can start, so nobody is to wait for one any longer. Who comes
        later waits again."""
        why = query.get("reason", "").strip()[:_MAX_REASON] or "see the LLMDeployment's status"
        tickets = self._hold.release(query.get("pool", ""))
        self._tell(tickets, why)
        return json_answer({"refused": len(tickets)})

    async def pause(self, query: dict[str, str]) -> Answer:
        """POST /pause?pool=NAME&seconds=S: the replicas are about to be stopped. From now on requests wait for others,
        for S seconds at most; then these count again. Not where something waits or is under way. A router that does
        not serve the pool sends nothing there."""
        pool, seconds = query.get("pool", ""), float(query.get("seconds", 0))
        picker = self._pools.get(pool)
        if picker is None:
            return json_answer({"paused": bool(self._found)})
        if any(picker.in_flight.values()) or self._hold.held.get(pool):
            return json_answer({"paused": False})
        self._resume(pool)
        self._leaving[pool] = set(picker.replicas)
        self._pauses[pool] = asyncio.get_running_loop().call_later(seconds, self._resume, pool)
        self.set_replicas(self._found or {})
        return json_answer({"paused": True})

    async def resume(self, query: dict[str, str]) -> Answer:
        """POST /resume?pool=NAME: the replicas stay after all."""
        self._resume(query.get("pool", ""))
        return json_answer({})

    def _resume(self, pool: str) -> None:
        if timer := self._pauses.pop(pool, None):
            timer.cancel()
        if self._leaving.pop(pool, None):  # all of them are there yet
            self._tell(self._hold.release(pool), "")  # they have waited for no start: nothing is learnt of one
            self.set_replicas(self._found or {})

    async def page(self, _: dict[str, str]) -> Answer:
        """GET /metrics."""
        return 200, CONTENT_TYPE_LATEST, generate_latest(self.metrics.registry)

    def begin(self, account: Account) -> Refusal | None:
        """A request of a tenant counts from now on; or has to wait."""
        refusal = self.tenants.begin(account, time.monotonic())
        if refusal:
            self.metrics.limited.labels(account[0], refusal.limit).inc()
        else:
            self.metrics.tenant_requests.labels(account[0]).inc()
        return refusal


class Request:
    """One of Envoy's: its attributes and its body come, its replica goes back; it counts until it is closed."""

    def __init__(self, processor: Processor, stream: Stream) -> None:
        self._processor, self._stream = processor, stream
        self._found: tuple[Picker, Pick] | None = None
        self._account: Account | None = None
        self._waiting: asyncio.Task[None] | None = None

    def received(self, message: bytes) -> None:
        """All that comes before the request has ended."""
        said, body = read(message)
        asks = (said.get(_TENANT, ""), account_of(said.get(_TENANT_ID, "")))
        if asks[0]:
            if refusal := self._processor.begin(asks):
                told = {"retry-after": str(refusal.retry_after)}
                return self._end(answer(_LIMITED_STATUS, told, refusal.text))
            self._account = asks
        if self._processor.holds(said.get(_CLUSTER, "")):
            self._waiting = asyncio.create_task(self._wait(said, body))
        else:
            self._pick(said, body)

    def closed(self) -> None:
        """The request has ended, or its client has gone."""
        if self._waiting:
            self._waiting.cancel()
        if self._found:
            self._found[0].end(self._found[1])
        if self._account:
            self._processor.tenants.end(self._account)

    async def _wait(self, said: dict[str, str], body: bytes) -> None:
        pool = said.get(_CLUSTER, "")
        self._stream.send(wait(self._processor.max_hold_seconds + ENVOY_MARGIN_SECONDS))
        # A replica may have come before this task began.
        refused = await self._processor.wait(pool) if self._processor.holds(pool) else None
        self._waiting = None
        if refused:
            self._end(refused)
        else:
            self._pick(said, body)

    def _pick(self, said: dict[str, str], body: bytes) -> None:
        try:
            self._found = self._processor.pick(said, body)
        except Exception:
            self._processor.metrics.errors.inc()
            logger.exception("a pick failed; its request goes on without")
            return self._stream.finish(INTERNAL)
        self._stream.send(go_on(",".join(self._found[1].order) if self._found else ""))

    def _end(self, message: bytes) -> None:
        self._stream.send(message)
        self._stream.finish()


def account_of(secret: str) -> str:
    """Under which engines count the tokens of a tenant."""
    return hashlib.sha256(secret.encode("latin-1", "replace")).hexdigest()[:16] if secret else ""
