"""GGUF files of Gemma 3n and 4, named by the `gguf` package's own map and arranged as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGUFWriter
from support.encoders import encoder_of
from support.gguf_files import add_byte_level_vocabulary, finish, gguf_name
from support.paged import load
from transformers import Gemma3TextConfig, PreTrainedModel

ARCHITECTURES = {"gemma3n": gguf.MODEL_ARCH.GEMMA3N, "gemma4": gguf.MODEL_ARCH.GEMMA4}
# Parts whose names end otherwise in a file.
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def write_gemma(path: Path, model: PreTrainedModel, arch: str, more: Callable[[GGUFWriter], None]) -> None:
    """Write ``model`` in float32; ``more`` adds what the families do not share, and may add to it."""
    config, writer = model.config, GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    add_byte_level_vocabulary(writer, config.vocab_size)
    more(writer)
    names, stacked = gguf.get_tensor_name_map(ARCHITECTURES[arch], config.num_hidden_layers), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if match := re.fullmatch(r"(model\.altup_\w*projections)\.\d+\.weight", name):
            stacked.setdefault(match[1], []).append(tensor)
            continue
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        if part in SCALES:
            writer.add_tensor(f"blk.{layer}.{SCALES[part]}", tensor.numpy())
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None or not found.endswith((".weight", ".bias")):
            found = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
        assert found, name
        writer.add_tensor(found, tensor.numpy())
    for name, tensors in stacked.items():
        writer.add_tensor(f"{names.get_name(name)}.weight", torch.stack(tensors).numpy())
    finish(writer)


def assert_same(folder: Path, path: Path) -> None:
    """The file's model has the tensors of the checkpoint in ``folder``."""
    expected, found = load(folder).state_dict(), load(path).state_dict()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def write_embedding_gemma(
    path: Path, settings: dict[str, Any], *, qtype: str = "F32", dense: Sequence[torch.Tensor] = ()
) -> PreTrainedModel:
    """Write a small EmbeddingGemma of ``settings`` with the weights ``dense`` of two layers behind it, which is
    returned."""
    model = encoder_of(Gemma3TextConfig(**settings))
    config, writer = model.config, GGUFWriter(path, "gemma-embedding")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(settings["sliding_window"])
    writer.add_uint32("gemma-embedding.pooling_type", 1)
    add_byte_level_vocabulary(writer, config.vocab_size)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    for number, weight in enumerate(dense, 2):
        writer.add_dense_features_dims(f"dense_{number}", weight.shape[1], weight.shape[0])
        writer.add_tensor(f"dense_{number}.weight", weight.numpy())
    for name, tensor in model.state_dict().items():
        values = (tensor + 1.0 if "norm" in name else tensor).numpy()
        kind = gguf.GGMLQuantizationType[qtype if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(f"model.{name}", "gemma3"), gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return model
