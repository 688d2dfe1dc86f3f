"""Map each tensor of a GGUF file to its checkpoint tensor, by the header alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from octavo.errors import ModelError
from octavo.gguf.encoders import ENCODERS, encoder_name
from octavo.gguf.families import HYBRIDS, TENSORS, layers_of, layout_of
from octavo.gguf.header import GGUFFile, TensorInfo
from octavo.gguf.pooling import DENSE, answer_words

_TOP = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's name for it
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Of a layer for multi-token prediction, by the names that Qwen3.5's checkpoints have.
_PREDICTION = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
}
# Part of the configuration, not of the weights.
_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Rows of the head again, of the two tokens that a model ranks documents by.
_ANSWERS = "cls.output.weight"


def hf_name(name: str, layout: str) -> str | None:
    """The checkpoint name of a GGUF tensor in a file of that `layout_of`; None where there is none."""
    if layout in ENCODERS:
        return encoder_name(name, layout)
    parts = _LAYER | TENSORS.get(layout, {})
    if match := re.fullmatch(r"blk\.(\d+)\.exp_probs_b\.bias", name):
        return f"model.layers.{match[1]}.{parts['ffn_gate_inp']}.e_score_correction_bias"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", name)) and match[2] in parts:
        return f"model.layers.{match[1]}.{parts[match[2]]}"
    if match := re.fullmatch(r"blk\.(\d+)\.((?:shortconv\.)?\w+)\.(weight|bias|scale)", name):
        layer, part, kind = match.groups()
        if f"{part}.{kind}" in parts:
            return f"model.layers.{layer}.{parts[f'{part}.{kind}']}"
        if kind == "scale":
            return None
        return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None
    if match := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight", name):  # Mixtral's first files
        return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
    base, _, kind = name.rpartition(".")
    return f"{_TOP[base]}.{kind}" if base in _TOP else None


def named_tensors(file: GGUFFile) -> Iterator[tuple[str, TensorInfo]]:
    """Name and entry of every tensor of the model. Raises ModelError for one without a place."""
    layers, further = layers_of(file), file.metadata.get(f"{file.architecture}.nextn_predict_layers")
    layout, left_out = layout_of(file), {*_DERIVED, *DENSE.values(), *([_ANSWERS] if answer_words(file) else [])}
    for info in file.tensors.values():
        layer = re.match(r"blk\.(\d+)\.", info.name)
        predicts = bool(layer and further and int(layer[1]) >= layers)
        if info.name in left_out or (predicts and layout not in HYBRIDS):
            continue
        if info.name.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape))
        name = _prediction_name(info.name, layers, layout) if predicts else hf_name(info.name, layout)
        if name is None:
            raise ModelError(f"{file.path}: tensor {info.name!r} is not part of architecture {file.architecture!r}")
        yield name, info


def _prediction_name(name: str, layers: int, layout: str) -> str:
    """The checkpoint name of a tensor of a layer for multi-token prediction, behind the model's ``layers``."""
    if match := re.fullmatch(r"blk\.\d+\.nextn\.(\w+)\.(\w+)", name):
        return f"mtp.{_PREDICTION.get(match[1], match[1])}.{match[2]}"
    found = hf_name(name, layout) or name
    return re.sub(r"^(?:model\.layers|blk)\.(\d+)", lambda match: f"mtp.layers.{int(match[1]) - layers}", found)


def joint_type(keys: str, values: str) -> str:
    """Return how `octavo.gguf.weights.LatentProjection` reads two tensors of these types together: codes in rows of one
    width would not be codes in rows of another."""
    return "BF16" if keys == values == "BF16" else "F32"
