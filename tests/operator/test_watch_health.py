"""Silent watches."""

from __future__ import annotations

from octavo_operator.kube.watch_health import WatchHealth


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
