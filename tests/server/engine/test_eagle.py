"""EAGLE's draft heads guess as their papers describe it, in every format that they come in, and change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.draft_heads import Head, check_head
from support.family_cases import FAMILY_CASES
from support.overlapped import tiny
from support.tiny_models import FAMILIES, make_model

from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError

HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: target's family, format, settings
    "eagle": ("llama", "vllm", {}),
    "eagle, two layers": ("qwen2", "released", {"layers": 2, "own_embedding": True, "fc_bias": True}),
    "eagle3": ("llama", "released", {"taps": (0, 1, 2), "draft_vocab": 100}),
    "eagle3, all norms": (
        "qwen3",
        "speculators",
        {"taps": (1, 2, 3), "flags": ("norm_before_residual", "norm_before_fc", "norm_output"), "own_embedding": True},
    ),
    "eagle3, like Qwen3": (
        "mistral",
        "speculators",
        {"taps": (0, 2), "qk_norm": True, "layers": 2, "flags": ("fc_norm",), "draft_vocab": 64},
    ),
}


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("name", HEADS)
def test_heads_guess_as_described_and_change_nothing(
    name: str, tmp_path: Path, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, form, settings = HEADS[name]
    kind, fields = FAMILIES[family]
    head = Head(make_model(kind, fields), **settings)
    check_head(family, tiny_checkpoints[family], head.save(tmp_path, form), head.guesses, monkeypatch)


def test_unsuitable_heads_are_refused_in_a_line(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    kind, fields = FAMILIES["llama"]
    path, gemma = str(tiny_checkpoints["llama"]), tmp_path / "gemma"
    config = Head(make_model(kind, fields), (0, 1), draft_vocab=99).save(tmp_path / "head")
    config["num_speculative_tokens"] = 3
    stated = json.loads((tmp_path / "head" / "config.json").read_text())
    make_model(*FAMILY_CASES["gemma4"]).save_pretrained(gemma)
    for model, method, changes, says in (
        (path, "eagle", {}, "is a head of method eagle3, not eagle"),
        (path, "eagle3", {"architectures": ["Eagle3GemmaForCausalLM"]}, "those that are: Eagle3LlamaForCausalLM, "),
        (path, "eagle3", {"architectures": None}, "architecture '' is not supported"),
        (path, "eagle3", {"speculators_model_type": "peagle"}, "speculators_model_type 'peagle', not eagle3"),
        (path, "eagle3", {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "x"}}, "'x'"),
        (path, "eagle3", {"hidden_size": 48}, "hidden states of size 48, those of .* have 64"),
        (path, "eagle3", {"hidden_size": 48, "target_hidden_size": 64}, "neither embed_tokens nor lm_head for .* 48"),
        (path, "eagle3", {"vocab_size": 300}, "a vocabulary of 300 tokens, .* one of 320"),
        (path, "eagle3", {"draft_vocab_size": 321}, "draft_vocab_size must be a positive integer up to 320, got 321"),
        (path, "eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 4]}, "must be numbers from 0 to 3"),
        (path, "eagle3", {"eagle_aux_hidden_state_layer_ids": None}, "too few layers for 2, n/2 and n-3"),
        (path, "eagle3", {"use_aux_hidden_state": False}, "use_aux_hidden_state false is not supported"),
        (path, "eagle3", {"norm_output": 3}, "norm_output must be true or false, got 3"),
        (str(gemma), "eagle3", {}, "is not there for Gemma4ForCausalLM"),
    ):
        (tmp_path / "head" / "config.json").write_text(json.dumps(stated | changes))
        asked = config | {"method": method}
        with pytest.raises((ConfigError, ModelError), match=says) as refused:
            EngineArgs(model=model, skip_tokenizer_init=True, speculative_config=asked).create_engine_config()
        assert "\n" not in str(refused.value)
    (tmp_path / "head" / "config.json").write_text(json.dumps(stated))
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor, says in (
        ("fc.weight", None, "is no head of method eagle3: it has no tensor fc.weight"),
        ("d2t", None, "its head has 99 of 320 tokens and no tensor d2t says which"),
        ("layers.0.hidden_norm.weight", None, "lacks tensor '.*hidden_norm.weight'"),
        ("lm_head.weight", torch.zeros(98, 64), r"'lm_head.weight' has shape \[98, 64\], .* asks for \[99, 64\]"),
        ("fc.weight", torch.zeros(64, 192), r"has shape \[64, 192\], .* asks for \[64, 128\]"),
        ("fc.weight", torch.full((64, 128), float("nan")), "'fc.weight' holds NaN"),
        ("d2t", tensors["d2t"] + 400, "makes token 0 of the head token 4.. of the vocabulary, which has 320"),
        ("d2t", tensors["d2t"] - 400, "makes token 0 of the head token -.* of the vocabulary, which has 320"),
        ("d2t", tensors["d2t"].float(), "'d2t' is stored as F32, its format has I64 or I32"),
    ):
        changed = {key: value for key, value in tensors.items() if key != name}
        save_file(changed if tensor is None else changed | {name: tensor}, file)
        with pytest.raises((ConfigError, ModelError), match=says) as refused:
            tiny(Path(path), speculative_config=config)
        assert "\n" not in str(refused.value)
    file.unlink()
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="use a safetensors version of the model"):
        EngineArgs(model=path, skip_tokenizer_init=True, speculative_config=config).create_engine_config()
