"""Configurations of every family that nobody wrote down: the logits of transformers, or a refusal by name."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from support.drawn_families import drawn, in_other_words
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of
from support.tiny_models import model_of

from octavo.errors import OctavoError

SEED = int(os.environ.get("OCTAVO_TEST_SEED", "0")) or random.randrange(1, 1 << 30)
# Dense families; those of experts and of latent attention have numbers of their own.
CASES = {
    config_class: settings
    for config_class, settings in reversed(FAMILY_CASES.values())
    if not settings.get("num_experts_per_tok") and "kv_lora_rank" not in settings
}
# A refusal says what is not built.
NAMED = (
    "quick_gelu", "ALiBi", "parallel_attn", "norms of queries", "partial_rotary_factor", "head_dim", "longrope",
    "got None",
)  # fmt: skip


def agrees(config_class: str, seed: int, folder: Path) -> bool:
    """Whether the model that is drawn runs, with the logits of transformers; False: it is refused."""
    rng, path = random.Random(f"{config_class} {seed}"), folder / "config.json"
    settings = drawn(config_class, CASES[config_class], rng)
    print(f"{config_class}: OCTAVO_TEST_SEED={seed} {settings}")
    getattr(transformers, config_class)(**settings).save_pretrained(folder)
    words = json.loads(path.read_text())
    if rng.random() < 0.5:
        words = in_other_words(config_class, words, rng)
    path.write_text(json.dumps(words))
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # in float64, too
    reference = model_of(transformers.AutoConfig.from_pretrained(folder, **plain), seed)
    reference.save_pretrained(folder)
    path.write_text(json.dumps(words | {"architectures": [type(reference).__name__]}))
    try:
        model = load(folder)
    except OctavoError as error:
        print("refused:", error)
        assert "\n" not in str(error) and any(name in str(error) for name in NAMED), error
        return False
    tokens = [rng.randrange(reference.config.vocab_size) for _ in range(rng.randint(17, 60))]
    ours = logits_of(model, [tokens], chunk=rng.choice([1 << 30, 5]))[0]
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens]), use_cache=False).logits[0]
        allowed = 1e-4 * max(1.0, theirs.abs().max().item())
        if (ours - theirs).abs().max() > allowed:  # too much for float32? Then for transformers as well
            exact = reference.double()(torch.tensor([tokens]), use_cache=False).logits[0]
            allowed = max(allowed, 4 * (theirs - exact).abs().max().item())
            theirs = exact.float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)
    return True


@pytest.mark.parametrize("config_class", CASES)
def test_one_configuration(config_class: str, tmp_path: Path) -> None:
    agrees(config_class, SEED, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("config_class", CASES)
def test_forty_configurations(config_class: str, tmp_path: Path) -> None:
    ran = 0
    for number in range(40):
        ran += agrees(config_class, SEED + number, tmp_path / "model")
        shutil.rmtree(tmp_path / "model")
    assert ran >= 20, "most of what is drawn is there"
