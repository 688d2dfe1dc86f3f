"""What the engine accepts, and what it says about the rest: the field, the value, the limit and the way out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cpu_time
from support.tiny_configs import LLAMA_SIZES

from octavo.engine.input_processor import InputProcessor
from octavo.interface.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.interface.model_files import ModelFiles
from octavo.interface.sampling_params import SamplingParams

MAX_LEN = 64


def make_config(vocab_size: int, generation_config: dict | None = None, eos: object = None) -> EngineConfig:
    model = ModelConfig(
        model="m",
        files=ModelFiles("m", "safetensors", "/nowhere"),
        dtype="float32",
        max_model_len=MAX_LEN,
        hf_config=LLAMA_SIZES | {"vocab_size": vocab_size, "eos_token_id": eos},
        generation_config=generation_config or {},
    )
    return EngineConfig(model=model, cache=CacheConfig(), scheduler=SchedulerConfig(max_model_len=MAX_LEN))


@pytest.fixture(scope="module")
def processor(byte_level):
    return InputProcessor(make_config(byte_level.vocab_size), byte_level)


@pytest.fixture(scope="module")
def without_tokenizer():
    return InputProcessor(make_config(500), None)


def process(processor, prompt, **params):
    return processor.process("r", prompt, SamplingParams(**params))


def test_every_form_of_prompt(processor, byte_level):
    ids = byte_level.encode("The fox")
    for prompt in ("The fox", ids, tuple(ids), np.array(ids), {"prompt": "The fox"}, {"prompt_token_ids": ids}):
        assert process(processor, prompt).prompt_token_ids == ids
    assert processor.process("r", {"prompt": "x", "cache_salt": "mine"}, SamplingParams()).cache_salt == "mine"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["prompt", "empty"]),
        ([], ["prompt", "empty"]),
        ({"prompt_token_ids": []}, ["prompt", "empty"]),
        ({}, ["prompt"]),
        (7, ["prompt", "int"]),
        ([1, True], ["prompt_token_ids", "True", "position 1"]),
        ([1, 2.0], ["prompt_token_ids", "2.0"]),
        ([1, "2"], ["prompt_token_ids", "'2'"]),
        ([1, None], ["prompt_token_ids", "None"]),
        ([3, -1], ["prompt_token_ids", "-1", "position 1"]),
        ([3, 10**30], ["prompt_token_ids", "position 1"]),
        ([1] * MAX_LEN, ["prompt", "64", "max_model_len"]),
        ("word " * 5_000, ["prompt", "max_model_len"]),
        ("x" * 10_000_000, ["10000000 characters", "max_model_len"]),
        ("bad \ud800", ["Unicode", "4"]),
    ],
)
def test_bad_prompts_are_refused_at_once_by_name(processor, prompt, words):
    with cpu_time.at_most(1.0), pytest.raises(ValueError) as caught:
        process(processor, prompt)
    for word in words:
        assert word in str(caught.value)


def test_ids_are_checked_against_the_vocabulary(processor, byte_level):
    top = byte_level.vocab_size
    assert process(processor, [top - 1]).prompt_token_ids == [top - 1]
    with pytest.raises(ValueError, match=f"between 0 and {top - 1}.*got {top} at position 2"):
        process(processor, [0, 1, top])


@given(
    st.lists(st.one_of(st.integers(-5, 600), st.booleans(), st.floats(), st.text(max_size=2), st.none()), max_size=80)
)
@settings(deadline=None)
def test_any_list_is_either_taken_as_it_is_or_refused(processor, byte_level, prompt):
    try:
        request = process(processor, prompt)
    except ValueError as error:
        assert str(error).startswith("prompt")
    else:
        assert request.prompt_token_ids == prompt
        assert all(type(i) is int and 0 <= i < byte_level.vocab_size for i in prompt)
        assert 0 < len(prompt) < MAX_LEN


def test_a_prompt_that_leaves_room_for_one_token_is_taken(processor):
    request = process(processor, [1] * (MAX_LEN - 1), max_tokens=None)
    assert request.sampling_params.max_tokens == 1


def test_max_tokens_is_what_fits(processor):
    assert process(processor, [1] * 10, max_tokens=None).sampling_params.max_tokens == MAX_LEN - 10
    assert process(processor, [1] * 10, max_tokens=10**9).sampling_params.max_tokens == MAX_LEN - 10
    assert process(processor, [1] * 10, max_tokens=7).sampling_params.max_tokens == 7


def test_truncation_keeps_the_end(processor):
    def truncated(limit: int) -> list[int]:
        request = processor.process("r", list(range(100)), SamplingParams(), truncate_prompt_tokens=limit)
        return request.prompt_token_ids

    assert truncated(3) == [97, 98, 99]
    assert truncated(-1) == list(range(100 - MAX_LEN + 1, 100))
    for limit in (0, -2, MAX_LEN):
        with pytest.raises(ValueError, match="truncate_prompt_tokens"):
            truncated(limit)


def test_the_callers_parameters_are_not_touched(processor):
    params = SamplingParams(max_tokens=None, stop=["x"], bad_words=["fox"])
    before = dataclasses.asdict(params)
    processor.process("r", "The", params)
    assert dataclasses.asdict(params) == before


def test_a_seed_is_drawn_for_each_request(processor):
    seeds = {process(processor, "x").sampling_params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert process(processor, "x", seed=7).sampling_params.seed == 7


def test_generation_config_s_end_tokens_go_before_config_s_as_in_transformers_beside_the_tokenizer_s(byte_level):
    for told, ends in (({"eos_token_id": [3, 4]}, [3, 4]), ({"eos_token_id": 6}, [6]), ({}, [5])):
        processor = InputProcessor(make_config(500, told, eos=5), byte_level)
        assert process(processor, "x").eos_token_ids == [*ends, byte_level.eos_token_id]
    assert process(processor, "x", ignore_eos=True).eos_token_ids == []


def test_bad_words_are_forbidden_at_the_start_and_after_a_space(processor, byte_level):
    params = process(processor, "x", bad_words=["fox"]).sampling_params
    assert params.bad_words_token_ids == [byte_level.encode("fox"), byte_level.encode(" fox")]
    with pytest.raises(ValueError, match="bad_words"):
        process(processor, "x", bad_words=["  "])


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_in_parameters_are_checked_against_the_vocabulary(processor, byte_level, field):
    value = {byte_level.vocab_size: 1.0} if field == "logit_bias" else [byte_level.vocab_size]
    with pytest.raises(ValueError, match=field):
        process(processor, "x", **{field: value})


def test_only_ids_are_taken_without_a_tokenizer(without_tokenizer):
    assert process(without_tokenizer, [1, 2]).prompt_token_ids == [1, 2]
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        process(without_tokenizer, "x")
    with pytest.raises(ValueError, match="stop"):
        process(without_tokenizer, [1], stop="x")
    with pytest.raises(ValueError, match="bad_words"):
        process(without_tokenizer, [1], bad_words=["x"])


def test_defaults_of_the_model_lie_under_what_is_given(byte_level):
    processor = InputProcessor(make_config(500, {"temperature": 0.3, "top_k": 7, "max_new_tokens": 9}), byte_level)
    params = processor.default_sampling_params(top_k=2)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 2, 9)


def test_text_of_a_token_without_an_embedding_is_refused_by_the_token(byte_level):
    """A tokenizer may declare tokens that the model was never given rows for, as "[PAD]" of fine-tuned models."""
    processor = InputProcessor(make_config(byte_level.eos_token_id), byte_level)
    assert process(processor, "x").prompt_token_ids
    with pytest.raises(ValueError, match=r"prompt has the token <\|end\|>, for which the model has no embedding"):
        process(processor, "x<|end|>")
