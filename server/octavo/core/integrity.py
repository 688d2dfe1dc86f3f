"""Check the consistency of a scheduler's books."""

from __future__ import annotations

from collections.abc import Mapping, Set

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request, RequestStatus
from octavo.core.sample_groups import SampleGroups


def check_integrity(
    kv: KVCacheManager,
    groups: SampleGroups,
    requests: Mapping[str, Request],
    running: Mapping[str, Request],
    waiting: Set[str],
    prefilling: Set[str],
    most_drafts: int,
) -> None:
    """See `octavo.core.scheduler.Scheduler.check_integrity`: its queues, by req_id. ``most_drafts``: of a sequence."""
    kv.check_integrity()
    assert not waiting & running.keys(), "a sequence both waits and runs"
    groups.check_integrity(set(requests), waiting | running.keys())
    assert prefilling <= running.keys() and groups.forked.keys() <= waiting
    for request in requests.values():
        holds = kv.num_blocks_of(request)
        if request.req_id in running:
            assert request.status == RequestStatus.RUNNING
            assert kv.num_slots_of(request) >= request.num_computed_tokens, f"{request} writes beyond its blocks"
            assert holds <= kv.most_blocks(kv.num_slots_of(request)), f"{request} keeps too many blocks"
            assert request.num_confirmed_tokens <= request.num_computed_tokens
            num_pending = request.num_computed_tokens - request.num_state_tokens
            assert not kv.state_blocks or 0 <= num_pending <= 1 + most_drafts
        else:
            assert bool(holds) == (request.req_id in groups.forked), f"{request} waits and holds {holds} blocks"
    free = kv.pool.num_free_blocks + len(kv.pinned_ids)
    free += kv.states.num_pinned_blocks() if kv.states is not None else 0
    assert requests or free == kv.pool.num_usable_blocks, "blocks leaked"
