"""Groups of pods of other LLMDeployments that wait for places, from what is observed."""

from __future__ import annotations

from octavo_operator.groups.scheduling import HeldGroups, OtherGroups, partly_placed_since
from octavo_operator.kube.store import Key, Store
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.workload import groups
from octavo_operator.render import names
from octavo_operator.render.workload import KIND


def read_other_groups(store: Store, key: Key) -> OtherGroups:
    """Read the groups of all LLMDeployments but `key`. This looks at all groups, so it is done only if a group of `key`
    has waited for long."""
    since: list[float] = []
    given_up_at = 0.0
    for one in store.of_kind(KIND):
        if one.owner is None or one.owner == key:
            continue
        body = one.body
        if held := HeldGroups.read(body):
            given_up_at = max(given_up_at, 0.0 if held.is_over else held.at)
        children = store.children(one.owner)
        size = body["spec"]["leaderWorkerTemplate"]["size"]
        found = groups(pods_of(children), pods_of(children, names.WORKER))
        since += [begin for group in found if (begin := partly_placed_since(group, size)) is not None]
    return OtherGroups(tuple(since), given_up_at)
