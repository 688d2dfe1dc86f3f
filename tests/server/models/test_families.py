"""Every family gives the logits of transformers, and the same bits however a sequence is cut up, paged or batched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of
from support.tiny_models import VOCAB_SIZE, make_model

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip


GEMMA = SMALL | {"head_dim": 20, "sliding_window": 19, "query_pre_attn_scalar": 12}


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "llama-mha-biases": ("LlamaConfig", SMALL | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", SMALL | {"head_dim": 20, "rms_norm_eps": 1e-3}),
    "llama-mqa-gelu": ("LlamaConfig", SMALL | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("LlamaConfig", SMALL | rope("linear", factor=4.0)),
    "llama-llama3": ("LlamaConfig", SMALL | LLAMA3),
    "llama-yarn": ("LlamaConfig", SMALL | YARN),
    "mistral-window": ("MistralConfig", SMALL | {"sliding_window": 19}),
    "mistral-no-window": ("MistralConfig", SMALL | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", SMALL | {"sliding_window": 19, "tie_word_embeddings": True}),
    "qwen2-window-above": (
        "Qwen2Config", SMALL | {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "Qwen2Config",
        SMALL | {
            "use_sliding_window": True, "sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias-window": (
        "Qwen3Config",
        SMALL | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 19, "max_window_layers": 0},
    ),
    "gemma": ("GemmaConfig", SMALL | {"head_dim": 20}),
    "gemma-mqa-untied": ("GemmaConfig", SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": (
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 7}),
    "gemma3-types": (
        "Gemma3TextConfig",
        GEMMA | {
            "hidden_activation": "gelu", "attn_logit_softcapping": 2.0,  # this one without effect
            "layer_types": ["full_attention", "sliding_attention"], "final_logit_softcapping": 3.0, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "opt": ("OPTConfig", OPT),
    "opt-350m": ("OPTConfig", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt-plain": (
        "OPTConfig",
        OPT | {
            "enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    **FAMILY_CASES,
}  # fmt: skip
LENGTHS = (1, 7, 33, 100)


def sequences(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def assert_logits_of(reference: transformers.PreTrainedModel, tokens: list[int], logits: torch.Tensor) -> None:
    expected = reference(torch.tensor([tokens])).logits[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = make_model(*CASES[case])
    sharded = {"max_shard_size": "20KB"} if case in ("llama-gqa-tied", "opt-350m") else {}
    reference.save_pretrained(tmp_path, **sharded)
    assert bool(sharded) == (tmp_path / "model.safetensors.index.json").exists()
    model = load(tmp_path)

    at_once = logits_of(model, sequences())
    for tokens, logits in zip(sequences(), at_once, strict=True):
        assert_logits_of(reference, tokens, logits)
    for chunk, block_size in ((7, 16), (1, 1), (24, 64)):
        cut = logits_of(model, sequences(), chunk, block_size, seed=chunk)
        assert all(torch.equal(a, b) for a, b in zip(at_once, cut, strict=True)), f"{chunk=} {block_size=}"
    for tokens, logits in zip(sequences(), at_once, strict=True):
        assert torch.equal(logits_of(model, [tokens])[0], logits)


@pytest.mark.parametrize("case", ["llama-linear", "llama-llama3", "llama-yarn"])
def test_rope_scaling_in_the_older_words(case: str, tmp_path: Path) -> None:
    """config.json of transformers 4: rope_theta beside rope_scaling, whose type may be called type."""
    reference = make_model(*CASES[case])
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    path.write_text(json.dumps(config | {"rope_scaling": scaling}))
    tokens = sequences()[-1]
    assert_logits_of(reference, tokens, logits_of(load(tmp_path), [tokens])[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama-gqa-tied", "qwen3", "gemma2", "gemma3", "opt"])
def test_half_precision_is_close(case: str, dtype: str, tmp_path: Path) -> None:
    reference = make_model(*CASES[case])
    reference.save_pretrained(tmp_path)
    tokens = sequences()[-1]
    with torch.inference_mode():
        exact = reference(torch.tensor([tokens])).logits[0]
        rounded = reference.to(getattr(torch, dtype))(torch.tensor([tokens])).logits[0].float()
    ours = logits_of(load(tmp_path, dtype), [tokens])[0]
    theirs_off, ours_off = (rounded - exact).square().mean().sqrt(), (ours - exact).square().mean().sqrt()
    assert ours_off < 1.5 * theirs_off, "rounding costs us more than it costs transformers"


def test_a_checkpoint_of_the_model_without_its_head(tmp_path: Path) -> None:
    """Base models are saved without the prefix that the causal language model adds."""
    reference = make_model(*CASES["llama-gqa-tied"])
    reference.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    reference.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    tokens = sequences()[2]
    assert_logits_of(reference, tokens, logits_of(load(tmp_path), [tokens])[0])
