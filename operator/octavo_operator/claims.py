"""Which operator serves an LLMDeployment, where several could: two releases, or several whose selectors overlap.

Whoever serves it says so in `status.operator`, by the namespace and name of its Lease, before it writes anything else.
Another operator leaves it alone as long as that claim holds. A claim is void

- when that Lease is gone, or nobody has renewed it for a while by our own clock (uninstalled, renamed, moved)
- when the Lease says that its operator does not serve such an object: other namespaces, another selector
- where we may not read that Lease (rights in some namespaces only): when the spec has changed and its operator has
  taken no notice for a while
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import GROUP
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import ApiError, Cluster
from octavo_operator.kube.store import Key

Json = dict[str, Any]

# Annotations of a Lease: what its operator serves.
NAMESPACES, SELECTOR = f"{GROUP}/watch-namespaces", f"{GROUP}/selector"
_READ_AGAIN_SECONDS = 5.0
_TRY_KIND_SECONDS = 60.0
_LEASES = 4  # of its durations that a Lease may be without its holder: an operator's upgrade takes less


def claimant(body: Mapping[str, Any]) -> str | None:
    """Which operator an LLMDeployment is served by, as namespace/name of its Lease."""
    operator = (body.get("status") or {}).get("operator")
    return operator if isinstance(operator, str) and operator else None


def scope(config: OperatorConfig) -> dict[str, str]:
    """Annotations of our own Lease."""
    return {NAMESPACES: ",".join(config.watch_namespaces), SELECTOR: config.selector}


def serves(lease: Json, body: Mapping[str, Any]) -> bool:
    """Whether the operator of `lease` would serve such an LLMDeployment; yes, where the Lease does not say."""
    said = lease["metadata"].get("annotations") or {}
    namespaces = [one for one in said.get(NAMESPACES, "").split(",") if one]
    meta = body["metadata"]
    return (not namespaces or meta["namespace"] in namespaces) and selects(
        said.get(SELECTOR, ""), meta.get("labels") or {}
    )


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a label selector, as kubectl's -l takes it, finds such labels."""
    return all(_meets(part.strip(), labels) for part in re.split(r",(?![^(]*\))", selector) if part.strip())


def _meets(requirement: str, labels: Mapping[str, str]) -> bool:
    if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", requirement):
        values = {value.strip() for value in match[3].split(",")}
        return (labels.get(match[1]) in values) is (match[2] == "in")
    if match := re.fullmatch(r"([^\s!=]+)\s*(==|=|!=)\s*(\S*)", requirement):
        return (labels.get(match[1]) == match[3]) is (match[2] != "!=")
    if match := re.fullmatch(r"(!?)\s*([^\s!=]+)", requirement):
        return (match[2] in labels) is not bool(match[1])
    return True  # not understood: rather too much care than too little


@dataclass
class _Read:
    """A Lease as it was read last. `lease`: None: there is none; `readable`: whether we may know."""

    lease: Json | None
    readable: bool
    read_at: float
    unchanged_since: float


class Claims:
    """`clock` counts seconds. `others` are the LLMDeployments that other operators serve, and which."""

    def __init__(self, cluster: Cluster, config: OperatorConfig, clock: Callable[[], float]) -> None:
        self._cluster, self._clock = cluster, clock
        self.ours = config.operator_id
        self.others: dict[Key, str] = {}
        self._kept_from = float("-inf")  # when the cluster's LLMDeployments may have a field for that
        self._patience = _LEASES * config.lease_seconds
        self._leases: dict[str, _Read] = {}
        self._unnoticed: dict[Key, tuple[int, float]] = {}  # generation that nobody has taken notice of, since when

    @property
    def are_kept(self) -> bool:
        """False: the cluster's LLMDeployments have no field for that. It is tried again: the kind may be upgraded."""
        return self._clock() >= self._kept_from

    def are_not_kept(self) -> None:
        self._kept_from = self._clock() + _TRY_KIND_SECONDS

    async def holds(self, name: str, body: Mapping[str, Any]) -> bool:
        """Whether the claim of another operator on an LLMDeployment is good. Raises TRANSPORT_ERRORS and ApiError."""
        known = await self._read(name)
        if not known.readable:
            return not self._is_neglected(body)
        if known.lease is None or not serves(known.lease, body):
            return False
        patience = max(self._patience, _LEASES * (known.lease.get("spec") or {}).get("leaseDurationSeconds", 0))
        return self._clock() - known.unchanged_since <= patience

    def forget(self, key: Key) -> None:
        self.others.pop(key, None)
        self._unnoticed.pop(key, None)

    async def _read(self, name: str) -> _Read:
        now, before = self._clock(), self._leases.get(name)
        if before and now - before.read_at < _READ_AGAIN_SECONDS:
            return before
        namespace, _, lease_name = name.partition("/")
        try:
            lease = await self._cluster.get("Lease", namespace, lease_name) if lease_name else None
            read = _Read(lease, True, now, now)
        except ApiError as error:
            if error.status != 403:
                raise
            read = _Read(None, False, now, now)
        if before and before.lease and read.lease and _version(before.lease) == _version(read.lease):
            read.unchanged_since = before.unchanged_since
        self._leases[name] = read
        return read

    def _is_neglected(self, body: Mapping[str, Any]) -> bool:
        meta, now = body["metadata"], self._clock()
        key, generation = (meta["namespace"], meta["name"]), meta.get("generation", 1)
        if (body.get("status") or {}).get("observedGeneration") == generation:
            self._unnoticed.pop(key, None)
            return False
        known = self._unnoticed.get(key)
        if known is None or known[0] != generation:
            known = self._unnoticed[key] = (generation, now)
        return now - known[1] > self._patience


def _version(lease: Json) -> str:
    return str(lease["metadata"]["resourceVersion"])
