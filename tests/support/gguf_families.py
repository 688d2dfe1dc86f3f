"""Files of families other than Llama, laid out as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFWriter
from support.family_cases import DEEPSEEK, FAMILY_CASES
from support.family_cases import GROUPS as GROUP_LIMITED
from support.gguf_files import NAMES, add_byte_level_vocabulary, interleave, write_metadata
from support.gguf_hybrids import (
    HYBRID_NAMES,
    NEMOTRON_3_KEYS,
    SHORT_CONV_NAMES,
    SIDE_BY_SIDE_NAMES,
    SINGLE_MIXER_NAMES,
    STATE_SPACE,
    STATE_SPACE_NAMES,
    as_ggml,
    multiplier,
    of_state_space,
)
from support.hybrid_cases import BAMBA, GRANITE4_EXPERTS, GRANITE4_HYBRID, LFM2, NEMOTRON_3, QWEN3_5, QWEN3_5_MOE
from support.small_sizes import SMALL, rope
from support.tiny_models import make_model
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """A file of architecture ``arch`` with a model of `FAMILY_CASES` or of its own settings.

    ``names``: parts of names that differ from Llama's. ``metadata``: beside the common keys. ``rows``: how those of q
    and k, or of all three in one tensor, are brought into another order ("halves" of heads in turn; "groups" of heads
    that share a key taken apart; "latent": keys and values of latents apart; "tiled": of gated delta nets, the first
    value head of every key head before the second ones; "convs": of short ones alone, as matrices; "state spaces": of
    Mamba 2, beside q and k as in "halves"; "multiplied": the same of Mamba 2, and weights times their multipliers).
    """

    arch: str
    case: str | tuple[str, dict[str, Any]]
    names: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    rows: str = ""
    tokens: Callable[[GGUFWriter], None] | None = None  # writes a vocabulary; None: that of `add_byte_level_vocabulary`

    def model(self) -> PreTrainedModel:
        """The model by transformers."""
        return make_model(*(FAMILY_CASES[self.case] if isinstance(self.case, str) else self.case))


EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
for shared in ("mlp.shared_expert", "mlp.shared_experts"):
    EXPERTS |= {f"{shared}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
LLAMA = {**NAMES, **EXPERTS, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
MLP = {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
DENSE = {"mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down"}
GPT2 = MLP | {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
}
NEOX = DENSE | {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
}
FALCON = DENSE | {
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
}
GRANITE = {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 7.0}
FALCON_40B = SMALL | {"alibi": False, "bias": False, "new_decoder_architecture": True, "num_kv_heads": 2}
SPARSE = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 20}
GRANITE_MOE = GRANITE | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 36}
GLM4_MOE = {
    "rope.dimension_count": 8,
    "block_count": 4,
    "nextn_predict_layers": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 20,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}
LATENT_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
# Of the sizes of `DEEPSEEK`; the first files had those of heads alone, and one tensor for keys and values.
LATENT = {
    "attention.head_count_kv": 4,
    "attention.key_length": 24,
    "attention.value_length": 12,
    "rope.dimension_count": 8,
    "attention.kv_lora_rank": 24,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.0,
}
ABSORBED = LATENT | {
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
}
LORA = {"attention.q_lora_rank": 20}
SIGMOID = LORA | {
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
GROUPS = LORA | {
    "expert_shared_count": 1,
    "expert_weights_scale": 3.0,
    "expert_gating_func": 1,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.07,
}
GROUPED = ("DeepseekV2Config", SMALL | DEEPSEEK | GROUP_LIMITED)
DEEPSEEK_YARN = (
    "DeepseekV3Config",
    SMALL | DEEPSEEK | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7),
)
OLMOE = SMALL | {"num_experts": 5, "num_experts_per_tok": 3, "num_key_value_heads": 4}
NEOX_KEYS = {"rope.dimension_count": 6, "use_parallel_residual": True, "attention.head_count_kv": 4}
STABLELM_KEYS = {"rope.dimension_count": 4, "use_parallel_residual": True}  # as llama.cpp writes for both
HYBRID = QWEN3_5 | {"linear_value_head_dim": 16} | rope("default", partial_rotary_factor=0.25)
HYBRID_KEYS = {
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
THRICE = ["full_attention", *["linear_attention"] * 3]
HYBRID_MOE = QWEN3_5_MOE | {"linear_value_head_dim": 16} | rope("default", partial_rotary_factor=0.25)
HYBRID_MOE_KEYS = HYBRID_KEYS | SPARSE | {"expert_shared_feed_forward_length": 36}
HYBRID_MTP_KEYS = HYBRID_KEYS | {"block_count": 5, "nextn_predict_layers": 1}
LAYOUTS = {
    "granite": Layout("granite", "granite", {}, GRANITE, "halves"),
    "granite4": Layout("granite", "granite4-dense", {"shared_mlp.output_linear": "ffn_down"}, GRANITE, "halves"),
    "smollm3": Layout("smollm3", "smollm3", rows="halves"),
    "internlm2": Layout("internlm2", ("LlamaConfig", SMALL), rows="halves"),
    "phi3": Layout("phi3", ("Phi3Config", SMALL | {"original_max_position_embeddings": 256, "sliding_window": None})),
    "phi3-window": Layout("phi3", "phi3", {}, {"attention.sliding_window": 19}),
    "olmo2": Layout("olmo2", "olmo2", POST),
    "olmo3": Layout("olmo2", "olmo3", POST, {"attention.sliding_window": 19}),
    "command-r": Layout("command-r", "cohere", {}, {"logit_scale": 0.0625}),
    "cohere2": Layout("cohere2", "cohere2", {}, {"logit_scale": 0.0625, "attention.sliding_window": 19}),
    "starcoder2": Layout("starcoder2", ("Starcoder2Config", SMALL), MLP),
    "stablelm": Layout("stablelm", "stablelm", {}, STABLELM_KEYS),
    "stablelm-parallel": Layout("stablelm", "stablelm-parallel", {}, STABLELM_KEYS),
    "glm4": Layout("glm4", "glm4", GLM4, {"rope.dimension_count": 8}),
    "gpt2": Layout("gpt2", "gpt2", GPT2),
    "gptneox": Layout("gptneox", "gpt-neox", NEOX, NEOX_KEYS, "groups"),
    "gptneox-serial": Layout(
        "gptneox",
        "gpt-neox-serial",
        NEOX,
        {"use_parallel_residual": False, "attention.head_count_kv": 4},
        "groups",
    ),
    "mixtral": Layout("llama", "mixtral", {}, {"expert_count": 4, "expert_used_count": 2}, "halves"),
    "qwen2moe": Layout("qwen2moe", "qwen2-moe", {}, SPARSE | {"expert_shared_feed_forward_length": 36}),
    "qwen3moe": Layout("qwen3moe", "qwen3-moe", {}, SPARSE),
    "olmoe": Layout("olmoe", ("OlmoeConfig", OLMOE), {}, {"expert_count": 5, "expert_used_count": 3}),
    "granitemoe": Layout("granitemoe", "granite-moe-shared", {}, GRANITE_MOE, "halves"),
    "glm4moe": Layout("glm4moe", "glm4-moe", {"post_attention_layernorm": "post_attention_norm"}, GLM4_MOE),
    "deepseek2-lite": Layout("deepseek2", "deepseek-v2-lite", LATENT_NAMES, ABSORBED, "latent"),
    "deepseek2-first": Layout("deepseek2", ("DeepseekV2Config", SMALL | DEEPSEEK), LATENT_NAMES, LATENT | LORA),
    "deepseek2-groups": Layout("deepseek2", GROUPED, LATENT_NAMES, ABSORBED | GROUPS, "latent"),
    "deepseek3": Layout("deepseek2", DEEPSEEK_YARN, LATENT_NAMES, ABSORBED | SIGMOID | YARN, "latent"),
    "qwen35": Layout("qwen35", ("Qwen3_5TextConfig", HYBRID), HYBRID_NAMES, HYBRID_KEYS, "tiled"),
    "qwen35-mtp": Layout("qwen35", ("Qwen3_5TextConfig", HYBRID), HYBRID_NAMES, HYBRID_MTP_KEYS, "tiled"),
    "qwen35-thrice": Layout(
        "qwen35",
        ("Qwen3_5TextConfig", HYBRID | {"linear_num_value_heads": 6, "layer_types": THRICE}),
        HYBRID_NAMES,
        HYBRID_KEYS
        | {
            "ssm.time_step_rank": 6,
            "ssm.inner_size": 96,
            "attention.recurrent_layers": [kind == "linear_attention" for kind in THRICE],
        },
        "tiled",
    ),
    "qwen35moe": Layout("qwen35moe", ("Qwen3_5MoeTextConfig", HYBRID_MOE), HYBRID_NAMES, HYBRID_MOE_KEYS, "tiled"),
    "granitehybrid": Layout(
        "granitehybrid",
        "granite4-hybrid",
        STATE_SPACE_NAMES | {"shared_mlp.output_linear": "ffn_down"},
        GRANITE | STATE_SPACE | {"expert_shared_feed_forward_length": 80, "rope.scaling.finetuned": True},
        "state spaces",
    ),
    "granitehybrid-experts": Layout(
        "granitehybrid",
        ("GraniteMoeHybridConfig", SMALL | GRANITE4_HYBRID | GRANITE4_EXPERTS),
        STATE_SPACE_NAMES,
        GRANITE_MOE | STATE_SPACE | {"ssm.group_count": 1},
        "state spaces",
    ),
    "bamba": Layout(
        "granitehybrid",
        "bamba",
        SIDE_BY_SIDE_NAMES,
        STATE_SPACE | {"rope.scaling.finetuned": True, "rope.dimension_count": 6},
        "state spaces",
    ),
    "bamba-whole": Layout(
        "granitehybrid",
        ("BambaConfig", BAMBA | rope("default", partial_rotary_factor=1.0)),
        SIDE_BY_SIDE_NAMES,
        STATE_SPACE | {"rope.scaling.finetuned": True},
        "state spaces",
    ),
    "mamba2": Layout("mamba2", "mamba2", SINGLE_MIXER_NAMES, STATE_SPACE, "state spaces"),
    "nemotron_h": Layout(
        "nemotron_h",
        "nemotron-h",
        SINGLE_MIXER_NAMES,
        STATE_SPACE
        | {
            "attention.head_count_kv": [0, 0, 0, 2, 0, 0],
            "feed_forward_length": [0, 80, 0, 0, 80, 0],
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
        "state spaces",
    ),
    "nemotron_h_moe": Layout("nemotron_h_moe", "nemotron-3", SINGLE_MIXER_NAMES, NEMOTRON_3_KEYS, "state spaces"),
    "nemotron_h_moe-latent": Layout(
        "nemotron_h_moe",
        ("NemotronHConfig", NEMOTRON_3 | {"moe_latent_size": 32}),
        SINGLE_MIXER_NAMES,
        NEMOTRON_3_KEYS | {"moe_latent_size": 32},
        "state spaces",
    ),
    "nemotron_h_moe-mtp": Layout(
        "nemotron_h_moe",
        "nemotron-3",
        SINGLE_MIXER_NAMES,
        NEMOTRON_3_KEYS
        | {
            "block_count": 6,
            "nextn_predict_layers": 1,
            "attention.head_count_kv": [0, 0, 2, 0, 0, 2],
            "feed_forward_length": [0, 24, 0, 0, 24, 24],
        },
        "state spaces",
    ),
    "falcon-h1": Layout(
        "falcon-h1",
        "falcon-h1",
        SIDE_BY_SIDE_NAMES,
        STATE_SPACE | {"ssm.inner_size": 96, "attention.head_count_kv": 2},
        "multiplied",
    ),
    "falcon-h1-norms": Layout(
        "falcon-h1",
        "falcon-h1-norms",
        SIDE_BY_SIDE_NAMES,
        STATE_SPACE | {"ssm.inner_size": 96, "attention.head_count_kv": 2},
        "multiplied",
    ),
    "lfm2": Layout("lfm2", "lfm2", SHORT_CONV_NAMES, {"shortconv.l_cache": 3, "feed_forward_length": 64}, "convs"),
    "lfm2-untied": Layout(
        "lfm2",
        ("Lfm2Config", LFM2 | {"conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
        SHORT_CONV_NAMES,
        {"shortconv.l_cache": 4},
        "convs",
    ),
    "lfm2moe": Layout(
        "lfm2moe",
        "lfm2-moe",
        SHORT_CONV_NAMES,
        SPARSE | {"shortconv.l_cache": 3, "leading_dense_block_count": 1, "expert_gating_func": 2},
        "convs",
    ),
    "falcon": Layout("falcon", "falcon-7b", FALCON, {"attention.head_count_kv": 1}, "groups"),
    "falcon-40b": Layout("falcon", ("FalconConfig", FALCON_40B), FALCON, {}, "groups"),
}


def metadata(config: Any, more: dict[str, Any]) -> dict[str, Any]:
    if config.model_type == "mamba2":
        sizes = {"embedding_length": config.hidden_size, "block_count": config.num_hidden_layers}
        unused = {"feed_forward_length": 0, "attention.head_count": 0, "context_length": 1 << 20}
        return sizes | unused | {"attention.layer_norm_rms_epsilon": config.layer_norm_epsilon} | more
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = (
        getattr(config, "ffn_hidden_size", None) or getattr(config, "intermediate_size", 0) or 4 * config.hidden_size
    )
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    if rope := getattr(config, "rope_parameters", None):
        found["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if "shortconv.l_cache" in more:
        found["attention.head_count_kv"] = [kv_heads * (kind != "conv") for kind in config.layer_types]
        found["attention.layer_norm_rms_epsilon"] = config.norm_eps
    if "ssm.time_step_rank" in more and hasattr(config, "mamba_n_heads"):
        found["attention.head_count_kv"] = [kv_heads * (kind == "full_attention") for kind in config.layers_block_type]
    for key in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if hasattr(config, key):
            name = "layer_norm_rms_epsilon" if key == "rms_norm_eps" else "layer_norm_epsilon"
            found[f"attention.{name}"] = float(getattr(config, key))
    return found | more


def write_family(
    path: Path, model: PreTrainedModel, layout: Layout, further: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Write ``model`` in float32, and ``further`` tensors of layers behind its own."""
    config, arch = model.config, layout.arch
    names = LLAMA | ({"input_layernorm": "attn_norm"} if arch == "falcon" else {}) | layout.names

    def fill(writer: GGUFWriter) -> None:
        if layout.tokens:
            layout.tokens(writer)
        else:
            add_byte_level_vocabulary(writer, config.vocab_size)
        for name, tensor in {**model.state_dict(), **further}.items():
            base, _, kind = name.rpartition(".")
            layer = re.match(r"(?:model\.layers|backbone\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.*)", base)
            if base in ("lm_head", "embed_out") and config.tie_word_embeddings:
                continue
            values = tensor.float().numpy()
            if arch == "gpt2" and layer and values.ndim == 2:
                values = np.ascontiguousarray(values.T)
            leaf = kind
            kind, values = _in_order(layout.rows, name, kind, values, config)
            if not layer:
                writer.add_tensor(f"{names[base]}.{kind}", values)
                continue
            part = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt"}.get(leaf, layer[2])
            if values.ndim == 3:  # of all experts
                part, kind = f"{part}.{kind}", "weight"
            elif kind in ("e_score_correction_bias", "expert_bias"):
                part, kind = "exp_probs_b", "bias"
            for own, rows in _parts(part, values, layout, config):
                writer.add_tensor(".".join(filter(None, ("blk", layer[1], names.get(own, own), kind))), rows)
        if "nextn_predict_layers" in layout.metadata and not further:  # whose tensors nobody reads
            writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.zeros((4, 4), np.float32))

    values = {f"{arch}.{key}": value for key, value in metadata(config, layout.metadata).items()}
    write_metadata(path, arch, values, fill)


def _in_order(rows: str, name: str, kind: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """A tensor as its layout has it, and the end of its name there."""
    if rows == "tiled":
        return as_ggml(name, kind, values, config)
    if rows == "multiplied":
        values, kind = values * multiplier(name, config), "" if "pre_ff_layernorm" in name else kind
    if rows in ("state spaces", "multiplied") and ("mamba" in name or "mixer" in name):
        return of_state_space(name, kind, values, config)
    return kind, values[:, 0] if rows == "convs" and values.ndim == 3 and values.shape[1] == 1 else values


def _parts(part: str, values: np.ndarray, layout: Layout, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", heads)
    kind = "_exps" if values.ndim == 3 else "_shexp" if "expert_count" in layout.metadata else ""
    if part == "mixer.experts.up_proj":
        yield part, values
    elif part == "shared_mlp.input_linear" or (values.ndim == 3 and "down_proj" not in part):
        halves = np.split(values, 2, axis=-2)
        yield from zip((f"ffn_gate{kind}", f"ffn_up{kind}"), map(np.ascontiguousarray, halves), strict=True)
    elif values.ndim == 3:
        yield f"ffn_down{kind}", values
    elif part == "mlp.shared_expert_gate":
        yield part, values[0]
    elif layout.rows in ("halves", "state spaces") and part in ("self_attn.q_proj", "self_attn.k_proj"):
        yield part, interleave(values, heads if "q_proj" in part else kv_heads)
    elif layout.rows == "latent" and part == "self_attn.kv_b_proj":
        apart = values.reshape(heads, -1, config.kv_lora_rank)
        keys = apart[:, : config.qk_nope_head_dim].swapaxes(1, 2)
        yield "attn_k_b", np.ascontiguousarray(keys)
        yield "attn_v_b", np.ascontiguousarray(apart[:, config.qk_nope_head_dim :])
    elif layout.rows == "groups" and part.endswith("query_key_value"):
        kv_heads = layout.metadata.get("attention.head_count_kv", getattr(config, "num_kv_heads", heads))
        groups = values.reshape(kv_heads, heads // kv_heads + 2, config.hidden_size // heads, -1)
        apart = [groups[:, :-2], groups[:, -2:-1], groups[:, -1:]]
        yield part, np.concatenate([rows.reshape(-1, *values.shape[1:]) for rows in apart])
    else:
        yield part, values
