"""Comparison of desired with live objects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_operator.diff import digest, first_difference, overlay, quantity


@given(st.integers(0, 10**6), st.sampled_from(["Ki", "Mi", "Gi"]))
def test_quantities_are_numbers(number: int, suffix: str) -> None:
    factor = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[suffix]
    assert quantity(f"{number}{suffix}") == number * factor == quantity(number * factor)
    assert quantity(f"{number}m") * 1000 == number


def test_the_digest_is_the_same_everywhere() -> None:
    assert digest({"b": [1, "ü"], "a": None}) == digest({"a": None, "b": [1, "ü"]}) == "6bafd57c7869b3ac"


@pytest.mark.parametrize(
    ("desired", "live", "where"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, None),
        ({"a": 1}, {"a": 2}, "/a"),
        ({"a": {}}, {}, None),
        ({"a": 0, "b": "", "c": False}, {}, None),
        ({"a": ["x"]}, {"a": ["x", "y"]}, "/a"),
        ({"limits": {"memory": "1024Mi"}}, {"limits": {"memory": "1Gi"}}, None),
        ({"limits": {"cpu": "0.5"}}, {"limits": {"cpu": "500m"}}, None),
        ({"limits": {"cpu": "0.5"}}, {"limits": {"cpu": "501m"}}, "/limits/cpu"),
        ({"emptyDir": {"sizeLimit": "1Ei"}}, {"emptyDir": {"sizeLimit": "1Ei"}}, None),
        ({"target": {"averageValue": "1000"}}, {"target": {"averageValue": "1k"}}, None),
        ({"scaleUp": {"tolerance": "0.1"}}, {"scaleUp": {"tolerance": "100m"}}, None),
        ({"scaleUp": {"tolerance": "0.1"}}, {"scaleUp": {"tolerance": "110m"}}, "/scaleUp/tolerance"),
        ({"args": ["1Gi"]}, {"args": ["1024Mi"]}, "/args"),
        ({"c": [{"name": "a", "x": 1}]}, {"c": [{"name": "b"}, {"name": "a", "x": 1, "y": 2}]}, None),
        ({"c": [{"name": "a", "x": 1}]}, {"c": [{"name": "a", "x": 2}]}, "/c/a/x"),
        ({"c": [{"name": "a"}]}, {"c": []}, "/c/a"),
        ({"c": []}, {"c": None}, None),
        ({"c": {"d": 1}}, {"c": "text"}, "/c"),
        ({"c": [{"name": ["a"]}]}, {"c": [{"name": "a"}]}, "/c/['a']"),
    ],
)
def test_first_difference(desired: Any, live: Any, where: str | None) -> None:
    assert (first_difference(desired, live) or "").rstrip("/0") == (where or "")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "x", "1Gi", "1024Mi"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.fixed_dictionaries({"name": st.sampled_from("abc"), "v": inner}), max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "limits", "storage", "name"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(_JSON, _JSON)
def test_an_overlay_sets_desired_fields_and_keeps_the_rest(desired: Any, live: Any) -> None:
    once = overlay(desired, live)
    assert first_difference(desired, once) is None
    assert first_difference(desired, overlay(desired, once)) is None
    if isinstance(desired, dict) and isinstance(live, dict):
        theirs = live.keys() - desired.keys()
        assert {key: once[key] for key in theirs} == {key: live[key] for key in theirs}
