"""Where matrix units multiply, a step has more tokens and int8 is a kind for them; never other than was asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.tiny_models import FAMILIES, make_model

from octavo.engine.args import EngineArgs
from octavo.interface.engine_config import EngineConfig, ModelConfig
from octavo.memory.plan import MATRIX_TOKENS, MAX_NUM_BATCHED_TOKENS, with_int8_kind, with_step_limits


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    make_model(*FAMILIES["llama"]).save_pretrained(folder)
    return EngineArgs(model=str(folder), dtype="bfloat16", skip_tokenizer_init=True).create_engine_config()


def tokens(config: EngineConfig, kind: str = "cpu", units: bool = True) -> int:
    return with_step_limits(config, kind, units).scheduler.max_num_batched_tokens


def test_plain_bfloat16_weights_take_long_steps_in_matrix_units(plain: EngineConfig) -> None:
    assert tokens(plain) == MATRIX_TOKENS > tokens(plain, units=False) == MAX_NUM_BATCHED_TOKENS["cpu"]
    assert tokens(plain, "cuda") == MAX_NUM_BATCHED_TOKENS["cuda"]


def with_fields(plain: EngineConfig, changed: dict[str, Any]) -> ModelConfig:
    told = changed | ({"hf_config": plain.model.hf_config | changed["hf_config"]} if "hf_config" in changed else {})
    return replace(plain.model, **told)


def int8(**weights: Any) -> dict[str, Any]:
    told = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": told}}
    return {"hf_config": {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}}


@pytest.mark.parametrize("model", [{"quantization": "int8_per_channel"}, int8(), int8(strategy="tensor")], ids=str)
def test_int8_rows_take_long_steps_in_matrix_units(plain: EngineConfig, model: dict[str, Any]) -> None:
    rows = replace(plain, model=with_fields(plain, model))
    assert tokens(rows) == MATRIX_TOKENS > tokens(rows, units=False) == MAX_NUM_BATCHED_TOKENS["cpu"]
    assert tokens(replace(rows, parallel=replace(plain.parallel, tensor_parallel_size=2))) == tokens(rows, units=False)


@pytest.mark.parametrize(
    "model",
    [
        int8(strategy="group", group_size=128),
        int8(num_bits=4),
        int8(symmetric=False),
        int8() | {"quantization": "none"},
        {"dtype": "float32"},
        {"weight_dtype": "float16"},
        {"quantization": "int8"},
        {"hf_config": {"quantization_config": {"quant_method": "awq"}}},
    ],
    ids=str,
)
def test_other_weights_take_none(plain: EngineConfig, model: dict[str, Any]) -> None:
    assert tokens(replace(plain, model=with_fields(plain, model))) == MAX_NUM_BATCHED_TOKENS["cpu"]


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_agree_on_machines_that_differ(plain: EngineConfig, size: str) -> None:
    ranks = replace(plain, parallel=replace(plain.parallel, **{size: 2}))
    assert tokens(ranks) == tokens(ranks, units=False)
    assert kind_of(ranks, "int8") == "int8"


def kind_of(config: EngineConfig, quantization: str | None, kind: str = "cpu", units: bool = True) -> str | None:
    asked = replace(config, model=replace(config.model, quantization=quantization))
    return with_int8_kind(asked, kind, units).model.quantization


def test_int8_has_a_scale_a_channel_in_matrix_units(plain: EngineConfig) -> None:
    assert kind_of(plain, "int8") == "int8_per_channel"
    assert kind_of(plain, "int8", units=False) == kind_of(plain, "int8", "cuda") == "int8"
    for asked in (None, "none", "int8_per_group", "int8_per_channel"):
        assert kind_of(plain, asked) == asked
    stored = replace(plain.model, hf_config={"quantization_config": {"quant_method": "awq"}})
    assert kind_of(replace(plain, model=stored), "int8") == "int8", "which is then refused, as the checkpoint is awq"


def test_what_was_asked_stays(plain: EngineConfig) -> None:
    assert tokens(replace(plain, scheduler=replace(plain.scheduler, max_num_batched_tokens=64))) == 64
