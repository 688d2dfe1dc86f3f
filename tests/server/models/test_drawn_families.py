"""Configurations of every family that nobody wrote down: the logits of transformers, or a refusal by name."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of
from support.tiny_models import make_model

from octavo.errors import OctavoError

SEED = int(os.environ.get("OCTAVO_TEST_SEED", "0")) or random.randrange(1, 1 << 30)
FAMILIES = sorted({config_class: case for case, (config_class, _) in reversed(FAMILY_CASES.items())}.values())


def drawn(case: str, rng: random.Random) -> dict[str, Any]:
    """The case's settings with other heads, sizes, ties and windows."""
    settings = dict(FAMILY_CASES[case][1])
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    size = rng.choice([8, 16, 24])
    if case == "gpt2":
        return settings | {"n_embd": heads * size, "n_head": heads, "n_inner": rng.choice([None, 40, 72])}
    settings |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * size}
    settings |= {"intermediate_size": rng.choice([40, 72, 104]), "tie_word_embeddings": rng.random() < 0.5}
    if case.startswith("falcon"):
        settings |= {"num_kv_heads": kv_heads, "bias": rng.random() < 0.5}
        settings |= {"new_decoder_architecture": rng.random() < 0.5, "multi_query": rng.random() < 0.5}
        settings |= {"num_ln_in_parallel_attn": rng.choice([1, 2]) if settings["new_decoder_architecture"] else None}
    elif "head_dim" in settings:
        settings |= {"head_dim": rng.choice([8, 16, 32])}
    if settings.get("sliding_window"):
        settings["sliding_window"] = rng.randint(1, 40)
    if case in ("granite", "olmo2", "olmo3", "cohere", "cohere2", "glm", "glm4", "gpt-neox", "smollm3"):
        settings["attention_bias"] = rng.random() < 0.5
    return settings


def check(case: str, seed: int, folder: Path) -> None:
    rng = random.Random(f"{case} {seed}")
    settings = drawn(case, rng)
    print(f"{case}: OCTAVO_TEST_SEED={seed} {settings}")
    reference = make_model(FAMILY_CASES[case][0], settings, seed)
    reference.save_pretrained(folder)
    try:
        model = load(folder)
    except OctavoError as error:
        assert "\n" not in str(error)
        return
    tokens = [rng.randrange(320) for _ in range(rng.randint(1, 60))]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    ours = logits_of(model, [tokens], chunk=rng.choice([1 << 30, 5]))[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("case", FAMILIES)
def test_one_configuration(case: str, tmp_path: Path) -> None:
    check(case, SEED, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", FAMILIES)
def test_forty_configurations(case: str, tmp_path: Path) -> None:
    for number in range(40):
        check(case, SEED + number, tmp_path / str(number))
