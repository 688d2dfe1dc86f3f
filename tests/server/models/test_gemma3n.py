"""Gemma 3n: what its layers keep of a token, and checkpoints as they are released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from support.family_cases import FAMILY_CASES
from support.gguf_gemma import assert_same, write_gemma
from support.paged import load, logits_of
from support.tiny_models import make_model

from octavo.errors import ModelError

# Of the parts of gates that are cut off: as torch's inverse of the normal distribution has it.
DEVIATIONS = {0.9: 1.2815515995025635, 0.6: 0.25334709882736206, 0.0: float("-inf")}
TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 60)], [7], [315, 318, 4]]


def test_the_text_of_a_released_checkpoint(tmp_path: Path) -> None:
    """With towers, with keys and values that nobody reads, in the words of config.json of the release."""
    reference = make_model(*FAMILY_CASES["gemma3n"])
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unread = {n.replace(".0.", ".4."): t + 1 for n, t in tensors.items() if ".layers.0.self_attn." in n}
    tensors |= {n: t for n, t in unread.items() if ".k_" in n or ".v_" in n}
    towers = ("vision_tower.timm_model.conv_stem.conv", "audio_tower.conformer.0.norm", "embed_vision.embedding")
    found = {f"model.{name}.weight": torch.zeros(3) for name in (*towers, "embed_audio.embedding_projection")}
    found |= {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})

    text = json.loads((tmp_path / "config.json").read_text())
    assert len(text["intermediate_size"]) == 5 and not text.pop("attention_bias")
    ropes = text.pop("rope_parameters")
    text |= {"rope_theta": ropes["full_attention"]["rope_theta"], "rope_scaling": None}
    text["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))

    model = load(tmp_path)
    specs = model.kv_cache_specs()
    assert [spec.window for spec in specs] == [19, None, 19], "the others keep nothing"
    for tokens, ours in zip(TOKENS, logits_of(model, TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


def more(writer: GGUFWriter) -> None:
    """What llama.cpp's converter says of the family's first case."""
    writer.add_feed_forward_length([80] * 5)
    writer.add_head_count_kv(2)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(20)
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(4)
    writer.add_activation_sparsity_scale([DEVIATIONS[part] for part in (0.9, 0.6, 0.0, 0.0, 0.0)])


def test_a_gguf_file_is_the_checkpoint(tmp_path: Path) -> None:
    reference, path = make_model(*FAMILY_CASES["gemma3n"]), tmp_path / "model.gguf"
    reference.save_pretrained(tmp_path / "folder")
    write_gemma(path, reference, "gemma3n", more)
    assert_same(tmp_path / "folder", path)
    for ours, expected in zip(logits_of(load(path), TOKENS), logits_of(load(tmp_path / "folder"), TOKENS), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("gemma3n.embedding_length_per_layer_input", 8, "per_layer_input is 8, but per_layer_token_embd"),
        ("gemma3n.activation_sparsity_scale", [0.5] * 4, "activation_sparsity_scale has 4 entries for 5 layers"),
        ("gemma3n.attention.sliding_window_pattern", [True] * 4, "sliding_window_pattern has 4 entries for 5 layers"),
        ("gemma3n.attention.shared_kv_layers", 4, "shared_kv_layers .4. leaves no layer"),
        ("gemma3n.altup.num_inputs", 3, "no place for tensor"),
        ("gemma3n.altup.active_idx", 4, "altup.active_idx"),
    ],
)
def test_a_header_that_contradicts_the_tensors_is_named(key: str, value: object, named: str, tmp_path: Path) -> None:
    def wrong(writer: GGUFWriter) -> None:
        more(writer)
        for found in writer.kv_data:
            if key in found:
                found[key].value = value

    write_gemma(tmp_path / "model.gguf", make_model(*FAMILY_CASES["gemma3n"]), "gemma3n", wrong)
    with pytest.raises(ModelError, match=named) as caught:
        load(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)
