"""The LLMDeployments of this operator that have an optional field, each parsed once while it does not change."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import KIND, LLMDeployment, SpecError
from octavo_operator.claims.claims import claimant
from octavo_operator.kube.store import Key, Store


class OwnDeployments:
    """The matching LLMDeployments in `store`, as they are when asked."""

    def __init__(self, store: Store, field: str, operator: str | None) -> None:
        """`field`: of their spec; `operator`: our name in claims, None: there are no others."""
        self._store, self._field, self._operator = store, field, operator
        self._parsed: dict[Key, tuple[str, LLMDeployment | None]] = {}  # with the resourceVersion

    def get(self, key: Key) -> LLMDeployment | None:
        """None: it is not there, being deleted, another operator's, refused, or without the field."""
        seen = self._store.get(KIND, *key)
        if seen is None or f'"{self._field}"'.encode() not in seen.text:
            self._parsed.pop(key, None)
            return None
        known = self._parsed.get(key)
        if known is None or known[0] != seen.resource_version:
            known = self._parsed[key] = (seen.resource_version, self._parse(seen.body))
        return known[1]

    def all(self) -> dict[Key, LLMDeployment]:
        """All that are there; those that have gone are forgotten."""
        keys = list(self._store.deployments())
        for gone in self._parsed.keys() - set(keys):
            del self._parsed[gone]
        return {key: one for key in keys if (one := self.get(key))}

    def _parse(self, body: dict[str, Any]) -> LLMDeployment | None:
        if self._operator and claimant(body) not in (None, self._operator):
            return None
        try:
            deployment = LLMDeployment.from_json(body)
        except SpecError:
            return None
        return deployment if getattr(deployment.spec, self._field) is not None and not deployment.deleting else None
