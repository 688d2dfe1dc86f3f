"""Models that are not built are refused by name, and fields of config.json that cannot be meant by field: in one line,
before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.family_cases import FAMILY_CASES
from support.tiny_models import make_model

from octavo.engine.args import EngineArgs
from octavo.errors import OctavoError
from octavo.loader.weight_bytes import model_without_memory

BAD: list[tuple[str, str, Any]] = [
    ("granite", "residual_multiplier", 0),
    ("granite", "logits_scaling", float("nan")),
    ("granite", "embedding_multiplier", "12"),
    ("granite", "attention_multiplier", -1.0),
    ("granite4-dense", "shared_intermediate_size", 1 << 40),
    ("granite4-dense", "layer_types", ["attention", "rwkv"]),
    ("smollm3", "no_rope_layers", [1, 0]),
    ("smollm3", "no_rope_layers", ["1"] * 4),
    ("glm4", "partial_rotary_factor", 1.5),
    ("glm4", "partial_rotary_factor", 0.2),
    ("glm4", "partial_rotary_factor", "half"),
    ("cohere", "logit_scale", "x"),
    ("cohere", "layer_norm_eps", -1),
    ("cohere2", "sliding_window_pattern", 0),
    ("starcoder2", "use_bias", "yes"),
    ("falcon-40b", "n_head_kv", 3),
    ("gpt2", "n_embd", 1 << 30),
    ("gpt2", "n_inner", -1),
    ("gpt-neox", "use_parallel_residual", 1),
    ("olmo3", "layer_types", ["full_attention"]),
    ("smollm3-window", "use_sliding_window", False),
    ("olmo3", "sliding_window", None),
    ("falcon-40b", "parallel_attn", False),
    ("phi3", "sliding_window", -3),
    ("gemma3n", "activation_sparsity_pattern", [0.5]),
    ("gemma3n", "activation_sparsity_pattern", [1.0] * 5),
    ("gemma3n", "altup_active_idx", 4),
    ("gemma3n", "altup_num_inputs", 1),
    ("gemma3n", "laurel_rank", 0),
    ("gemma3n", "intermediate_size", [80, 80, 80, 80, 96]),
    ("gemma3n", "num_kv_shared_layers", 4),
    ("gemma3n", "hidden_size_per_layer_input", 0),
    ("gemma4-shared", "num_kv_shared_layers", 6),
    ("gemma4-shared", "num_kv_shared_layers", 7),
    ("gemma4-shared", "attention_k_eq_v", 1),
    ("gemma4-shared", "hidden_size_per_layer_input", -1),
    ("gemma4-shared", "per_layer_config", {"1": {"head_dim": 28}}),
    ("gemma4-moe", "top_k_experts", 7),
    ("gemma4-shared", "per_layer_config", {"1": {"sliding_window": 3}}),
    ("gemma4-shared", "use_bidirectional_attention", "all"),
    ("phi3", "per_layer_config", {"0": {"head_dim": 8}}),
    ("qwen3.5", "linear_num_key_heads", 3),
    ("qwen3.5", "linear_num_value_heads", 0),
    ("qwen3.5", "linear_key_head_dim", 12),
    ("qwen3.5", "linear_value_head_dim", 264),
    ("qwen3.5", "linear_conv_kernel_dim", 1),
    ("qwen3.5", "linear_conv_kernel_dim", 99),
    ("qwen3.5", "layer_types", ["linear_attention"]),
    ("qwen3.5", "layer_types", ["linear_attention"] * 3 + ["mamba"]),
    ("qwen3.5", "full_attention_interval", 0),
    ("qwen3.5", "hidden_act", "gelu"),
    ("qwen3.5", "output_gate_type", "tanh"),
    ("qwen3.5", "attn_output_gate", False),
    ("qwen3.5-moe", "linear_num_key_heads", 3),
    ("qwen3.5-moe", "num_experts", 0),
    ("qwen3.5-moe", "num_experts_per_tok", 7),
    ("qwen3.5-moe", "moe_intermediate_size", "20"),
    ("qwen3.5-moe", "shared_expert_intermediate_size", 0),
    ("granite4-hybrid", "mamba_n_groups", 4),
    ("granite4-hybrid", "mamba_n_heads", 7),
    ("granite4-hybrid", "mamba_d_head", 20),
    ("granite4-hybrid", "mamba_d_state", 12),
    ("granite4-hybrid", "mamba_d_state", 512),
    ("granite4-hybrid", "mamba_d_conv", 99),
    ("granite4-hybrid", "mamba_conv_bias", 1),
    ("granite4-hybrid", "time_step_limit", [0.5, 0.1]),
    ("granite4-hybrid", "time_step_limit", 3),
    ("granite4-hybrid", "hidden_act", "gelu"),
    ("granite4-hybrid", "layer_types", ["mamba"] * 3 + ["conv"]),
    ("granite4-hybrid-experts", "num_experts_per_tok", 5),
    ("bamba", "attn_layer_indices", "2"),
    ("bamba", "mamba_expand", 3),
    ("nemotron-h", "n_groups", 4),
    ("nemotron-h", "mamba_head_dim", 12),
    ("nemotron-h", "layers_block_type", ["linear_attention", "rwkv"]),
    ("nemotron-3", "num_experts_per_tok", 9),
    ("nemotron-3", "n_group", 3),
    ("nemotron-3", "moe_latent_size", 0),
    ("nemotron-3", "moe_shared_expert_intermediate_size", -1),
    ("nemotron-h", "mlp_hidden_act", "gelu"),
    ("mamba2", "state_size", 12),
    ("mamba2", "expand", 3),
    ("mamba2", "num_heads", 7),
    ("mamba2", "n_groups", 4),
    ("mamba2", "hidden_act", "gelu"),
    ("falcon-h1", "mamba_d_ssm", 100),
    ("falcon-h1", "mamba_d_ssm", 0),
    ("falcon-h1", "mamba_n_groups", 4),
    ("falcon-h1", "key_multiplier", 0.0),
    ("falcon-h1", "ssm_multipliers", [1.0] * 4),
    ("falcon-h1", "mlp_multipliers", [1.0, "2"]),
    ("falcon-h1", "mamba_rms_norm", "no"),
    ("lfm2", "conv_L_cache", 1),
    ("lfm2", "conv_L_cache", 99),
    ("lfm2", "conv_bias", "yes"),
    ("lfm2", "layer_types", ["conv"]),
    ("lfm2", "layer_types", ["conv"] * 3 + ["mamba"]),
    ("lfm2", "block_multiple_of", 0),
    ("lfm2", "block_ffn_dim_multiplier", -1.0),
    ("lfm2-moe", "num_dense_layers", -1),
    ("lfm2-moe", "num_experts_per_tok", 7),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for case in {case for case, _, _ in BAD}:
        make_model(*FAMILY_CASES[case]).save_pretrained(root / case)
    return {path.name: path for path in root.iterdir()}


def refusal(folder: Path, changes: dict[str, Any]) -> str:
    path = folder / "config.json"
    before = path.read_text()
    config = json.loads(before)
    rope = config.get("rope_parameters")
    if "partial_rotary_factor" in changes and rope:
        rope["partial_rotary_factor"] = changes["partial_rotary_factor"]
    try:
        path.write_text(json.dumps({**config, **changes}))
        with pytest.raises(OctavoError) as raised:
            model_without_memory(EngineArgs(model=str(folder)).create_engine_config(progress=False).model, "cpu")
    finally:
        path.write_text(before)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("case", "field", "value"), BAD)
def test_a_field_that_cannot_be_meant_is_named(case: str, field: str, value: Any, folders: dict[str, Path]) -> None:
    assert field in refusal(folders[case], {field: value})


@pytest.mark.parametrize(
    ("architecture", "named"),
    [
        ("MambaForCausalLM", "state-space"),
        ("JambaForCausalLM", "state-space"),
        ("KimiLinearForCausalLM", "state-space or linear-attention layers"),
        ("Qwen3NextForCausalLM", "nearest that is: Qwen3ForCausalLM"),
        ("Olmo9ForCausalLM", "nearest that is: Olmo"),
        ("Phi9ForCausalLM", "nearest that is: Phi3ForCausalLM"),
    ],
)
def test_an_architecture_that_is_not_built_is_named(architecture: str, named: str, folders: dict[str, Path]) -> None:
    message = refusal(folders["phi3"], {"architectures": [architecture], "num_attention_heads": None})
    assert repr(architecture) in message and named in message


def test_falcon_with_alibi_and_cohere_with_more_norms_are_named(folders: dict[str, Path]) -> None:
    assert "ALiBi" in refusal(folders["falcon-40b"], {"alibi": True})
    assert "norms of queries" in refusal(folders["cohere"], {"use_qk_norm": True})


def test_another_text_model_inside_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """Mistral Small 4's is a mixture of experts with latent attention: as Mistral 3's it would be planned as dense."""
    text = json.loads((folders["phi3"] / "config.json").read_text()) | {"model_type": "mistral4"}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(OctavoError, match="Mistral3ForConditionalGeneration with a text model of type 'mistral4'"):
        EngineArgs(model=str(tmp_path), load_format="dummy").create_engine_config(progress=False)
