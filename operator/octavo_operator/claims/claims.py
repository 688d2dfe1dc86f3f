"""Claims of operators on LLMDeployments: two releases may run, or several whose selectors overlap.

An operator claims it in `status.operator`, by the namespace and name of its Lease, before it writes anything else.
Other operators leave it alone while the claim is valid. A claim is void

- when that Lease is gone, or has not been renewed for a while by our own clock (uninstalled, renamed, moved)
- when by the Lease's annotations its operator does not serve such an object: other namespaces, another selector
- where we may not read that Lease (rights in some namespaces only): when the spec has changed and `observedGeneration`
  has not followed for a while
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import ApiError, KubeClient
from octavo_operator.kube.lease import NAMESPACES_ANNOTATION, SELECTOR_ANNOTATION
from octavo_operator.kube.store import Key

Json = dict[str, Any]

_LEASE_CACHE_SECONDS = 5.0
_RETRY_UNSUPPORTED_SECONDS = 60.0
_EXPIRY_FACTOR = 4  # durations without renewal until a Lease's claims are void: an operator's upgrade takes less


def claimant(body: Mapping[str, Any]) -> str | None:
    """The operator that has claimed an LLMDeployment, as namespace/name of its Lease."""
    operator = (body.get("status") or {}).get("operator")
    return operator if isinstance(operator, str) and operator else None


def serves(lease: Json, body: Mapping[str, Any]) -> bool:
    """True if the operator of `lease` would serve this LLMDeployment; true where the Lease has no annotations."""
    annotations = lease["metadata"].get("annotations") or {}
    namespaces = [one for one in annotations.get(NAMESPACES_ANNOTATION, "").split(",") if one]
    meta = body["metadata"]
    return (not namespaces or meta["namespace"] in namespaces) and selects(
        annotations.get(SELECTOR_ANNOTATION, ""), meta.get("labels") or {}
    )


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """True if a label selector, in the syntax of kubectl -l, matches these labels."""
    return all(_matches(part.strip(), labels) for part in re.split(r",(?![^(]*\))", selector) if part.strip())


def _matches(requirement: str, labels: Mapping[str, str]) -> bool:
    if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", requirement):
        values = {value.strip() for value in match[3].split(",")}
        return (labels.get(match[1]) in values) is (match[2] == "in")
    if match := re.fullmatch(r"([^\s!=]+)\s*(==|=|!=)\s*(\S*)", requirement):
        return (labels.get(match[1]) == match[3]) is (match[2] != "!=")
    if match := re.fullmatch(r"(!?)\s*([^\s!=]+)", requirement):
        return (match[2] in labels) is not bool(match[1])
    return True  # unknown syntax: assume that the other operator serves it


@dataclass
class _CachedLease:
    """A Lease as it was read last; None: there is none. `readable`: whether we have the right to read it."""

    lease: Json | None
    readable: bool
    read_at: float
    unchanged_since: float


class Claims:
    """`clock` counts seconds. `others`: LLMDeployments that other operators serve, and which operators."""

    def __init__(self, client: KubeClient, config: OperatorConfig, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self.ours = config.operator_id
        self.others: dict[Key, str] = {}
        self._supported_from = float("-inf")
        self._patience = _EXPIRY_FACTOR * config.lease_seconds
        self._leases: dict[str, _CachedLease] = {}
        self._unobserved: dict[Key, tuple[int, float]] = {}  # generation that was not observed, and since when

    @property
    def are_supported(self) -> bool:
        """False for a while after `mark_unsupported`: the CRD may be upgraded."""
        return self._clock() >= self._supported_from

    def mark_unsupported(self) -> None:
        """The cluster's CRD is of a version without `status.operator`."""
        self._supported_from = self._clock() + _RETRY_UNSUPPORTED_SECONDS

    async def is_valid(self, operator: str, body: Mapping[str, Any]) -> bool:
        """True if the claim of another operator on an LLMDeployment is valid. Raises TRANSPORT_ERRORS and ApiError."""
        known = await self._read(operator)
        if not known.readable:
            return not self._is_neglected(body)
        if known.lease is None or not serves(known.lease, body):
            return False
        patience: float = max(
            self._patience, _EXPIRY_FACTOR * (known.lease.get("spec") or {}).get("leaseDurationSeconds", 0)
        )
        return self._clock() - known.unchanged_since <= patience

    def forget(self, key: Key) -> None:
        """The LLMDeployment is gone, or ours."""
        self.others.pop(key, None)
        self._unobserved.pop(key, None)

    async def _read(self, operator: str) -> _CachedLease:
        now, before = self._clock(), self._leases.get(operator)
        if before and now - before.read_at < _LEASE_CACHE_SECONDS:
            return before
        namespace, _, lease_name = operator.partition("/")
        try:
            lease = await self._client.get("Lease", namespace, lease_name) if lease_name else None
            read = _CachedLease(lease, True, now, now)
        except ApiError as error:
            if error.status != 403:
                raise
            read = _CachedLease(None, False, now, now)
        if before and before.lease and read.lease and _version(before.lease) == _version(read.lease):
            read.unchanged_since = before.unchanged_since
        self._leases[operator] = read
        return read

    def _is_neglected(self, body: Mapping[str, Any]) -> bool:
        meta, now = body["metadata"], self._clock()
        key, generation = (meta["namespace"], meta["name"]), meta.get("generation", 1)
        if (body.get("status") or {}).get("observedGeneration") == generation:
            self._unobserved.pop(key, None)
            return False
        known = self._unobserved.get(key)
        if known is None or known[0] != generation:
            known = self._unobserved[key] = (generation, now)
        return now - known[1] > self._patience


def _version(lease: Json) -> str:
    return str(lease["metadata"]["resourceVersion"])
