"""Backoff of rejected writes."""

from __future__ import annotations

import itertools

from octavo_operator.kube.rejected_writes import RejectedWrites


def test_rejected_writes_are_retried_with_back_off_unless_they_have_changed() -> None:
    now = 0.0
    rejected = RejectedWrites(lambda: now, base_delay=1, max_delay=4)
    key, place = ("n", "toy"), ("Service", "toy")

    def ask(what: str = "a") -> bool:
        """True: the API server was asked, and refused."""
        try:
            rejected.check(key, place, what)
        except PermissionError:
            return False
        rejected.record(key, place, what, PermissionError())
        return True

    asked = []
    for now in range(20):
        if ask():
            asked.append(now)
    assert asked == [0, 1, 3, 7, 11, 15, 19]
    assert rejected.retry_after(key) == 4
    assert ask("b"), "a changed object is another question"
    assert rejected.retry_after(key) == 1
    rejected.forget(key, place)
    assert rejected.retry_after(key) is None


def test_temporary_rejections_are_reported_after_a_moment_and_retried_every_half_minute() -> None:
    now = 0.0
    rejected = RejectedWrites(lambda: now)
    key, place = ("n", "toy"), ("Deployment", "toy")
    told, asked = [], []
    for step in range(1800):
        now = step / 10
        try:
            rejected.check(key, place, f"spec {step // 50}")  # the user changes it meanwhile
        except TimeoutError:
            continue
        asked.append(now)
        rejected.record(key, place, f"spec {step // 50}", TimeoutError(), final=False)
        if rejected.error_to_report(key):
            told.append(now)
    assert 3 <= told[0] < 10, "a condition within ten seconds, and none for a hiccup"
    assert max(after - before for before, after in itertools.pairwise(asked)) <= 30
    now += 100
    rejected.record(key, ("Service", "toy"), "x", PermissionError())
    assert isinstance(rejected.error_to_report(key), PermissionError), "what users can mend comes first"
    rejected.retain(key, {place})
    assert isinstance(rejected.error_to_report(key), TimeoutError), "what is wanted no more is not told"
    rejected.retain(key, set())
    assert rejected.error_to_report(key) is None
    assert rejected.retry_after(key) is None


def test_a_passing_refusal_is_asked_for_at_most_half_a_minute_later() -> None:
    now, asked = 0.0, []
    rejected = RejectedWrites(lambda: now)
    for step in range(3000):
        now = step / 10
        try:
            rejected.check(("n", "toy"), ("Service", "toy"), "same")
        except TimeoutError:
            continue
        asked.append(now)
        rejected.record(("n", "toy"), ("Service", "toy"), "same", TimeoutError(), final=False)
    assert 25 < max(after - before for before, after in itertools.pairwise(asked)) <= 30.2
    assert len(asked) < 20
