"""config.json means what transformers reads in it, whatever it leaves out, and says it through one object."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoders import FAMILIES as ENCODER_FAMILIES
from support.family_cases import FAMILY_CASES, FIRST_CASES
from transformers import AutoConfig

import octavo
from octavo.interface.architectures import DRAFTERS, MODELS
from octavo.interface.model_config import check_config, config_class, parse_config

# What a checkpoint must say here, since nobody is served well by another model's size.
NEEDED = {
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "use_sliding_window",
    "head_dim",
}
# What transformers' default leaves open, or JSON cannot say.
OPEN: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Gemma3TextModel": {"use_bidirectional_attention": True},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"time_step_limit": [0.0, 0.5]},
    "BambaForCausalLM": {"time_step_limit": [0.0, 0.5]},
    "FalconH1ForCausalLM": {"time_step_limit": [0.0, 0.5]},
    "Mamba2ForCausalLM": {"time_step_limit": [0.0, 0.5]},
    "NemotronHForCausalLM": {
        "time_step_limit": [0.0, 0.5],
        **{key: ["linear_attention", "mlp", "full_attention"] for key in ("layers_block_type", "layer_types")},
    },
}
# Fields that transformers derives from others, or has under a name of its own.
DERIVED = {
    "architecture",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "rope_local_base_freq",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "per_layer_config",
    "head_dim",
    "num_key_value_heads",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "no_rope_layers",
    "moe_layers",
    "mlp_only_layers",
    "eos_token_id",
    "activation_sparsity_pattern",
    "quantization_config",
    "word_embed_proj_dim",
    "num_nextn_predict_layers",
    "dtype",
    "num_ln_in_parallel_attn",
    "pad_token_id",
    "is_decoder",
    "use_bidirectional_attention",
    "full_attn_idxs",
    "time_step_limit",
    "mamba_d_head",
}


@cache
def stated(architecture: str) -> dict[str, Any]:
    """config.json of the family's default model, as transformers writes it."""
    import transformers

    if architecture in FIRST_CASES:
        name, _ = FAMILY_CASES[FIRST_CASES[architecture]]
    else:
        family = next(
            family for family, (kind, _) in ENCODER_FAMILIES.items() if kind.replace("Config", "Model") == architecture
        )
        name = ENCODER_FAMILIES[family][0]
    config = getattr(transformers, name)()
    found: dict[str, Any] = (
        json.loads(config.to_json_string(use_diff=False))
        | {"architectures": [architecture]}
        | OPEN.get(architecture, {})
    )
    return found


ARCHITECTURES = [*FIRST_CASES, *(kind.replace("Config", "Model") for kind, _ in ENCODER_FAMILIES.values())]


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES)))
def test_a_field_that_is_left_out_means_what_it_means_to_transformers(architecture: str) -> None:
    whole = stated(architecture)
    aliases = config_class(architecture).aliases
    needed = NEEDED | OPEN.get(architecture, {}).keys()
    optional = sorted(key for key in whole if aliases.get(key, key) not in needed)

    @settings(max_examples=15, deadline=None)
    @given(left_out=st.sets(st.sampled_from(optional)))
    def check(left_out: set[str]) -> None:
        config = {key: value for key, value in whole.items() if key not in left_out}
        ours = parse_config(config, "config.json")
        theirs = AutoConfig.for_model(**config)
        for field in fields(ours):
            own = next(
                (name for name, common in aliases.items() if common == field.name and hasattr(theirs, name)), field.name
            )
            none_or_each = field.name in ("intermediate_size", "num_experts", "num_experts_per_tok")
            if field.name in DERIVED or not hasattr(theirs, own):
                continue
            if not none_or_each or isinstance(getattr(theirs, own), int):
                assert getattr(ours, field.name) == getattr(theirs, own), field.name
        if (kinds := getattr(theirs, "layer_types", None)) and "sliding_attention" in kinds:
            theirs_windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
            if architecture.startswith("Modern"):
                assert ours.kinds == kinds  # type: ignore[attr-defined]
            else:
                assert [ours.window(layer) for layer in range(ours.num_hidden_layers)] == theirs_windows
        if "num_key_value_heads" not in type(ours).ignored and getattr(theirs, "num_key_value_heads", None):
            assert ours.num_kv_heads == theirs.num_key_value_heads
        if (
            not type(ours).layers_may_differ
            and getattr(theirs, "head_dim", None)
            and "head_dim" not in type(ours).ignored
        ):
            assert ours.head_size == theirs.head_dim
        theta = (getattr(theirs, "rope_parameters", None) or {}).get("rope_theta")
        if theta is not None and "rope_theta" not in type(ours).ignored:
            assert ours.rope().get("rope_theta") == theta
        again = parse_config(json.loads(json.dumps(check_config(config, "config.json"))), "config.json")
        assert {**vars(again), "sliding_window_pattern": None} == {**vars(ours), "sliding_window_pattern": None}

    check()


@pytest.mark.parametrize("architecture", [*MODELS, *DRAFTERS])
def test_no_base_hides_a_default_of_another(architecture: str) -> None:
    cls = config_class(architecture)
    for family in (cls, *cls.__subclasses__()):
        for field in fields(family):
            declared = next(one for one in family.__mro__ if field.name in inspect.get_annotations(one))
            own = {one.name: one for one in fields(declared)}[field.name]
            assert (field.default, field.type) == (own.default, own.type), f"{family.__name__}.{field.name}"


def test_no_model_and_no_layer_reads_config_json_as_a_dictionary() -> None:
    """Images, whose checks are in one place, take it whole; so do formats of quantized weights."""
    root = Path(inspect.getfile(octavo)).parent
    found = []
    for path in [*(root / "models").glob("*.py"), *(root / "layers").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "get")
            if reads and ast.unparse(node.value).split(".")[-1] in ("hf_config", "hf"):  # type: ignore[attr-defined]
                found.append(f"{path.name}:{node.lineno}")
    assert found == []
