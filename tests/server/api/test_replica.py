"""Ids name the replica that keeps what they stand for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.replica import elsewhere, new_id, tag_of
from octavo.errors import ConfigError

ADDRESS = st.ip_addresses().map(str)
PORT = st.integers(1, 65535)
PREFIX = st.sampled_from(["resp_", "conv_", "batch_", "file-"])


@given(ADDRESS, PORT, ADDRESS, PORT, PREFIX)
def test_an_id_is_kept_by_the_replica_that_made_it_alone(
    own: str, port: int, other: str, its: int, prefix: str
) -> None:
    tag, foreign = tag_of(own, port), tag_of(other, its)
    assert re.fullmatch("[a-z0-9]{8}", tag)
    made = new_id(prefix, tag)
    assert elsewhere(made, tag) == ""
    assert bool(elsewhere(made, foreign)) == ((own, port) != (other, its))
    assert "another replica" in elsewhere(made, ""), "a server without a name has none of these"


@given(PREFIX, st.text())
def test_ids_without_a_name_are_nobody_elses(prefix: str, text: str) -> None:
    bare = new_id(prefix, "")
    assert re.fullmatch(f"{prefix}[0-9a-f]{{32}}", bare), "as before"
    assert elsewhere(bare, "aaaaaaaa") == "" and elsewhere(text, "aaaaaaaa") == ""


@given(ADDRESS, PORT)
def test_an_address_has_one_name_however_it_is_written(address: str, port: int) -> None:
    name = tag_of(address, port)
    assert tag_of(f"[{address}]:{port}", 1) == name
    assert ":" in address or tag_of(f"{address}:{port}", 1) == name


@pytest.mark.parametrize("wrong", ["tiny-0", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:²", "[::1]", ":80"])
def test_invalid_addresses_are_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match="replica_address"):
        ServerArgs(replica_address=wrong).check()
