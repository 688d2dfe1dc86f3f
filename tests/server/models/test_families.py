"""Every family gives the logits of transformers, and the same bits however a sequence is cut up, paged or batched."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of
from support.tiny_models import VOCAB_SIZE, make_model

LENGTHS = (1, 3, 4, 7, 16, 33, 64, 100)  # taps of convolutions, blocks and chunks, and their neighbours


def sequences(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def assert_logits_of(reference: transformers.PreTrainedModel, tokens: list[int], logits: torch.Tensor) -> None:
    expected = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = make_model(*FAMILY_CASES[case])
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
    reference = make_model(*FAMILY_CASES[case])
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
@pytest.mark.parametrize(
    "case", ["llama-gqa-tied", "qwen3", "gemma2", "gemma3", "gemma3n", "gemma4-shared", "opt", "qwen3.5"]
)
def test_half_precision_is_close(case: str, dtype: str, tmp_path: Path) -> None:
    reference = make_model(*FAMILY_CASES[case])
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
    reference = make_model(*FAMILY_CASES["llama-gqa-tied"])
    reference.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    reference.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    tokens = sequences()[2]
    assert_logits_of(reference, tokens, logits_of(load(tmp_path), [tokens])[0])
