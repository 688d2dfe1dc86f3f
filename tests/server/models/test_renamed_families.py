"""Families that transformers does not have, or knows by other names: the logits of the same weights as a Llama."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.internlm import save_internlm2, save_internlm3
from support.paged import load, logits_of, model_config
from support.small_sizes import SMALL
from support.tiny_models import make_model

from octavo.loader.load_model import load_model

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [7]]


@pytest.mark.parametrize("bias", [False, True])
def test_internlm2(bias: bool, tmp_path: Path) -> None:
    reference = save_internlm2(tmp_path / "internlm2", SMALL, bias)
    for tokens, ours in zip(TOKENS, logits_of(load(tmp_path / "internlm2"), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    reference.save_pretrained(tmp_path / "llama")
    packed = [
        logits_of(load_model(replace(model_config(tmp_path / name), quantization="int8")), TOKENS)
        for name in ("internlm2", "llama")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*packed, strict=True)), "rows in another order are packed alike"


def test_internlm3(tmp_path: Path) -> None:
    reference = save_internlm3(tmp_path, SMALL | {"head_dim": 20})
    for tokens, ours in zip(TOKENS, logits_of(load(tmp_path), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_qwen3_embedding_without_its_head(tmp_path: Path) -> None:
    """Qwen3-Embedding is stored without the prefix of a model with a head; as a decoder its head is the table."""
    reference = make_model("Qwen3Config", SMALL | {"head_dim": 16, "tie_word_embeddings": True})
    reference.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    reference.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with torch.inference_mode():
        expected = reference(torch.tensor(TOKENS[:1])).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path), TOKENS)[0], expected, rtol=0, atol=1e-3)
