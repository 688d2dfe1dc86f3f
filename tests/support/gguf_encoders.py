"""Small encoders as GGUF files, laid out as llama.cpp's converter does, beside the checkpoint that they are made of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from support.encoders import make_encoder
from support.gguf_files import finish
from transformers import PreTrainedModel

NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5
_BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "classifier": "cls.output",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
_DISTIL = {
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
_NOMIC = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
}
_MODERN = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "final_norm": "output_norm",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
}
NAMES = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": _BERT | _DISTIL,
    "nomic-bert": _BERT | _NOMIC,
    "modernbert": _MODERN,
}
ARCHITECTURES = {"nomic-bert": "nomic-bert", "modernbert": "modern-bert"}


def write_encoder(
    folder: Path,
    family: str,
    *,
    head: bool = False,
    qtype: str = "F32",
    settings: dict[str, Any] | None = None,
    **metadata: Any,
) -> Path:
    """Write the checkpoint into ``folder / "hf"`` and the same as ``folder / "m.gguf"``, which is returned.

    ``settings``: of config.json that differ from the family's. ``metadata``: further keys of the file, with "__" for a
    dot; of the architecture, where they begin with one.
    """
    model = make_encoder(family, folder / "hf", head, **settings or {})
    path, arch = folder / "m.gguf", ARCHITECTURES.get(family, "bert")
    writer = GGUFWriter(path, arch)
    _write_header(writer, model, arch, family, head)
    for key, value in metadata.items():
        key = (arch + key if key.startswith("__") else key).replace("__", ".")
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    add_word_pieces(writer, json.loads((folder / "hf" / "tokenizer.json").read_text())["model"]["vocab"], 64)
    for name, values in _tensors(model, family):
        kind = GGMLQuantizationType[qtype if name.startswith("blk") and values.ndim == 2 else "F32"]
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return path


def _write_header(writer: GGUFWriter, model: PreTrainedModel, arch: str, family: str, head: bool) -> None:
    config = model.config
    behind = config.pad_token_id + 1 if family in ("roberta", "xlm-roberta") else 0
    writer.add_context_length(config.max_position_embeddings - behind)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "hidden_dim", None) or config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or getattr(config, "norm_eps", 1e-12))
    writer.add_causal_attention(False)
    writer.add_token_type_count(getattr(config, "type_vocab_size", 1))
    if head:
        writer.add_uint32(f"{arch}.pooling_type", 4)
    if family == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "modernbert":
        writer.add_sliding_window(config.local_attention)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_float32(f"{arch}.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])


def _tensors(model: PreTrainedModel, family: str) -> list[tuple[str, np.ndarray]]:
    """Names and values of a file's tensors. Tables of positions lose the rows of padding, BERT its pooler."""
    found, names = [], NAMES[family]
    for name, tensor in model.state_dict().items():
        base, _, kind = name.removeprefix(f"{model.base_model_prefix}.").rpartition(".")
        values = tensor.float().numpy()
        if base == "embeddings.position_embeddings" and family in ("roberta", "xlm-roberta"):
            values = values[model.config.pad_token_id + 1 :]
        layer = re.fullmatch(r"(?:encoder\.|transformer\.)?layers?\.(\d+)\.(.+)", base)
        if layer and layer[2] in names:
            found.append((f"blk.{layer[1]}.{names[layer[2]]}.{kind}", values))
        elif base in names:
            found.append((f"{names[base]}.{kind}", values))
        else:
            assert "pooler" in base or "position_ids" in name, name
    return _fused(found) if family == "nomic-bert" else found


def _fused(tensors: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Queries, keys and values of a layer in one tensor."""
    parts: dict[str, list[np.ndarray]] = {}
    rest = []
    for name, values in tensors:
        if match := re.fullmatch(r"(blk\.\d+\.attn)_([qkv])\.(\w+)", name):
            parts.setdefault(f"{match[1]}_qkv.{match[3]}", []).append(values)
        else:
            rest.append((name, values))
    return [*rest, *((name, np.concatenate(each)) for name, each in parts.items())]


def add_word_pieces(writer: GGUFWriter, vocabulary: dict[str, int], size: int) -> None:
    """A WordPiece vocabulary as the converter writes it: words begin with a mark, what goes on does not."""
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in vocabulary.items():
        is_special = token.startswith("[")
        types[i] = CONTROL if is_special else NORMAL
        tokens[i] = token if is_special else token[2:] if token.startswith("##") else f"▁{token}"
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = {"bos": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    for name, token in special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocabulary[token])
