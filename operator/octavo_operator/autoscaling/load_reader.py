"""Asks the pods how loaded they are: all at once, each within bounds, and no more often than is of use.

What a pod does wrong stays its own: a page that never ends, one of nonsense, or silence costs its deadline and makes
the decision careful (decision.py), no more. One reading serves everybody who asks at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from octavo_operator.api import KIND, LLMDeployment, SpecError
from octavo_operator.autoscaling.decision import Decision, decide, estimate, learn, noted
from octavo_operator.autoscaling.metrics_page import MAX_BYTES, BadPage, Load, parse
from octavo_operator.claims import claimant
from octavo_operator.diagnosis import Problem, diagnose, is_over
from octavo_operator.kube.store import Key, Store
from octavo_operator.render import names

logger = logging.getLogger("octavo.operator.autoscaling")

Json = dict[str, Any]

DEADLINE_SECONDS = 2.0  # of one pod
FRESH_SECONDS = 1.0  # how long a reading serves whoever asks next
SECOND_LOOK_SECONDS = 0.25  # a queue that is gone by then was none
PATIENCE_SECONDS = 5.0  # a pod that fails for longer is worth a condition
IDLE_READING_SECONDS = 20.0  # how often we look when no autoscaler asks, so that conditions stay true
AT_ONCE = 100  # pods asked at the same time


class NoReading(Exception):
    """Nothing can be said about the load. `problem` says why, for people."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True)
class Place:
    """Where a pod's metrics are, and what is known of it without asking."""

    uid: str
    name: str
    url: str | None  # None: it has no address yet
    ready: bool


@dataclass
class _Memory:
    """What is kept about one LLMDeployment from reading to reading."""

    capacity: float | None = None
    failing_since: dict[str, float] = field(default_factory=dict)  # uids of pods
    read_at: float = -1e9
    decision: Decision | None = None
    problem: Problem | None = None
    running: asyncio.Task[Decision] | None = None


class Reader:
    """`changed` is called with a key whose `problem` has come, changed or gone, whose `capacity` is worth noting, or
    whose load has come to need more than the maximum of replicas, or no longer does."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[Key], None],
        clock: Callable[[], float] = time.monotonic,
        operator: str | None = None,
    ) -> None:
        """`operator`: our name in claims; what another one serves is not scaled by us. None: all is ours."""
        self._store, self._changed, self._clock, self._operator = store, changed, clock, operator
        self._memory: dict[Key, _Memory] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._parsed: dict[Key, tuple[str, LLMDeployment | None]] = {}  # with the version that was parsed
        self._session: aiohttp.ClientSession | None = None

    def deployment(self, key: Key) -> LLMDeployment | None:
        """The LLMDeployment if it is to be scaled."""
        seen = self._store.get(KIND, *key)
        if seen is None or b'"autoscaling"' not in seen.text:
            self._parsed.pop(key, None)
            return None
        known = self._parsed.get(key)
        if known is None or known[0] != seen.resource_version:
            known = self._parsed[key] = (seen.resource_version, _scaled(seen.body, self._operator))
        return known[1]

    def scaled(self) -> list[LLMDeployment]:
        """All LLMDeployments that are to be scaled."""
        return [deployment for key in self._store.deployments() if (deployment := self.deployment(key))]

    def problem(self, key: Key) -> Problem | None:
        """What the last reading met."""
        memory = self._memory.get(key)
        return memory.problem if memory else None

    def capacity(self, key: Key) -> float | None:
        """How many requests a replica holds at once, as far as that has been learnt."""
        memory = self._memory.get(key)
        return memory.capacity if memory else None

    def needed(self, key: Key) -> int | None:
        """How many replicas the load of the last reading needs; None: it is not known."""
        memory = self._memory.get(key)
        return memory.decision.needed if memory and memory.decision else None

    def decisions(self) -> dict[Key, Decision]:
        """The last ones, for the metrics."""
        return {key: memory.decision for key, memory in list(self._memory.items()) if memory.decision}

    async def read(self, key: Key) -> Decision:
        """The decision by a reading that is at most a second old. Raises NoReading."""
        memory = self._memory.setdefault(key, _Memory())
        if memory.running is None:
            if memory.decision and self._clock() - memory.read_at < FRESH_SECONDS:
                return memory.decision
            memory.running = asyncio.create_task(self._read(key, memory))
            memory.running.add_done_callback(lambda task: self._finished(memory, task))
        return await asyncio.shield(memory.running)

    async def keep_reading(self, leading: asyncio.Event) -> None:
        """Looks at what nobody has asked for lately."""
        while True:
            await leading.wait()
            keys = [(one.namespace, one.name) for one in self.scaled()]
            for gone in self._memory.keys() - set(keys):
                if self._memory[gone].running is None:
                    del self._memory[gone]
                    self._parsed.pop(gone, None)
            now = self._clock()
            due = [key for key in keys if now - self._memory.get(key, _Memory()).read_at > IDLE_READING_SECONDS]
            await asyncio.gather(*(self.read(key) for key in due), return_exceptions=True)
            await asyncio.sleep(1)

    async def close(self) -> None:
        for memory in self._memory.values():
            if memory.running:
                memory.running.cancel()
        if self._session:
            await self._session.close()

    def _finished(self, memory: _Memory, task: asyncio.Task[Decision]) -> None:
        memory.running = None
        if not task.cancelled():
            task.exception()  # whoever asked has been told; nobody may have

    async def _read(self, key: Key, memory: _Memory) -> Decision:
        before, deployment = (memory.problem, self._exceeds(key)), self.deployment(key)
        said = deployment.status.get("replicaCapacity") if deployment else None
        try:
            if deployment is None:
                raise NoReading(Problem("NotFound", f"there is no {KIND} {key[1]} with spec.autoscaling"))
            if memory.capacity is None:
                memory.capacity = said  # by an operator before this one
            decision, loads = await self._look(deployment, memory)
            if decision.needed > deployment.replicas:
                # Requests that have just arrived wait for one step of the engine; that is no reason to add a replica.
                await asyncio.sleep(SECOND_LOOK_SECONDS)
                again, loads_again = await self._look(deployment, memory)
                if again.needed <= decision.needed:
                    decision, loads = again, loads_again
            memory.capacity = learn(memory.capacity, loads)
            memory.decision, memory.read_at = decision, self._clock()
            return decision
        except NoReading:
            memory.decision, memory.read_at = None, self._clock()
            raise
        finally:
            if (memory.problem, self._exceeds(key)) != before or noted(said, memory.capacity) != said:
                self._changed(key)

    def _exceeds(self, key: Key) -> bool:
        """Whether the load needs more replicas than there may be."""
        deployment, needed = self.deployment(key), self.needed(key)
        limits = deployment.spec.autoscaling if deployment else None
        return limits is not None and needed is not None and needed > limits.max_replicas

    async def _look(self, deployment: LLMDeployment, memory: _Memory) -> tuple[Decision, list[Load]]:
        autoscaling = deployment.spec.autoscaling
        assert autoscaling is not None
        children = self._store.children((deployment.namespace, deployment.name))
        pods = [one.body for one in children if one.kind == "Pod"]
        live = next((one.body for one in children if one.kind == "Deployment"), None)
        asked, sure = places(deployment, pods, live)
        answers = await asyncio.gather(*(self._ask(place) for place in asked))
        loads = [answer for answer in answers if isinstance(answer, Load)]
        failed = [
            (place, str(answer)) for place, answer in zip(asked, answers, strict=True) if isinstance(answer, Exception)
        ]
        memory.problem = self._judge(memory, failed, len(asked))
        if failed and not loads and all(place.ready for place, _ in failed):
            raise NoReading(memory.problem or _unreadable(failed, len(asked)))
        one = learn(memory.capacity, loads) or estimate(loads, deployment.spec.engine.max_num_seqs)
        target = autoscaling.queue_depth.target_per_replica
        unsure = not sure or bool(failed) or not loads or deployment.spec.suspend
        return decide(deployment.scaled_replicas, target, loads, one, unsure=unsure), loads

    def _judge(self, memory: _Memory, failed: list[tuple[Place, str]], count: int) -> Problem | None:
        """A pod that is loading may well be silent, and one that is ready may be for a moment."""
        now = self._clock()
        serving = [(place, why) for place, why in failed if place.ready]
        memory.failing_since = {place.uid: memory.failing_since.get(place.uid, now) for place, _ in serving}
        lasting = [one for one in serving if now - memory.failing_since[one[0].uid] >= PATIENCE_SECONDS]
        return _unreadable(lasting, count) if lasting else None

    async def _ask(self, place: Place) -> Load | Exception:
        if place.url is None:
            return BadPage("it has no address yet")
        async with self._slots:
            try:
                return parse(await self._fetch(place.url))
            except BadPage as error:
                return error
            except TimeoutError:
                return BadPage(f"no answer within {DEADLINE_SECONDS:g} s")
            except aiohttp.ClientConnectorError as error:
                return BadPage(f"{place.url} cannot be reached: {error.os_error.strerror or error.os_error}")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                return BadPage(str(error) or type(error).__name__)

    async def _fetch(self, url: str) -> bytes:
        if self._session is None:
            # Connections are not kept: an address may soon be another pod's.
            connector = aiohttp.TCPConnector(limit=AT_ONCE, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers={"User-Agent": "octavo-operator"})
        limits = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        async with self._session.get(url, timeout=limits, allow_redirects=False) as response:
            if response.status != 200:
                raise BadPage(f"it answers {response.status}")
            out = bytearray()
            async for chunk in response.content.iter_any():
                out += chunk
                if len(out) > MAX_BYTES:
                    raise BadPage(f"its page is larger than {MAX_BYTES // 2**20} MiB")
            return bytes(out)


def places(deployment: LLMDeployment, pods: list[Json], live: Json | None) -> tuple[list[Place], bool]:
    """Which pods are to be asked, and whether their answers are the whole demand. Pure.

    Pods that are going finish what they have, and are no demand on those that stay. Pods that cannot run (no node, no
    image, a crash) hold no request. All others might.
    """
    out, sure, staying = [], True, 0
    gpu = deployment.spec.accelerator.resource if deployment.spec.accelerator else None
    for pod in pods:
        status = pod.get("status") or {}
        if "deletionTimestamp" in pod["metadata"] or is_over(pod):
            continue
        staying += 1
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])
        if not ready and diagnose(pod, gpu) is not None:
            continue
        if not ready:
            sure = False
        address = status.get("podIP")
        host = f"[{address}]" if address and ":" in address else address
        url = f"http://{host}:{_management_port(pod)}/metrics" if host else None
        out.append(Place(pod["metadata"]["uid"], pod["metadata"]["name"], url, ready))
    conditions = ((live or {}).get("status") or {}).get("conditions") or []
    refused = any(c["type"] == "ReplicaFailure" and c["status"] == "True" for c in conditions)
    if staying < deployment.replicas and not refused:
        sure = False  # a pod is missing, and nobody knows yet where its requests are now
    return out, sure


def _scaled(body: Json, operator: str | None) -> LLMDeployment | None:
    if operator and claimant(body) not in (None, operator):
        return None
    try:
        deployment = LLMDeployment.from_json(body)
    except SpecError:
        return None
    return deployment if deployment.spec.autoscaling and not deployment.deleting else None


def _management_port(pod: Json) -> int:
    for container in pod["spec"].get("containers") or []:
        for port in container.get("ports") or []:
            if port.get("name") == "management":
                return int(port["containerPort"])
    return names.MANAGEMENT_PORT


def _unreadable(failed: list[tuple[Place, str]], count: int) -> Problem:
    place, why = failed[0]
    return Problem(
        "PodsUnreadable",
        f"{len(failed)} of {count} pods do not tell how loaded they are, so no replica is taken away; {place.name}: "
        f"{why}. See its logs, and whether a NetworkPolicy keeps the operator from the management port",
    )
