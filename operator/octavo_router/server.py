"""The picker as Envoy's external processor (ext_proc over gRPC): one call a request, which ends with it.

Requests of a pool without replicas wait here, where that is allowed: Envoy has not been answered yet.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from octavo_router.admission import Place, Tenants
from octavo_router.blocks import Prompt
from octavo_router.calls import INTERNAL, Stream
from octavo_router.hold import Hold, Ticket
from octavo_router.keepers import keeper_of, listed, named_in_path
from octavo_router.limits import Account, Refusal
from octavo_router.lora import Holders
from octavo_router.management import MAX_WAIT_SECONDS, Answer, json_answer
from octavo_router.messages import answer, go_on, read, wait
from octavo_router.metrics import Metrics
from octavo_router.pick import LOAD_FACTOR, Pick, Picker
from octavo_router.prompt import read_prompt
from octavo_router.replicas import Replicas

ENVOY_MARGIN_SECONDS = 5.0  # so much longer than a hold Envoy waits
FIRST_ROOM = 4  # of a replica that has not been asked yet
UNKNOWN_POOL_SECONDS = 30.0  # until Envoy tells of a pool whose model is listed, or it never does
_UNKNOWN_START_SECONDS = 10.0
_RETRIES, _RETRIES_A_SECOND = 5, 2  # of Envoy: what a route says, and how often it tries again while it waits
_STARTING_STATUS, _FAILED_STATUS = 425, 424  # Envoy makes a 503 of them, in the client's dialect
_LIMITED_STATUS = 423  # and a 429
_GONE_STATUS, _PREVIOUS_GONE_STATUS, _PARTIAL_STATUS = 410, 409, 406  # a 404, and two of 400
_GONE = (
    "the pod that stores what this request names is gone or not ready: it stores its responses, files and batches alone"
)
_ELSEWHERE = "what this request names is stored by pods of another model, or of another backend of a split"
_MAX_REASON = 1024
_TICK = 0.1  # seconds by which a timer may come early
_KEY, _CLUSTER = "request.headers['x-octavo-key']", "xds.cluster_name"
_POOL = "request.headers['x-octavo-pool']"  # of a gateway alone, also while Envoy does not know the cluster yet
_TENANT, _TENANT_ID = "request.headers['x-octavo-tenant']", "request.headers['x-octavo-tenant-id']"
_METHOD, _PATH, _UPLOAD = "request.method", "request.url_path", "/v1/files"
_LIMITS = "limits"  # by the filter that asks for a tenant
_SALT, _LOAD_FACTOR = "request.headers['x-octavo-cache-salt']", "load-factor"  # percent
logger = logging.getLogger(__name__)


class Processor:
    """Answers Envoy's requests. A fault ends its stream: Envoy goes on with the ring hash."""

    def __init__(self, hold: Hold, tenants: Tenants | None = None) -> None:
        self.tenants = tenants or Tenants()
        self._pools: dict[str, Picker] = {}
        self._holders: Holders = {}
        self._hold = hold
        self._waiting: dict[int, _Waiting] = {}  # by the tickets' numbers
        self._arrived = asyncio.Event()
        self._found: Replicas | None = None  # by Envoy; None: it has not answered yet
        self._leaving: dict[str, set[str]] = {}  # by pool: replicas that are about to be stopped, and get nothing more
        self._pauses: dict[str, asyncio.TimerHandle] = {}
        self._start_seconds: dict[str, float] = {}  # by pool: how long the last first replica took
        self._room: dict[str, int] = {}  # by pool: so many requests one replica handles at once, as the operator knows
        self._rooms: Mapping[str, float] = {}  # by replica, as its engine says
        self.metrics = Metrics(self._pools, hold, self.tenants)

    @property
    def max_hold_seconds(self) -> float:
        """Seconds that a request may wait."""
        return self._hold.max_seconds

    def replicas(self) -> list[str]:
        """All healthy ones."""
        return [name for healthy in (self._found or {}).values() for name in healthy]

    def set_adapters(self, found: Holders) -> None:
        """Set which replicas have which LoRA adapters."""
        self._holders = found

    def set_rooms(self, found: Mapping[str, float]) -> None:
        """Set how many requests replicas handle at once, as their engines say; infinite: one does not."""
        self._rooms = found
        for name, picker in self._pools.items():
            if picker.replicas:
                self._release(name)

    def limits_changed(self) -> None:
        """Take over changed limits of tenants."""
        for name in self.tenants.limits:
            self.metrics.tenant_requests.labels(name)
            for limit in ("tokens", "requests", "concurrent"):
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
            picker = self._pools[name]
            is_first = not picker.replicas
            picker.share = 1 / len(found)
            picker.set_replicas(replicas)
            if replicas:
                self._release(name, is_first)

    def _release(self, pool: str, is_first: bool = False) -> None:
        """Let as many requests go on as the replicas handle at once, the oldest first: more would wait in the queue of
        the first replica, where those that follow it cannot take them. `is_first`: the pool had no replica before."""
        picker = self._pools[pool]
        known = self._room.get(pool, math.inf)
        rooms = (min(known, self._rooms.get(name, FIRST_ROOM)) for name in picker.replicas)
        room = sum(rooms) - picker.under_way
        most = max(0, int(room)) if math.isfinite(room) else None
        for number, ticket in enumerate(self._hold.release(pool, most)):
            if is_first and number == 0:
                self._start_seconds[pool] = time.monotonic() - self._waiting[ticket.number].began
            self._go(ticket, None)

    def _go(self, ticket: Ticket, refusal: bytes | None) -> None:
        waiting = self._no_longer(ticket)
        waiting.go(refusal)

    def _no_longer(self, ticket: Ticket) -> _Waiting:
        waiting = self._waiting.pop(ticket.number)
        waiting.timer.cancel()
        self.metrics.held_seconds.labels(ticket.pool).observe(time.monotonic() - waiting.began)
        return waiting

    def replicas_of(self, pool: str) -> list[str] | None:
        """Return the replicas that may be picked; None if Envoy has told of no such pool."""
        return self._pools[pool].replicas if pool in self._pools else None

    def pick(
        self, pool: str, said: dict[str, str], prompt: Prompt, began: float, keeper: str | None = None
    ) -> tuple[Picker, Pick] | None:
        """The replica of a request, which counts until the picker's `end`. `said`: its attributes; `began`: of
        `time.perf_counter`, when reading the request did, or its wait was over; `keeper`: no other will do."""
        picker = self._pools.get(pool)
        if picker is None:
            return None
        percent = said.get(_LOAD_FACTOR)
        picker.load_factor = int(percent) / 100 if percent else LOAD_FACTOR
        among = {keeper} if keeper else self._holders.get(prompt.model)
        pick = picker.pick(said.get(_KEY, ""), prompt, time.monotonic(), among)
        if pick is None:
            return None
        self.metrics.picks.labels(pool, "kept" if keeper else pick.reason).inc()
        self.metrics.matched.labels(pool).observe(pick.matched)
        self.metrics.seconds.observe(time.perf_counter() - began)
        return picker, pick

    def ended(self, pool: str, picker: Picker, pick: Pick) -> None:
        """A request that was sent to a replica is over: another one may have its room."""
        picker.end(pick)
        if self._pools.get(pool) is picker and picker.replicas:
            self._release(pool)

    def holds(self, pool: str) -> bool:
        """True if a request of the pool has to wait: for a replica, or behind those that do. Only a model that has just
        come, or gone, has a pool of which Envoy has not told: its name is in another file than its cluster."""
        if not self._hold.max_requests or self._found is None or not pool:
            return False
        if pool not in self._pools:
            return True
        return not self._pools[pool].replicas or (self._hold.waiting(pool) > 0 and not self._hold.is_full)

    def wait(self, pool: str, go: Callable[[bytes | None], None]) -> Ticket | bytes:
        """`go` is called once the pool has a replica with room for it, with None, or with an answer: that none came in
        time, or that none can. No ticket but an answer: all places are taken."""
        now = time.monotonic()
        ticket = self._hold.add(pool, now)
        if ticket is None:
            self.metrics.refused.labels(pool, "full").inc()
            return self._starting(pool)
        seconds = self._hold.max_seconds
        if pool not in self._pools:
            seconds = min(seconds, UNKNOWN_POOL_SECONDS)
        self._waiting[ticket.number] = _Waiting(go, self._timer(seconds, ticket), now)
        self._arrived.set()
        self._arrived = asyncio.Event()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Its client has gone."""
        self._hold.leave(ticket)
        self._no_longer(ticket)

    def _timer(self, seconds: float, ticket: Ticket) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._late, ticket)

    def _late(self, ticket: Ticket) -> None:
        picker = self._pools.get(ticket.pool)
        left = ticket.deadline - time.monotonic()
        if picker and not picker.replicas and left > _TICK:  # it came with an unknown pool, which is known by now
            waiting = self._waiting[ticket.number]
            self._waiting[ticket.number] = replace(waiting, timer=self._timer(left, ticket))
            return
        self._hold.leave(ticket)
        if picker and picker.replicas:  # they are busy: the engine's own queue says for how long
            self._go(ticket, None)
        else:
            self.metrics.refused.labels(ticket.pool, "timeout").inc()
            self._go(ticket, self._starting(ticket.pool))

    def _starting(self, pool: str) -> bytes:
        seconds = math.ceil(self._start_seconds.get(pool, _UNKNOWN_START_SECONDS))
        text = "the model is starting: retry after the number of seconds in Retry-After"
        return answer(_STARTING_STATUS, {"retry-after": str(seconds)}, text)

    async def held(self, query: dict[str, str]) -> Answer:
        """GET /held?since=N&wait=S&pool=NAME: how many requests have ever waited, of the pool or of all, as soon as
        that is not N; how many wait and are under way now, by pool. &start=S: a start of the pool took so long; counts
        until one is seen. &room=N: a replica of it handles so many requests at once."""
        since, patience, pool = int(query.get("since", 0)), float(query.get("wait", 0)), query.get("pool")
        if not 0 <= patience <= MAX_WAIT_SECONDS:
            raise ValueError(f"wait is {patience:g}; 0 to {MAX_WAIT_SECONDS:g} seconds are allowed")
        if "start" in query and math.isfinite(guess := float(query["start"])) and guess > 0:
            self._start_seconds.setdefault(pool or "", guess)
        if "room" in query and (room := int(query["room"])) > 0:
            self._room[pool or ""] = room
        if self._found is None:
            raise ValueError("Envoy has not reported its clusters yet")  # so nothing can wait here
        deadline = time.monotonic() + patience
        while self._hold.arrivals(pool) == since and (remaining := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._arrived.wait(), remaining)
            except TimeoutError:
                pass
        under_way = {name: sum(picker.in_flight.values()) for name, picker in self._pools.items()}
        return json_answer({"arrivals": self._hold.arrivals(pool), "held": self._hold.held, "in_flight": under_way})

    async def refuse(self, query: dict[str, str]) -> Answer:
        """POST /refuse?pool=NAME&reason=TEXT: reject all waiting requests, because no replica can start.

        Later requests wait again.
        """
        why = query.get("reason", "").strip()[:_MAX_REASON] or "see the LLMDeployment's status"
        tickets = self._hold.release(query.get("pool", ""))
        for ticket in tickets:
            self.metrics.refused.labels(ticket.pool, "failed").inc()
            self._go(ticket, answer(_FAILED_STATUS, {}, f"the model cannot start: {why}"))
        return json_answer({"refused": len(tickets)})

    async def pause(self, query: dict[str, str]) -> Answer:
        """POST /pause?pool=NAME&seconds=S: the replicas are about to be stopped. From now on requests wait for others,
        for S seconds at most; then these count again. Not where something waits or is under way. A router that does
        not serve the pool sends nothing there."""
        pool, seconds = query.get("pool", ""), float(query.get("seconds", 0))
        picker = self._pools.get(pool)
        if picker is None:
            return json_answer({"paused": bool(self._found)})
        if any(picker.in_flight.values()) or self._hold.waiting(pool):
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
        if (leaving := self._leaving.pop(pool, None)) and pool in self._pools:  # all of them are there yet
            self._pools[pool].set_replicas(leaving)  # who waits has waited for no start: nothing is learnt of one
            self.set_replicas(self._found or {})

    async def page(self, _: dict[str, str]) -> Answer:
        """GET /metrics."""
        return 200, CONTENT_TYPE_LATEST, generate_latest(self.metrics.registry)

    def place(self, account: Account, then: Callable[[Refusal | None], None]) -> Place:
        """Ask for a place for a request of a tenant; `then` hears whether it may go on."""

        def counted(refusal: Refusal | None) -> None:
            if refusal:
                self.metrics.limited.labels(account[0], refusal.limit).inc()
            elif account[0] in self.tenants.limits:  # a label is kept for ever: never one that a client makes up
                self.metrics.tenant_requests.labels(account[0]).inc()
            then(refusal)

        return Place(self.tenants, account, counted)


@dataclass(frozen=True)
class _Waiting:
    go: Callable[[bytes | None], None]
    timer: asyncio.TimerHandle
    began: float


class Request:
    """One of Envoy's: its attributes and its body come, its replica goes back; it counts until it is closed."""

    def __init__(self, processor: Processor, stream: Stream) -> None:
        self._processor, self._stream = processor, stream
        self._pool = ""
        self._head = False  # whether Envoy has asked with the head alone
        self._found: tuple[Picker, Pick] | None = None
        self._place: Place | None = None
        self._ticket: Ticket | None = None

    def received(self, message: bytes) -> None:
        """All that comes before the request has ended."""
        began = time.perf_counter()
        if self._place:  # trailers of its answer: there is nothing to say of them
            return self._stream.finish()
        said, body = read(message)
        if _LIMITS in said:
            return self._begin(said.get(_TENANT, ""), account_of(said.get(_TENANT_ID, "")))
        self._pool, self._head = said.get(_POOL) or said.get(_CLUSTER, ""), body is None
        prompt = read_prompt(body or b"", said.get(_SALT, ""))  # who waits keeps this, and no body of many megabytes
        if path_of(said) == _UPLOAD and not said.get(_KEY):
            said[_KEY] = secrets.token_hex(8)  # a file is a batch to come: as even as conversations, not the first idle
        if self._is_kept(said, prompt, began):
            return
        if not self._head and self._processor.holds(self._pool):
            self._wait(said, prompt)
        else:
            self._pick(said, prompt, began)

    def _begin(self, tenant: str, account: str) -> None:
        """Its tenant's limits, which another stream asks for, before there is a body."""

        def decided(refusal: Refusal | None) -> None:
            if refusal:
                told = {"retry-after": str(refusal.retry_after)}
                self._end(answer(_LIMITED_STATUS, told, refusal.text))
            else:
                self._stream.send(go_on("", head=True))

        self._place = self._processor.place((tenant, account), decided)
        self._processor.tenants.begin(self._place, time.monotonic())

    def _is_kept(self, said: dict[str, str], prompt: Prompt, began: float) -> bool:
        """True if the request is about what one replica keeps, and has been sent there or answered."""
        replicas, path = self._processor.replicas_of(self._pool), path_of(said)
        if replicas is None:
            return False
        if name := named_in_path(path) or prompt.kept:
            if keeper := keeper_of(name, replicas):
                self._pick(said, prompt, began, keeper=keeper)
            else:
                self._end(gone(path, keeper_of(name, self._processor.replicas()) is not None))
            return True
        if len(replicas) > 1 and (what := listed(said.get(_METHOD, ""), path)):
            text = f"each of {len(replicas)} replicas stores its own {what}, and none can list all: keep the ids"
            self._end(answer(_PARTIAL_STATUS, {}, text))
            return True
        return False

    def closed(self) -> None:
        """The request has ended, or its client has gone."""
        if self._ticket:
            self._processor.leave(self._ticket)
        if self._found:
            self._processor.ended(self._pool, *self._found)
        if self._place:
            self._place.end()

    def _wait(self, said: dict[str, str], prompt: Prompt) -> None:
        def go(refusal: bytes | None) -> None:
            self._ticket = None
            if refusal:
                self._end(refusal)
            else:
                self._pick(said, prompt, time.perf_counter(), deadline)

        deadline = time.monotonic() + self._processor.max_hold_seconds
        place = self._processor.wait(self._pool, go)
        if isinstance(place, Ticket):
            self._ticket = place
            self._stream.send(wait(self._processor.max_hold_seconds + ENVOY_MARGIN_SECONDS))
        else:
            self._end(place)

    def _pick(
        self, said: dict[str, str], prompt: Prompt, began: float, deadline: float = 0.0, keeper: str | None = None
    ) -> None:
        """`deadline`: of its wait, which goes on where the replica has less room than it was thought to."""
        try:
            self._found = self._processor.pick(self._pool, said, prompt, began, keeper)
        except Exception:
            self._processor.metrics.errors.inc()
            logger.exception("a pick failed; Envoy chooses the replica")
            return self._stream.finish(INTERNAL)
        left = deadline - time.monotonic()
        retries = _RETRIES + int(_RETRIES_A_SECOND * left) if left > 0 else 0
        self._stream.send(go_on(",".join(self._found[1].order) if self._found else "", retries, self._head))

    def _end(self, message: bytes) -> None:
        self._stream.send(message)
        self._stream.finish()


def path_of(said: dict[str, str]) -> str:
    """The path without a slash at its end, which engines ignore."""
    return said.get(_PATH, "").rstrip("/")


def gone(path: str, is_elsewhere: bool) -> bytes:
    """The answer to a request that names a replica which is not there. `is_elsewhere`: another pool has it."""
    text = _ELSEWHERE if is_elsewhere else _GONE
    if named_in_path(path) or path.startswith("/v1/batches"):
        return answer(_GONE_STATUS, {}, text)
    return answer(_PREVIOUS_GONE_STATUS, {}, f"{text}; send the whole conversation as input")


def account_of(secret: str) -> str:
    """The account under which engines count a tenant's tokens."""
    return hashlib.sha256(secret.encode("latin-1", "replace")).hexdigest()[:16] if secret else ""
