"""Every field of adapter_config.json is read, without effect, or refused by name."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.loader.peft_config import IGNORED, READ, REFUSED, parse_config

# All fields of LoraConfig in PEFT 0.21.2, those that it inherits too.
PEFT_0_21_2 = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "kasa_config",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "monteclora_config",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
    "velora_config",
]
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
# What PEFT writes where nobody has asked for anything.
DEFAULTS: dict[str, Any] = dict.fromkeys(PEFT_0_21_2) | {
    "rank_pattern": {},
    "alpha_pattern": {},
    "loftq_config": {},
    "lora_dropout": 0.0,
    "fan_in_fan_out": False,
    "use_rslora": False,
    "init_lora_weights": True,
    "megatron_core": "megatron.core",
    "use_dora": False,
    "use_qalora": False,
    "qalora_group_size": 16,
    "lora_bias": False,
    "ensure_weight_tying": False,
    "inference_mode": True,
    "peft_version": "0.21.2",
    "task_type": "CAUSAL_LM",
}


def parse(**changes: Any) -> Any:
    return parse_config(json.dumps({**PLAIN, **changes}).encode(), Path("adapter_config.json"), 16)


def test_each_field_of_peft_is_in_one_table():
    for name in PEFT_0_21_2:
        assert sum(name in table for table in (READ, IGNORED, REFUSED)) == 1, name
    assert not set(IGNORED) & set(REFUSED) and not READ & (set(IGNORED) | set(REFUSED))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")
def test_each_field_of_the_installed_peft_is_in_one_table():
    from dataclasses import fields

    from peft import LoraConfig

    assert {field.name for field in fields(LoraConfig)} <= READ | set(IGNORED) | set(REFUSED)


def test_peft_s_default_configuration_is_taken(caplog):
    with caplog.at_level(logging.WARNING):
        assert parse(**{name: value for name, value in DEFAULTS.items() if name not in PLAIN}).scaling("q", 8) == 2
    assert not caplog.records


@pytest.mark.parametrize("name", IGNORED)
def test_a_field_without_effect_changes_nothing(name):
    assert parse(**{name: {"x": 1}}) == parse()


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused_by_field_and_value(name):
    with pytest.raises(ModelError) as error:
        parse(**{name: ["x"]})
    assert f"'{name}' ['x']" in str(error.value) and REFUSED[name] in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        "pissa",
        "pissa_niter_16",
        "PiSSA",
        "olora",
        "OLoRA",
        "corda",
        "lora_ga",
        "loftq",
        "a_new_one",
        ["pissa"],
        {"x": 1},
    ],
    ids=str,
)
def test_an_adapter_of_a_changed_base_is_refused_by_name(value):
    """PEFT subtracts A and B, as they began, from the base's weights when it loads one of these."""
    with pytest.raises(ModelError) as error:
        parse(init_lora_weights=value)
    assert "init_lora_weights" in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_an_adapter_that_began_otherwise_is_taken(value):
    assert parse(init_lora_weights=value) == parse()


@pytest.mark.parametrize("name", ["use_next", "next_config"])
def test_an_unknown_variant_is_refused_by_name(name):
    with pytest.raises(ModelError, match=name):
        parse(**{name: True})


def test_an_unknown_field_is_named_in_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        assert parse(made_with="a tool", made_by=None) == parse()
    assert "made_with" in caplog.text and "made_by" not in caplog.text
