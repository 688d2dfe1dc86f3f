"""The ``n`` samples of each request: the leader computes the prompt, the others share its KV-cache blocks."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from octavo.interface.messages import EngineCoreRequest


@dataclass(slots=True)
class SampleGroup:
    """The unfinished sequences of one request. ``waiting_samples`` are queued once ``leader``'s prompt is scheduled."""

    sequences: dict[str, Request]  # by req_id
    leader: Request
    waiting_samples: list[Request]


class SampleGroups:
    """The unfinished requests, by request id."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._groups: dict[str, SampleGroup] = {}
        self.forked: dict[str, Request] = {}  # queued samples that hold their prompt's blocks, by req_id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def add(self, core_request: EngineCoreRequest) -> SampleGroup:
        """A group of the request's ``n`` sequences; only its leader is to be queued."""
        leader, *samples = [Request(core_request, index) for index in range(core_request.sampling_params.n)]
        group = SampleGroup({request.req_id: request for request in (leader, *samples)}, leader, samples)
        self._groups[core_request.request_id] = group
        return group

    def is_queued(self, request: Request) -> bool:
        """False for a sample whose leader is still to compute the prompt."""
        return request not in self._groups[request.request_id].waiting_samples

    def unfinished(self, request_id: str) -> list[Request]:
        """The request's sequences, last first, so that ending them all appoints no leader. Empty for an unknown id."""
        group = self._groups.get(request_id)
        return list(reversed(group.sequences.values())) if group else []

    def siblings(self, request: Request) -> list[Request]:
        """`unfinished` of the sequence's own request: empty once that has ended, also if its id is in use again."""
        group = self._groups.get(request.request_id)
        own = group is not None and group.leader.core_request is request.core_request
        return self.unfinished(request.request_id) if own else []

    def remove(self, request: Request) -> Request | None:
        """Forget a finished sequence. Returns the new leader, to be queued, when the old one's samples still wait."""
        group = self._groups[request.request_id]
        self.forked.pop(request.req_id, None)
        del group.sequences[request.req_id]
        if not group.sequences:
            del self._groups[request.request_id]
        if request in group.waiting_samples:
            group.waiting_samples.remove(request)
        elif request is group.leader and group.waiting_samples:
            group.leader = group.waiting_samples.pop(0)
            return group.leader
        return None

    def fork(self, request: Request) -> list[Request]:
        """Let samples share the blocks once their leader's whole prompt is scheduled. Returns them, last first, for the
        front of the queue."""
        group = self._groups[request.request_id]
        if request is not group.leader or request.num_computed_tokens < request.num_prompt_tokens:
            return []
        samples, group.waiting_samples = group.waiting_samples[::-1], []
        for sample in samples:
            self._kv.fork(request, sample)
            self.forked[sample.req_id] = sample
        return samples

    def check_integrity(self, requests: set[str], queued: set[str]) -> None:
        """Raise AssertionError unless ``requests`` (req_ids) are these sequences and ``queued`` those that do not wait
        for a leader."""
        waiting = {request.req_id for group in self._groups.values() for request in group.waiting_samples}
        assert not waiting & queued, "a sequence is in two places"
        assert waiting | queued == requests, "a sequence is lost"
        assert {i for group in self._groups.values() for i in group.sequences} == requests, "groups lost a sequence"
