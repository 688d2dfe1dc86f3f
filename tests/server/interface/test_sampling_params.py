"""Bad parameters get a ValueError that names the field, its value and the limit; good ones travel unchanged."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.interface import sampling_params
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
SWITCHES = sampling_params._SWITCHES
HUGE = 10**5000

# (field, value, what the message must say besides the field's name)
REFUSED: list[tuple[str, Any, str]] = [
    *[(name, value, "must be") for name in FLOATS for value in (float("nan"), float("inf"), -float("inf"), 1e309)],
    *[(name, value, "must be a number") for name in FLOATS for value in (True, "1", None, [1.0], 1j)],
    *[(name, value, "must be") for name in FLOATS for value in (10**400, -(10**400), HUGE)],
    *[(name, value, "must be an integer") for name in INTEGERS for value in (True, 1.0, "1", [1], float("nan"))],
    *[(name, value, "must be") for name in INTEGERS for value in (2**63, -(2**63) - 1, HUGE)],
    *[(name, value, "true or false") for name in SWITCHES for value in (1, 0, "true", None)],
    ("n", 0, "between 1 and 1024"),
    ("n", 10**6, "1000000"),
    ("temperature", -0.001, "at least 0"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.0001, "1.0001"),
    ("top_k", -2, "at least -1"),
    ("min_p", -0.1, "between 0 and 1"),
    ("min_p", 1.1, "1.1"),
    ("presence_penalty", 99, "between -2 and 2"),
    ("frequency_penalty", -2.01, "between -2 and 2"),
    ("repetition_penalty", 0, "above 0"),
    ("repetition_penalty", -1, "above 0"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", 10**10, "at most"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, r"\(17\) must not be above max_tokens \(16\)"),
    ("logprobs", -2, "at least -1"),
    ("prompt_logprobs", -2, "at least -1"),
    ("stop", "", "got one of 0"),
    ("stop", ["a", ""], "got one of 0"),
    ("stop", ["a", 1], "strings, got 1"),
    ("stop", {"a": 1}, "list of strings"),
    ("stop", ["x"] * 10_000, "at most 64 entries, got 10000"),
    ("stop", ["x" * 1001], "1 to 1000 characters, got one of 1001"),
    ("stop_token_ids", [1, -1], "-1"),
    ("stop_token_ids", [1.5], "1.5"),
    ("stop_token_ids", [True], "True"),
    ("stop_token_ids", 5, "list of token ids"),
    ("stop_token_ids", list(range(2000)), "at most 1024"),
    ("bad_words", ["a"] * 129, "at most 128"),
    ("bad_words", "word", "list of strings"),
    ("bad_words", [""], "got one of 0"),
    ("allowed_token_ids", [], "must not be empty"),
    ("allowed_token_ids", [2**40], str(2**40)),
    ("logit_bias", {1: float("nan")}, "finite"),
    ("logit_bias", {1: 101}, "between -100 and 100"),
    ("logit_bias", {-1: 1.0}, "-1"),
    ("logit_bias", {"a": 1.0}, "'a'"),
    ("logit_bias", {True: 1.0}, "True"),
    ("logit_bias", [1, 2], "map token ids"),
    ("logit_bias", dict.fromkeys(range(5000), 1.0), "at most 4096"),
    ("output_kind", "sometimes", "cumulative, delta, final_only"),
]
REFUSED = [(f, v, m) for f, v, m in REFUSED if not (v is None and f in ("seed", "max_tokens"))]


@pytest.mark.parametrize(
    ("field", "value", "message"), REFUSED, ids=lambda x: repr(x)[:30] if x is not HUGE else "huge"
)
def test_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)
    assert len(str(error.value)) < 300


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1e-300},
    {"temperature": 50.0},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 10**6},
    {"min_p": 1.0},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"max_tokens": None, "min_tokens": 100},
    {"n": 1024},
    {"stop": ["a", "b"], "stop_token_ids": [0, 5]},
    {"logit_bias": {5: -100, 7: 0.5}},
    {"logprobs": -1, "prompt_logprobs": 0},
    {"allowed_token_ids": [1, 2, 3], "bad_words_token_ids": [[1, 2], [3]]},
    {"output_kind": RequestOutputKind.DELTA},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted_travels_as_msgpack_and_is_stable(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert dataclasses.replace(params) == params


def test_forms_are_made_one() -> None:
    params = SamplingParams(
        stop="x", seed=-1, logit_bias={"12": 1}, output_kind="delta", top_k=np.int64(3), top_p=np.float32(0.5)
    )
    assert params.stop == ["x"]
    assert params.seed is None
    assert params.logit_bias == {12: 1.0}
    assert params.output_kind is RequestOutputKind.DELTA
    assert type(params.top_k) is int
    assert type(params.top_p) is float
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


@given(value=st.floats() | st.integers() | st.text() | st.none() | st.booleans() | st.binary(), field=st.data())
def test_any_scalar_is_taken_or_refused_by_name(value: Any, field: st.DataObject) -> None:
    """Never another exception, and never a value that is not a finite number of the field's type."""
    name = field.draw(st.sampled_from((*FLOATS, *INTEGERS)))
    try:
        params = SamplingParams(**{"max_tokens": None, name: value})
    except ValueError as error:
        assert name in str(error)
    else:
        kept = getattr(params, name)
        assert kept is None or type(kept) is (float if name in FLOATS else int)
        assert kept is None or abs(kept) < float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [100]}, "stop_token_ids must hold token ids between 0 and 99 .* got 100"),
        ({"allowed_token_ids": [5, 200]}, "allowed_token_ids .* got 200"),
        ({"logit_bias": {100: 1.0}}, "logit_bias .* got 100"),
        ({"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ({"logprobs": -1}, "logprobs must be at most 20, got -1"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs must be at most 20, got 1000000"),
    ],
)
def test_verify_knows_the_model(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields).verify(vocab_size=100)


def test_verify_lets_the_possible_pass() -> None:
    SamplingParams(stop_token_ids=[99], logprobs=20, logit_bias={0: 1.0}).verify(100)
    SamplingParams(logprobs=-1, prompt_logprobs=100).verify(100, max_logprobs=-1)


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, allowed_token_ids=[1], bad_words_token_ids=[[1]])
    other = params.clone()
    assert other == params
    other.stop.append("b")  # type: ignore[union-attr]
    other.logit_bias[2] = 1.0  # type: ignore[index]
    other.allowed_token_ids.append(2)  # type: ignore[union-attr]
    other.bad_words_token_ids[0].append(2)
    other.stop_token_ids.append(1)
    assert params == SamplingParams(stop=["a"], logit_bias={1: 1.0}, allowed_token_ids=[1], bad_words_token_ids=[[1]])


def test_generation_config_is_under_what_the_caller_sets() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 2048}
    defaults |= {"do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5", "min_p": None}
    params = SamplingParams.from_generation_config(defaults, top_k=-1, temperature=None, seed=4)
    assert params == SamplingParams(
        temperature=0.6, top_k=-1, top_p=0.95, repetition_penalty=1.05, max_tokens=2048, seed=4
    )
    assert SamplingParams.from_generation_config({}, n=2) == SamplingParams(n=2)
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).greedy
    assert SamplingParams.from_generation_config(defaults, max_tokens=None).max_tokens is None
    assert SamplingParams.from_generation_config({"max_new_tokens": 8}, min_tokens=9).max_tokens == 9


def test_a_default_penalty_belongs_to_the_default_temperature() -> None:
    defaults = {"temperature": 0.0, "frequency_penalty": 0.4}
    assert SamplingParams.from_generation_config(defaults, top_p=0.5).frequency_penalty == 0.4
    assert SamplingParams.from_generation_config(defaults, temperature=0).frequency_penalty == 0
    assert SamplingParams.from_generation_config(defaults, frequency_penalty=0.1, temperature=0.7) == SamplingParams(
        temperature=0.7, frequency_penalty=0.1
    )


def test_a_bad_generation_config_is_named() -> None:
    with pytest.raises(ValueError, match=r"top_p .* generation_config\.json"):
        SamplingParams.from_generation_config({"top_p": 7})
    assert SamplingParams.from_generation_config({"top_p": 7}, top_p=0.5).top_p == 0.5
    with pytest.raises(ValueError, match=r"^n must be") as error:
        SamplingParams.from_generation_config({"top_p": 0.7}, n=0)
    assert "generation_config" not in str(error.value)


def test_importing_the_parameters_imports_no_torch() -> None:
    code = "import sys, octavo.interface.sampling_params; assert not {'torch', 'numpy', 'msgspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
