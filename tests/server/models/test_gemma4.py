"""Gemma 4: what its layers keep of a token, and checkpoints as they are released."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from support.family_cases import FAMILY_CASES, GEMMA4
from support.gguf_gemma import assert_same, write_gemma
from support.paged import load, logits_of
from support.tiny_models import make_model
from transformers import PreTrainedModel

from octavo.errors import ModelError

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 60)], [7]]


def saved(case: str, folder: Path, **settings: Any) -> PreTrainedModel:
    config_class, common = FAMILY_CASES[case]
    model = make_model(config_class, common | settings)
    model.save_pretrained(folder)
    return model


def assert_logits_of(reference: PreTrainedModel, folder: Path) -> None:
    for tokens, ours in zip(TOKENS, logits_of(load(folder), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


def test_layers_that_share_keep_nothing(tmp_path: Path) -> None:
    saved("gemma4-shared", tmp_path)
    specs = load(tmp_path).kv_cache_specs()
    assert [(spec.head_size, spec.window) for spec in specs] == [(20, 19), (28, None), (20, 19), (20, 19)]


def test_keys_and_values_that_nobody_reads_are_left_out(tmp_path: Path) -> None:
    """Released checkpoints hold those of layers that share others' all the same."""
    reference = saved("gemma4-shared", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in tensors.items() if ".layers.1.self_attn." in name}
    unread = {n.replace(".1.", ".4."): t + 1 for n, t in stored.items() if ".k_" in n or ".v_" in n}
    assert len(unread) == 3
    save_file(tensors | unread, tmp_path / "model.safetensors", {"format": "pt"})
    assert_logits_of(reference, tmp_path)


@pytest.mark.parametrize("case", ["gemma4-shared", "gemma4-moe"])
def test_config_in_released_words(case: str, tmp_path: Path) -> None:
    """Sizes of layers without a window beside those of the others; transformers 5.2x writes them layer by layer."""
    reference = saved(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("per_layer_config")
    kv_heads = FAMILY_CASES[case][1].get("num_global_key_value_heads")
    config |= {"global_head_dim": 28, "num_global_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_logits_of(reference, tmp_path)


def test_heads_of_the_released_sizes(tmp_path: Path) -> None:
    settings = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 2}
    reference = saved("gemma4-shared", tmp_path, **settings)
    assert {spec.head_size for spec in load(tmp_path).kv_cache_specs()} == {256, 512}
    assert_logits_of(reference, tmp_path)


@pytest.mark.parametrize("part", [-0.1, 1.5, "half", True, float("nan")])
def test_a_part_of_heads_that_cannot_be_turned_is_named(part: Any, tmp_path: Path) -> None:
    saved("gemma4-moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = part
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        load(tmp_path)


def test_embeddings_of_layers_stay_in_16_bits(tmp_path: Path) -> None:
    """The second table is most of a small model: it is held as the first one is."""
    make_model("Gemma4TextConfig", GEMMA4 | {"tie_word_embeddings": False}).bfloat16().save_pretrained(tmp_path)
    decoder = load(tmp_path).model
    assert decoder.embed_tokens.weight is None and decoder.embed_tokens_per_layer.weight is None


def more(config: Any) -> Callable[[GGUFWriter], None]:
    """What llama.cpp's converter says of the family's cases beside the common keys."""
    layers, full = config.num_hidden_layers, 28
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    own = layers - config.num_kv_shared_layers

    def add(writer: GGUFWriter) -> None:
        writer.add_feed_forward_length([80 * (1 + (config.use_double_wide_mlp and n >= own)) for n in range(layers)])
        kv_heads = 1 if config.attention_k_eq_v else 2
        writer.add_head_count_kv([2 if window else kv_heads for window in windows])
        for method in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
            method(full)
        for method in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
            method(20)
        if config.enable_moe_block:
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.top_k_experts)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        turned = int(full * 0.25 / 2)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (full // 2 - turned), np.float32))

    return add


@pytest.mark.parametrize("case", ["gemma4", "gemma4-shared", "gemma4-keys-as-values", "gemma4-moe"])
def test_a_gguf_file_is_the_checkpoint(case: str, tmp_path: Path) -> None:
    config_class, settings = FAMILY_CASES[case]
    reference = make_model(config_class, settings | {"attention_bias": False})
    reference.save_pretrained(tmp_path / "folder")
    write_gemma(tmp_path / "model.gguf", reference, "gemma4", more(reference.config))
    assert_same(tmp_path / "folder", tmp_path / "model.gguf")
    both = (logits_of(load(tmp_path / name), TOKENS) for name in ("model.gguf", "folder"))
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("embedding_length_per_layer_input", 8, "embedding_length_per_layer_input is 8, but per_layer_token_embd"),
        ("feed_forward_length", [80, 80, 80, 96, 160, 160, 160], "feed_forward_length may differ"),
        ("attention.head_count_kv", [2, 2, 1, 2, 2, 2, 2], "head_count_kv must be the same"),
        ("attention.head_count_kv", [2, 1, 2, 2, 1, 2, 1], "head_count_kv must be one number"),
        ("attention.sliding_window_pattern", [True] * 5, "sliding_window_pattern has 5 entries for 7 layers"),
        ("attention.shared_kv_layers", 6, "feed_forward_length may differ"),
        ("attention.value_length_swa", 16, "value_length_swa must be key_length_swa"),
        ("attention.value_length", 20, "value_length must be the size of a head"),
        ("attention.key_length_swa", 24, "shape"),
    ],
)
def test_a_header_that_contradicts_the_tensors_is_named(key: str, value: object, named: str, tmp_path: Path) -> None:
    reference = make_model(*FAMILY_CASES["gemma4-shared"])

    def wrong(writer: GGUFWriter) -> None:
        more(reference.config)(writer)
        for found in writer.kv_data:
            if f"gemma4.{key}" in found:
                found[f"gemma4.{key}"].value = value
        if key == "attention.key_length_swa":
            writer.kv_data[0]["gemma4.attention.value_length_swa"].value = value

    write_gemma(tmp_path / "model.gguf", reference, "gemma4", wrong)
    with pytest.raises(ModelError, match=named) as caught:
        load(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)
