"""Asks routers whether Envoy has rejected an update of their files: their pickers tell, with Envoy's words."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from octavo_operator.autoscaling.zero import picker_addresses
from octavo_operator.deployment.routing import CONFIG_REJECTED
from octavo_operator.kube.pod_client import PodClient, PodUnreadableError
from octavo_operator.kube.store import Key, Store
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.diagnosis import Problem
from octavo_operator.render import names

Json = dict[str, Any]
Rejected = Mapping[str, str]  # when and why, by kind

logger = logging.getLogger("octavo.operator.routers")

PERIOD_SECONDS = 3.0
TIMEOUT_SECONDS = 2.0
_KINDS = ("clusters", "listeners")
_MAX_WORDS = 600
_MAX_BYTES = 1 << 16


def parse_rejected(answer: Any) -> Rejected:
    """Parse a picker's answer. Raises ValueError."""
    try:
        return {kind: _sentence(answer[kind]) for kind in _KINDS if kind in answer}
    except (KeyError, TypeError, OverflowError, OSError) as error:
        raise ValueError(f"the list of rejected updates is invalid: {error!r}") from None


def _sentence(one: Json) -> str:
    at = datetime.fromtimestamp(int(one["at"]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    words = "".join(letter if letter.isprintable() else " " for letter in str(one["words"])[:_MAX_WORDS])
    return f"at {at}: {words}"


def rejection_problem(reports: Mapping[str, Rejected]) -> Problem | None:
    """The problem of routers that reported a rejection, by uid; None: Envoy follows its files in all of them."""
    found = [one for _, one in sorted(reports.items()) if one]
    if not found:
        return None
    what = "; ".join(f"of {kind} {text}" for kind, text in found[0].items())
    count = f"{len(found)} of {len(reports)} routers keep their previous configuration"
    return Problem(
        CONFIG_REJECTED,
        f"{count}: Envoy rejected the last update {what}. The chart's router.image must be of the operator's release",
    )


class RejectionReader:
    """`changed` is called with the key of an LLMDeployment or an LLMGateway whose routers say something new."""

    def __init__(
        self, store: Store, changed: Callable[[Key], None], is_ours: Callable[[Key], bool] = lambda _: True
    ) -> None:
        """`is_ours`: whether no other operator serves it."""
        self._store, self._changed, self._is_ours = store, changed, is_ours
        self._reports: dict[Key, dict[str, Rejected]] = {}  # by the routers' uids
        self._addresses: dict[Key, tuple[tuple[tuple[str, str], ...], dict[str, str]]] = {}
        self._client = PodClient(TIMEOUT_SECONDS, _MAX_BYTES)

    def problem(self, key: Key) -> Problem | None:
        """Return the problem that the routers of an LLMDeployment or an LLMGateway reported last."""
        return rejection_problem(self._reports.get(key, {}))

    async def run(self, leading: asyncio.Event) -> None:
        """Run until cancelled."""
        while True:
            await leading.wait()
            await self.read()
            await asyncio.sleep(PERIOD_SECONDS)

    async def read(self) -> None:
        """Asks all routers once."""
        routers = {key: self._routers(key) for key in self._store.owner_keys() if self._is_ours(key)}
        for gone in self._addresses.keys() - routers.keys():
            del self._addresses[gone]
        for gone in self._reports.keys() - {key for key, found in routers.items() if found}:
            del self._reports[gone]
        async with asyncio.TaskGroup() as tasks:
            for key, found in routers.items():
                if found:
                    tasks.create_task(self._read(key, found))

    async def close(self) -> None:
        """Closes connections."""
        await self._client.close()

    def _routers(self, key: Key) -> dict[str, str]:
        """Addresses of pickers, by uid."""
        children = self._store.children(key)
        seen = tuple((one.name, one.resource_version) for one in children if one.kind == "Pod")
        known = self._addresses.get(key)
        if known is None or known[0] != seen:
            found = picker_addresses(pods_of(children, names.ROUTER)) if seen else {}
            known = self._addresses[key] = (seen, {uid: url for uid, url in found.items() if url})
        return known[1]

    async def _read(self, key: Key, routers: Mapping[str, str]) -> None:
        before = self._reports.get(key, {})
        answers = await asyncio.gather(*(self._ask(url) for url in routers.values()))
        # The last answer of a picker that does not answer now holds: it is started again, and Envoy goes on.
        reports = {uid: before.get(uid, {}) if one is None else one for uid, one in zip(routers, answers, strict=True)}
        self._reports[key] = reports
        if rejection_problem(reports) != rejection_problem(before):
            self._changed(key)

    async def _ask(self, url: str) -> Rejected | None:
        """None: there is no answer. A picker of an older release has none to give."""
        try:
            return parse_rejected(json.loads(await self._client.call(f"{url}/rejected")))
        except ValueError as error:
            if isinstance(error, PodUnreadableError) and error.status == 404:
                return {}
            logger.debug("the rejected updates of the router at %s cannot be read: %r", url, error)
            return None
