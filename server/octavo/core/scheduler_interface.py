"""The interface of a scheduler, as the engine core uses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from octavo.core.lora import AdapterSlots
from octavo.core.request import Request, RequestStatus
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats
from octavo.interface.step import ModelRunnerOutput, SchedulerOutput


class PrefixCache(Protocol):
    """The KV cache, as others than the scheduler see it."""

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while sequences hold blocks."""

    def share_block_map(self, cells: memoryview) -> None:
        """Keep a byte for each block in ``cells``, see `octavo.interface.block_map`, from now on."""


class SchedulerInterface(Protocol):
    """Chooses the sequences of each step and takes in its results."""

    held: set[str]  # running sequences whose grammar mask is not ready: not scheduled
    adapters: AdapterSlots  # of LoRA; an engine without has no slots

    running: dict[str, Request]  # sequences that have a row, by req_id

    @property
    def num_waiting(self) -> int:
        """The number of sequences that do not run."""

    @property
    def kv(self) -> PrefixCache:
        """The KV cache."""

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError when it could never run or its id is taken."""

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """End whole requests from outside (abort, error). Unknown ids are ignored."""

    def finish_adapter(self, adapter: Adapter, error: str) -> list[EngineCoreOutput]:
        """End all requests of an adapter that cannot be used."""

    def finish_sample(self, request_id: str, index: int, status: RequestStatus) -> None:
        """End one of the samples of a request. Unknown ones are ignored."""

    def has_request(self, request_id: str) -> bool:
        """True if a request of that id is unfinished."""

    def has_unfinished_requests(self) -> bool:
        """True if anything waits or runs."""

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The ids of the blocks that each unfinished sample of a request holds."""

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Make the next step; ``now`` in seconds. An empty step needs no update."""

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the results of the oldest step in flight."""

    def make_stats(self) -> SchedulerStats:
        """Read gauges now, and counters since the last call."""

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other."""
