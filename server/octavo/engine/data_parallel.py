"""Several cores behind one server, each with the whole model: who gets a request, and their results as one."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from octavo.engine.core_client import CoreClient, CoreReady
from octavo.engine.core_launcher import CoreProcesses
from octavo.errors import OctavoError
from octavo.interface.lora import Adapter, AdapterAnswer
from octavo.interface.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from octavo.system.heartbeat import Heartbeat

_PREFIX_TOKENS = 64  # by whose hash equally loaded cores are told apart: one prompt's beginning goes to one of them


@dataclass
class _Unfinished:
    core: int
    tokens: int  # of the prompt, and generated so far
    samples: set[int]  # that are not finished


class Loads:
    """The number of tokens that each core has in unfinished requests."""

    def __init__(self, num_cores: int) -> None:
        self.tokens = [0] * num_cores
        self._requests: dict[str, _Unfinished] = {}

    def add(self, request: EngineCoreRequest) -> int:
        """Give a request to the core with the fewest tokens; returns its number. Among several, the prompt's beginning
        and ``cache_salt`` decide."""
        least = min(self.tokens)
        ties = [core for core, tokens in enumerate(self.tokens) if tokens == least]
        core = ties[0] if len(ties) == 1 else max(ties, key=partial(_rank_of, request))
        size = len(request.prompt_token_ids)
        self.tokens[core] += size
        self._requests[request.request_id] = _Unfinished(core, size, set(range(request.sampling_params.n)))
        return core

    def core_of(self, request_id: str) -> int | None:
        """The core that has this unfinished request; None if no core has."""
        known = self._requests.get(request_id)
        return None if known is None else known.core

    def observe(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Count new tokens, and forget what has finished."""
        for output in outputs:
            known = self._requests.get(output.request_id)
            if known is not None:
                known.tokens += len(output.new_token_ids)
                self.tokens[known.core] += len(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finish_sample(output.request_id, output.index)

    def finish_sample(self, request_id: str, index: int) -> None:
        """A sample of a request has ended, or all of them (-1), as both the core and the front end may say of one;
        unknown requests are ignored."""
        known = self._requests.get(request_id)
        if known is not None:
            known.samples = known.samples - {index} if index >= 0 else set()
            if not known.samples:
                del self._requests[request_id]
                self.tokens[known.core] -= known.tokens


def _rank_of(request: EngineCoreRequest, core: int) -> bytes:
    """Rendezvous hashing."""
    prefix = array("q", request.prompt_token_ids[:_PREFIX_TOKENS]).tobytes()
    return hashlib.blake2b(prefix + f"{core} {request.cache_salt}".encode(), digest_size=8).digest()


class CoreClients:
    """A `CoreClient` for several cores. ``on_exit`` is called once, when the first of them has ended."""

    def __init__(
        self, processes: CoreProcesses, on_outputs: Callable[[EngineCoreOutputs], None], on_exit: Callable[[int], None]
    ) -> None:
        self.process = processes
        self._clients = [
            CoreClient(process, partial(self._take, core), self._exited) for core, process in enumerate(processes.all)
        ]
        self.heartbeat = _Heartbeats([client.heartbeat for client in self._clients], self)
        self.loads = Loads(len(self._clients))
        self._on_outputs, self._on_exit = on_outputs, on_exit
        self._stats = [SchedulerStats() for _ in self._clients]  # the last of each
        self._has_ended = False

    async def wait_ready(self) -> CoreReady:
        """See `CoreClient`; the smallest max_model_len counts."""
        ready = await asyncio.gather(*(client.wait_ready() for client in self._clients))
        shortest = min(ready, key=lambda one: one.engine_config.scheduler.max_model_len)
        shares = {name: sum(one.memory_shares.get(name, 0) for one in ready) for name in shortest.memory_shares}
        weights = {name: sum(one.weight_bytes.get(name, 0) for one in ready) for name in shortest.weight_bytes}
        blocks = sum(one.num_blocks - 1 for one in ready) + 1
        return replace(shortest, num_blocks=blocks, memory_shares=shares, weight_bytes=weights)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core that has least to do."""
        self._clients[self.loads.add(request)].add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """See `CoreClient`."""
        for core, client in enumerate(self._clients):
            if own := [request_id for request_id in request_ids if self.loads.core_of(request_id) == core]:
                client.abort_requests(own)
        for request_id in request_ids:
            self.loads.finish_sample(request_id, -1)

    def finish_samples(self, samples: list[tuple[str, int]]) -> None:
        """See `CoreClient`."""
        for core, client in enumerate(self._clients):
            if own := [sample for sample in samples if self.loads.core_of(sample[0]) == core]:
                client.finish_samples(own)
        for request_id, index in samples:
            self.loads.finish_sample(request_id, index)

    def frozen_requests(self, request_ids: Iterable[str], seconds: float) -> list[str]:
        """The requests whose core has sent no heartbeat for that many seconds; all, if cores run in lock step."""
        frozen = {core for core, client in enumerate(self._clients) if client.heartbeat.seconds_since_beat() > seconds}
        if self.process.linked and frozen:
            return list(request_ids)
        return [request_id for request_id in request_ids if self.loads.core_of(request_id) in frozen]

    def fail_questions(self, error: OctavoError) -> None:
        """See `CoreClient`."""
        for client in self._clients:
            client.fail_questions(error)

    def read_block_map(self) -> bytes:
        """The cores' maps, one after the other."""
        return b"".join(client.read_block_map() for client in self._clients)

    async def block_ids(self, request_id: str) -> list[list[int]]:
        """See `CoreClient`; numbered as in `read_block_map`."""
        core = self.loads.core_of(request_id)
        if core is None:
            return []
        before = sum(len(client.read_block_map()) for client in self._clients[:core])
        return [[block + before for block in blocks] for blocks in await self._clients[core].block_ids(request_id)]

    async def load_adapter(self, adapter: Adapter) -> AdapterAnswer:
        """See `CoreClient`: by all of them."""
        answers = await asyncio.gather(*(client.load_adapter(adapter) for client in self._clients))
        return next((answer for answer in answers if answer.error is not None), answers[0])

    def _take(self, core: int, outputs: EngineCoreOutputs) -> None:
        self.loads.observe(outputs.outputs)
        if outputs.stats is not None:
            self._stats[core] = outputs.stats
            outputs.stats = replace(
                outputs.stats,
                num_running_reqs=sum(stats.num_running_reqs for stats in self._stats),
                num_waiting_reqs=sum(stats.num_waiting_reqs for stats in self._stats),
                kv_cache_usage=sum(stats.kv_cache_usage for stats in self._stats) / len(self._stats),
                retained_blocks=sum(stats.retained_blocks for stats in self._stats),
                running_adapters=_names([stats.running_adapters for stats in self._stats]),
                waiting_adapters=_names([stats.waiting_adapters for stats in self._stats]),
            )
        self._on_outputs(outputs)

    def _exited(self, code: int) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_exit(code)

    def close(self, grace: float = 5.0) -> None:
        """End all cores."""
        for client in self._clients:
            client.close(grace)


def _names(of_cores: list[list[str] | None]) -> list[str] | None:
    """Each once; None where there are no adapters."""
    known = [names for names in of_cores if names is not None]
    return [*dict.fromkeys(name for names in known for name in names)] if known else None


class _Heartbeats:
    """A `Heartbeat` for several cores: the worst of them."""

    def __init__(self, all_beats: list[Heartbeat], clients: CoreClients) -> None:
        self._all, self._clients = all_beats, clients

    @property
    def num_steps(self) -> int:
        """Steps that all have finished."""
        return sum(beat.num_steps for beat in self._all)

    def seconds_since_beat(self) -> float:
        """Seconds of the core that has been silent longest."""
        return max(beat.seconds_since_beat() for beat in self._all)

    def seconds_since_progress(self) -> float:
        """Seconds of the busy core that has made no progress for longest."""
        busy = [beat for beat, tokens in zip(self._all, self._clients.loads.tokens, strict=True) if tokens]
        return max((beat.seconds_since_progress() for beat in busy), default=0.0)

    def read_device_memory(self) -> tuple[int, int]:
        """Bytes in use by all, and in total."""
        read = [beat.read_device_memory() for beat in self._all]
        return sum(used for used, _ in read), max(total for _, total in read)
