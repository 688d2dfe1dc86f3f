"""Equal hash = equal tokens from the start, same salt."""

from __future__ import annotations

from core_helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.prefix_hash import block_hash, root_hash

salts = st.one_of(st.none(), st.text(max_size=6))
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@given(a=salts, b=salts)
@examples(200)
def test_roots_differ_unless_the_salt_is_the_same(a: str | None, b: str | None) -> None:
    assert (root_hash(a) == root_hash(b)) == (a == b)


def test_any_text_is_a_salt() -> None:
    assert len({root_hash(salt) for salt in (None, "", "-", "x")}) == 4
    adapters = (None, "a@1", "a@2", "b@1")  # names, and digests of weights
    assert len({root_hash(salt, adapter) for salt in (None, "x") for adapter in adapters}) == 8
    assert root_hash("\ud800") == root_hash("\ud800")  # what JSON lets through must not raise


@given(a=tokens, b=tokens, one_parent=st.booleans())
@examples(200)
def test_blocks_differ_unless_tokens_and_parents_are_the_same(a: list[int], b: list[int], one_parent: bool) -> None:
    first, second = root_hash(None), root_hash(None if one_parent else "salt")
    assert (block_hash(first, a) == block_hash(second, b)) == (a == b and one_parent)
