"""GGUF files for tests, written with the `gguf` package the way llama.cpp's converter lays a model out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SANDWICH = ("gemma2", "gemma3")  # norms before and behind each block
BYTES = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]]
BYTE_LEVEL_ALPHABET = BYTES + [chr(256 + i) for i in range(256 - len(BYTES))]


def gguf_name(name: str, arch: str = "llama") -> str:
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        if arch in SANDWICH and part == "post_attention_layernorm":
            return f"blk.{layer}.post_attention_norm.{kind}"
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[base]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp keeps the rows of q and k: the halves of each rotary head in turn."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    arch: str,
    qtype: str = "F32",
    vocabulary: bool = True,
    more: Callable[[GGUFWriter], None] | None = None,
) -> dict[str, np.ndarray]:
    """Write ``model``; matrices as ``qtype``. Returns what a reader must find, by Hugging Face name, in float32."""
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if arch in SANDWICH:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if vocabulary:
        add_byte_level_vocabulary(writer, config.vocab_size)
    if more:
        more(writer)
    expected = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch.startswith("gemma") and "norm" in name:
            tensor = tensor + 1.0  # llama.cpp's norms multiply by what is stored
        values = tensor.float().numpy()
        kind = GGMLQuantizationType[qtype if values.ndim == 2 else "F32"]
        stored = values
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            stored = interleave(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        data = quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(name, arch), data, raw_dtype=kind)
        # Rounding works on rows, so the order of rows does not change what a row becomes.
        expected[name] = quants.dequantize(quants.quantize(values, kind), kind)
    finish(writer)
    return expected


def add_byte_level_vocabulary(writer: GGUFWriter, size: int, pre: str = "gpt-2") -> None:
    """Three control tokens, the 256 bytes, then merges of neighbours in the alphabet up to ``size`` tokens."""
    tokens = ["<unk>", "<s>", "</s>", *BYTE_LEVEL_ALPHABET]
    merges = []
    letters = "etaoinshrdlu"
    for a in ["Ġ", *letters]:
        for b in letters:
            if len(tokens) < size:
                tokens.append(a + b)
                merges.append(f"{a} {b}")
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    tokens = tokens[:size]
    types = [3 if i < 3 else 5 if t.startswith("<unused") else 1 for i, t in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write_metadata(path: Path, arch: str, values: dict[str, Any], fill: Callable[[GGUFWriter], None]) -> None:
    """A file with a header and no model: for what reads the header alone."""
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        if type(value) is int and not 0 <= value < 1 << 32:
            writer.add_int64(key, value)
            continue
        {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)](key, value)
    fill(writer)
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
