"""Medusa's heads guess as the paper describes it, in both formats that they come in, and change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.draft_heads import MedusaHeads, check_head
from support.overlapped import tiny
from support.tiny_models import FAMILIES, make_model

from octavo.errors import ConfigError, ModelError

HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: target's family, format, settings
    "of the authors": ("llama", "released", {"layers": 2, "bias": True}),
    "a few tokens": ("qwen3", "vllm", {"draft_vocab": 80}),
    "one matrix": ("gemma2", "vllm", {"matrices": 1}),
    "the model's matrix": ("qwen2", "released", {"matrices": 0, "count": 4}),
}


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("name", HEADS)
def test_heads_guess_as_described_and_change_nothing(
    name: str, tmp_path: Path, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, form, settings = HEADS[name]
    kind, fields = FAMILIES[family]
    heads = MedusaHeads(make_model(kind, fields), **settings)
    check_head(family, tiny_checkpoints[family], heads.save(tmp_path, form), heads.guesses, monkeypatch)


def test_unsuitable_heads_are_refused_in_a_line(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    kind, fields = FAMILIES["llama"]
    path = tiny_checkpoints["llama"]
    config = MedusaHeads(make_model(kind, fields), draft_vocab=80).save(tmp_path)
    stated, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "medusa_lm_head.safetensors"
    tensors = load_file(file)

    def without(name: str) -> dict[str, torch.Tensor]:
        return {key: tensor for key, tensor in tensors.items() if not key.startswith(name)}

    for changes, changed, asked, says in (
        ({}, tensors, {"num_speculative_tokens": 4}, "num_speculative_tokens 4 is more than its 3 heads"),
        ({"hidden_size": 48}, tensors, {}, "its hidden_size is 48, .* has 64"),
        ({"vocab_size": 300}, tensors, {}, "its vocab_size is 300, .* has 320"),
        ({"num_heads": "3"}, tensors, {}, "num_heads must be a positive integer up to"),
        ({}, without("blocks"), {}, "has no heads of method medusa"),
        ({}, tensors | {"token_map": tensors["token_map"] + 300}, {}, "token_map' makes token . of the head token "),
        (
            {},
            without("token_map"),
            {},
            "80 of 320 tokens and no token_map says which",
        ),
        ({}, without("lm_heads.1.weight"), {}, "3 heads, 2 of them with a matrix"),
        ({}, without("blocks.1.layers.0.weight"), {}, "lacks tensor 'blocks.1."),
        ({}, tensors | {"blocks.1.layers.0.weight": torch.full((64, 64), float("nan"))}, {}, "holds NaN"),
        ({}, tensors | {"blocks.1.layers.0.weight": torch.zeros(48, 48)}, {}, r"has shape \[48, 48\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(stated | changes))
        save_file(changed, file)
        with pytest.raises((ConfigError, ModelError), match=says) as refused:
            tiny(path, speculative_config=config | {"num_speculative_tokens": 3} | asked)
        assert "\n" not in str(refused.value)
