"""Groups of pods of other LLMDeployments that wait for places, from what is observed."""

from __future__ import annotations

from octavo_operator.groups.places import Held, Rivals, partly_placed_since
from octavo_operator.kube.store import Key, Store
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.workload import groups
from octavo_operator.render import names
from octavo_operator.render.workload import KIND


def rivals(store: Store, key: Key) -> Rivals:
    """Those of all LeaderWorkerSets but that of the LLMDeployment `key`. Read only where a group of it has waited for
    long: it looks at all groups."""
    since: list[float] = []
    given_up_at = 0.0
    for one in store.of_kind(KIND):
        if one.owner is None or one.owner == key:
            continue
        body = one.body
        if held := Held.read(body):
            given_up_at = max(given_up_at, 0.0 if held.is_over else held.at)
        children = store.children(one.owner)
        size = body["spec"]["leaderWorkerTemplate"]["size"]
        found = groups(pods_of(children), pods_of(children, names.WORKER))
        since += [begin for group in found if (begin := partly_placed_since(group, size)) is not None]
    return Rivals(tuple(since), given_up_at)
