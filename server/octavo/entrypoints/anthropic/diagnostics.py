"""Says why the cache did not have the prompt of the message before: what of the request is another."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, DecodeError, Struct, UnsetType
from msgspec import json as coding

from octavo.entrypoints.anthropic.protocol import MessagesRequest
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.storage.runs import RunTables
from octavo.entrypoints.storage.store import StoreError
from octavo.entrypoints.storage.tables import Entry, account_of
from octavo.entrypoints.tenants import current_tenant
from octavo.text.messages import without_billing

KEPT_SECONDS = 86_400
_DIGEST_BYTES = 9


class CacheMissReason(Struct):
    """The first thing that differs from the earlier request, and about how many tokens that has cost."""

    type: str
    cache_missed_input_tokens: int | UnsetType = UNSET


class CacheDiagnostics(Struct):
    """The reason why less was found in the cache than the earlier request left; null: nothing differs."""

    cache_miss_reason: CacheMissReason | None


class Fingerprint(Struct):
    """The parts of a request's prompt as digests. ``tokens``: of the prompt."""

    model: str
    system: str
    tools: str
    messages: list[str]
    tokens: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """The difference from an earlier request, None: there is none; ``tokens``: of the prompt that it had."""

    why: str | None
    tokens: int = field(default=0)

    def told(self, cached: int) -> CacheDiagnostics:
        """The diagnosis for a prompt of which ``cached`` tokens were found."""
        if self.why is None:
            return CacheDiagnostics(None)
        missed = max(0, self.tokens - cached) if self.tokens else UNSET
        return CacheDiagnostics(CacheMissReason(self.why, missed))


def fingerprint_of(body: MessagesRequest, model: str) -> Fingerprint:
    """The fingerprint of a request, without what changes nothing in its prompt: places that end what is cached, and
    lines for billing."""
    system = without_billing([block.text for block in body.system or ()])
    tools = [_plain(tool.model_dump(warnings=False)) for tool in body.tools or ()]
    return Fingerprint(
        model,
        _digest(system),
        _digest(tools),
        [_digest(_plain(message.model_dump(warnings=False))) for message in body.messages],
    )


def compare(earlier: Fingerprint, now: Fingerprint) -> Diagnosis:
    """Find what of ``now`` is not as it was ``earlier``, in the order of the prompt."""
    for name in ("model", "system", "tools"):
        if getattr(earlier, name) != getattr(now, name):
            return Diagnosis(f"{name}_changed", earlier.tokens)
    if now.messages[: len(earlier.messages)] != earlier.messages:
        return Diagnosis("messages_changed", earlier.tokens)
    return Diagnosis(None)


async def diagnose(state: ServerState, previous: str | None, message_id: str, now: Fingerprint) -> Diagnosis:
    """Compare a request with that of the message ``previous``, and keep it for a day for those that name it."""
    tenant = current_tenant.get()

    def work(tables: RunTables) -> Diagnosis:
        found = tables.get(previous, tenant) if previous is not None and previous.startswith("msg_") else None
        created = int(time.time())
        body = coding.encode(now)
        tables.put(Entry(message_id, account_of(tenant), created, "completed", body))
        if previous is None:
            return Diagnosis(None)
        if found is None or found.created < created - KEPT_SECONDS:
            return Diagnosis("previous_message_not_found")
        return compare(coding.decode(found.body, type=Fingerprint), now)

    try:
        return await state.store.run(work)
    except (StoreError, DecodeError):
        return Diagnosis("unavailable")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key != "cache_control"}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda one: hashlib.sha256(bytes(one)).hexdigest())
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * _DIGEST_BYTES]
