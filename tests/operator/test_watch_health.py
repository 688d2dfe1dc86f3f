"""Silent watches."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import Answers
from octavo_operator.kube.watch_health import WatchHealth
from octavo_operator.kube.watches import Watches


def test_a_watch_that_is_silent_is_noticed() -> None:
    now = 0.0
    health = WatchHealth(lambda: now)
    begun: list[str] = []
    health.on_restart = begun.append
    health.expect(["/a", "/b"])
    assert health.not_started() == ["/a", "/b"]
    now = 100.0
    health.on_start("/a")
    assert (health.not_started(), health.silent_for(150)) == (["/b"], None)
    now = 160.0
    assert health.silent_for(150) == "/b", "it has never begun"
    health.expect(["/a"])
    assert health.silent_for(150) is None, "its kind is gone"
    now = 260.0
    assert health.silent_for(150) == "/a"
    health.record("/a")
    assert health.silent_for(150) is None
    assert begun == [], "what goes on where it was interrupted has missed nothing"


def test_an_api_server_that_is_away_is_no_reason_to_restart() -> None:
    """A restart brings nothing back, and after some of them the operator would not be there when the server is."""

    async def run() -> list[str | None]:
        answers = Answers()
        client, controller = SimpleNamespace(answers=answers), SimpleNamespace(listed_at=time.monotonic() - 10_000)
        watches = Watches(client, OperatorConfig(), controller)  # type: ignore[arg-type]
        now = time.monotonic()
        answers.since = answers._last = now - 10_000
        found = [watches.unhealthy_reason()]
        answers.note(now)
        found.append(watches.unhealthy_reason())  # it is just back, and everything is being listed
        answers.since = now - 10_000
        return [*found, watches.unhealthy_reason()]

    away, back, stale = asyncio.run(run())
    assert (away, back) == (None, None)
    assert stale is not None and "last complete listing" in stale
