"""The store: watches, listings and responses to writes overtake each other."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo_operator.kube.store import Observed, Store


def observed(name: str, version: int, uid: str = "u", kind: str = "Pod") -> Observed:
    meta = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version)}
    return Observed.of(kind, "v1", {"metadata": {**meta, "labels": {"octavo.dev/llmdeployment": "toy"}}})


def test_old_news_changes_nothing() -> None:
    store = Store()
    assert store.put(observed("a", 5)) == ("n", "toy")
    assert store.put(observed("a", 4)) is None
    assert store.put(observed("a", 5)) is None
    assert store.put(observed("a", 9, uid="another")) == ("n", "toy"), "a new object of the same name"
    assert store.delete("Pod", "n", "a", "u", "8") is None, "the old one's end"
    assert len(store.children(("n", "toy"))) == 1


def test_an_answer_that_arrives_after_the_objects_end_does_not_bring_it_back() -> None:
    store = Store()
    store.put(observed("a", 5))
    assert store.delete("Pod", "n", "a", "u", "8") == ("n", "toy")
    assert store.put(observed("a", 7)) is None, "the answer to a write of ours, overtaken by the watch"
    assert store.put(observed("a", 9, uid="another")) == ("n", "toy")


def raw(name: str, version: int, uid: str = "u") -> dict[str, Any]:
    return observed(name, version, uid).body


def test_a_listing_finds_what_a_watch_has_missed_but_does_not_undo_what_it_told_meanwhile() -> None:
    store = Store()
    store.put(observed("gone", 1))
    store.put(observed("kept", 2))
    store.put(observed("replaced", 3, "old"))
    listing = store.listing("Pod")
    store.put(observed("new", 9))
    store.put(observed("replaced", 9, "new"))
    listing.add("v1", raw("kept", 2))
    listing.add("v1", raw("replaced", 3, "old") | {"spec": {}})
    store.delete("Pod", "n", "late", "late", "5")
    listing.add("v1", raw("late", 4, "late"))
    assert listing.finish() == {("n", "toy")}
    found = [(one.name, one.uid) for one in store.children(("n", "toy"))]
    assert found == [("kept", "u"), ("new", "u"), ("replaced", "new")], "nothing comes back, nothing new is lost"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["changed", "ended"])), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["changed", "ended"])), max_size=6),
    st.integers(1, 8),
)
def test_after_etcd_was_restored_from_a_backup_a_listing_is_what_there_is(
    before: list[tuple[int, str]], after: list[tuple[int, str]], lost: int
) -> None:
    """Versions go back then: what was told before the restore must hide neither what is listed nor what comes."""
    store, version, uid = Store(), 100, 0
    there: dict[int, tuple[int, str]] = {}
    backup: dict[int, tuple[int, str]] = {}
    for number, (name, what) in enumerate(before):
        version += 1
        if what == "ended":
            if name in there:
                store.delete("Pod", "n", str(name), there.pop(name)[1], str(version))
        else:
            uid += name not in there
            there[name] = (version, there[name][1] if name in there else f"u{uid}")
            store.put(observed(str(name), *there[name]))
        if number == len(before) - lost:
            backup, restored = dict(there), version
    if len(before) < lost:
        backup, restored = {}, 100
    listing = store.listing("Pod", "n")
    for name, (known, one) in backup.items():
        listing.add("v1", raw(str(name), known, one))
    listing.finish(str(restored))
    there, version = backup, restored
    for name, what in after:  # as watches tell it
        version += 1
        if what == "ended":
            if name in there:
                assert store.delete("Pod", "n", str(name), there.pop(name)[1], str(version))
        else:
            uid += name not in there
            there[name] = (version, there[name][1] if name in there else f"u{uid}")
            assert store.put(observed(str(name), *there[name]))
    found = {int(one.name): (int(one.resource_version), one.uid) for one in store.children(("n", "toy"))}
    assert found == there


def test_a_listing_that_breaks_off_changes_nothing_more() -> None:
    store = Store()
    store.put(observed("kept", 2))
    store.listing("Pod").add("v1", raw("kept", 2))
    assert len(store) == 1
    assert store.listing("Pod").finish() == {("n", "toy")}
    assert len(store) == 0
