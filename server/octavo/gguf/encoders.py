"""Encoders in GGUF files: which they are, the fields of their config.json and the names of their tensors.

llama.cpp's converter cuts the rows of a table of positions that RoBERTa counts padding by, so that all of ``bert`` are
BERT's: positions are counted from 0. It leaves out the pooler of BERT and keeps that of RoBERTa, as ``cls``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile

# GGUF architecture -> (model_type, beginning of the class names).
ENCODERS = {
    "bert": ("bert", "Bert"),
    "nomic-bert": ("nomic_bert", "NomicBert"),
    "modern-bert": ("modernbert", "ModernBert"),
}
_RANKS = 4  # the pooling_type of a file whose head says how well a document answers a query
_POOLINGS = {1: "mean", 2: "cls"}
_TOP = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embed_norm",
    "token_types": "embed_types",
    "position_embd": "embed_positions",
    "output_norm": "final_norm",
}
_LAYER = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_qkv": "attention.qkv_proj",
    "attn_output": "attention.o_proj",
    "attn_norm": "attention_norm",
    "attn_output_norm": "attention_norm",
    "layer_output_norm": "output_norm",
    "ffn_norm": "mlp_norm",
    "ffn_down": "mlp.down_proj",
}
_MLP = {
    "bert": {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    "nomic-bert": {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj"},
    "modern-bert": {"ffn_up": "mlp.gate_up_proj"},
}
_BERT_HEAD = {"cls": "pooler", "cls.output": "classifier"}
_HEADS = {
    "bert": _BERT_HEAD,
    "nomic-bert": _BERT_HEAD,
    "modern-bert": {"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"},
}


def encoder_name(name: str, arch: str) -> str | None:
    """Our name of tensor ``name`` in a file of the encoder ``arch``; None where it has no place."""
    base, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", base):
        part = (_LAYER | _MLP[arch]).get(match[2])
        return f"layers.{match[1]}.{part}.{kind}" if part else None
    top = (_TOP | _HEADS[arch]).get(base)
    return f"{top}.{kind}" if top else None


def ranks(file: GGUFFile) -> bool:
    """True if the file is of an encoder with a head for the relevance of documents."""
    return file.architecture in ENCODERS and file.metadata.get(f"{file.architecture}.pooling_type") == _RANKS


def encoder_config(file: GGUFFile, stated: Callable[..., Any]) -> dict[str, Any]:
    """config.json of an encoder, unchecked. ``stated(file, key, default)`` reads a key of the architecture. Raises
    ModelError."""
    arch = file.architecture
    model_type, name = ENCODERS[arch]
    config: dict[str, Any] = {
        "architectures": [f"{name}Model"],
        "model_type": model_type,
        "hidden_size": stated(file, "embedding_length"),
        "intermediate_size": stated(file, "feed_forward_length"),
        "num_hidden_layers": stated(file, "block_count"),
        "num_attention_heads": stated(file, "attention.head_count"),
        "layer_norm_eps": _shortest(stated(file, "attention.layer_norm_epsilon")),
        "max_position_embeddings": stated(file, "context_length"),
        "type_vocab_size": _rows(file, "token_types.weight", 0),
        "vocab_size": _rows(file, "token_embd.weight"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id", 0),
    }
    if arch == "bert":
        config |= {"hidden_act": "gelu", "max_position_embeddings": _rows(file, "position_embd.weight")}
    elif arch == "nomic-bert":
        config |= {"hidden_act": "silu", "rope_theta": _shortest(stated(file, "rope.freq_base", 1000.0))}
    else:
        config |= _modern(file, stated)
    return config | (_head(file, name) if ranks(file) else {})


def _modern(file: GGUFFile, stated: Callable[..., Any]) -> dict[str, Any]:
    every = stated(file, "attention.sliding_window_pattern", 3)
    return {
        "hidden_act": stated(file, "hidden_activation", "gelu"),
        "rope_theta": _shortest(stated(file, "rope.freq_base", 160000.0)),
        "rope_local_base_freq": _shortest(stated(file, "rope.freq_base_swa", 10000.0)),
        "local_attention": stated(file, "attention.sliding_window", 128),
        "global_attn_every_n_layers": every if type(every) is int else 3,
        "norm_bias": "token_embd_norm.bias" in file.tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _head(file: GGUFFile, name: str) -> dict[str, Any]:
    """Fields of the head of a ranker."""
    count, arch = _rows(file, "cls.output.weight"), file.architecture
    labels = file.metadata.get(f"{arch}.classifier.output_labels")
    if not isinstance(labels, list) or len(labels) != count:
        labels = [f"LABEL_{number}" for number in range(count)]
    return {
        "architectures": [f"{name}ForSequenceClassification"],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "has_pooler": "cls.weight" in file.tensors,
        "classifier_bias": "cls.bias" in file.tensors,
        "classifier_pooling": _POOLINGS.get(file.metadata.get(f"{arch}.classifier.pooling_type", 2), "cls"),
    }


def _rows(file: GGUFFile, name: str, absent: int | None = None) -> int:
    info = file.tensors.get(name)
    if info is None and absent is None:
        raise ModelError(f"{file.path}: tensor {name!r} is missing; the file is damaged or one part of several")
    return absent or 0 if info is None else (info.shape or (0,))[0]


def _shortest(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value
