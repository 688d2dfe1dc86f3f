"""Keys of JSON as flags: any object may be given key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli import serve
from octavo.flags.fields import with_dashes
from octavo.flags.keys import with_joined_keys
from octavo.flags.parser import CommandParser

KEYS = st.text("abc_", min_size=1, max_size=4)
LISTS = st.lists(st.integers(), max_size=2)
LEAVES = st.none() | st.booleans() | st.integers() | st.text("xyz -=.{", max_size=5) | LISTS
INNER = st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=8)
OBJECTS = st.dictionaries(KEYS, INNER, min_size=1, max_size=4)


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}")]
    return [(path, value)]


@given(OBJECTS, st.randoms(use_true_random=False), st.booleans())
def test_an_object_key_by_key_is_the_object(value: dict[str, Any], rng: Any, equals: bool) -> None:
    given_keys = leaves(value)
    rng.shuffle(given_keys)
    argv = ["first"]
    for path, leaf in given_keys:
        flag, text = f"--object{path}", json.dumps(leaf)
        argv += [f"{flag}={text}"] if equals else [flag, text]
    argv += ["--other", "last"]
    found = with_joined_keys(argv, {"--object", "--other"})
    assert found[0] == "first" and found[2:] == ["--other", "last"] and len(found) == 4
    assert json.loads(found[1].removeprefix("--object=")) == value


def parse(*argv: str) -> Any:
    parser = CommandParser(prog="octavo serve")
    serve.add_arguments(parser)
    return parser.parse_args(with_dashes(list(argv)))


def test_flags_of_the_server_take_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse(
        "m", "--speculative_config.method", "ngram", "-tp", "1", "--speculative-config.num_speculative_tokens=5"
    )
    assert found.speculative_config == {"method": "ngram", "num_speculative_tokens": 5} and found.model_tag == "m"
    assert parse("-sc.method", "suffix").speculative_config == {"method": "suffix"}
    assert parse("--limit-mm-per-prompt.image", "2").limit_mm_per_prompt == {"image": 2}
    nested = parse("--hf-overrides", '{"a": 1, "b": 2}', "--hf-overrides.rope.type", "yarn", "--hf-overrides.b", "3")
    assert nested.hf_overrides == {"a": 1, "b": 3, "rope": {"type": "yarn"}}
    assert parse("--rope-theta", "0.5").rope_theta == 0.5
    capsys.readouterr()
    parse("--compilation-config.mode", "3", "-O.level=2")
    assert capsys.readouterr().err.count("has no effect: nothing is compiled at the start") == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--eplb-config.window_size", "3"], "--eplb-config is not supported yet"),
        (["--port.a", "3"], "--port: must be a whole number"),
        (["--hf-overrides", "[1]", "--hf-overrides.a", "1"], "--hf-overrides: must be a JSON object, got '[1]'"),
        (["--speculative-config.method"], "unknown flag --speculative-config.method"),
        (["--speculativ-config.method", "x"], "unknown flag --speculativ-config.method; did you mean"),
    ],
)
def test_keys_where_there_is_no_object(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_switches_take_true_and_false(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(flag: str, value: str) -> Any:
        return parse(*form.format(flag, value).split(), "org/name")

    assert said("--enable-prefix-caching", "False").enable_prefix_caching is False
    assert said("--no-enable-prefix-caching", "false").enable_prefix_caching is True
    assert said("--enable_prefix_caching", "true").enable_prefix_caching is True
    assert said("--enable-chunked-prefill", "True").model_tag == "org/name"
    said("--trust-remote-code", "false")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        said("--enable-chunked-prefill", "False")
    assert "--no-enable-chunked-prefill is not supported yet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        said("--enable-lora", "maybe")
    assert capsys.readouterr().err.startswith("octavo: error: ")
