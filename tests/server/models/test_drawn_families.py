"""Configurations of every family that nobody wrote down: what transformers computes, or a refusal by name."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.drawn_families import drawn, drawn_encoder, in_other_words
from support.encoders import ENCODER_CASES, encoder_of
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of
from support.tiny_models import model_of
from torch.overrides import TorchFunctionMode

from octavo import LLM, PoolingParams
from octavo.errors import OctavoError

SEED = int(os.environ.get("OCTAVO_TEST_SEED", "0")) or random.randrange(1, 1 << 30)
CASES = dict(reversed(FAMILY_CASES.values()))  # of each family the first one
# A refusal says what is not built.
NAMED = (
    "quick_gelu",
    "ALiBi",
    "parallel_attn",
    "norms of queries",
    "partial_rotary_factor",
    "head_dim",
    "longrope",
    "got None",
    "clip_qkv",
    "where layers are recurrent",
)
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}  # in float64, too
NEAR = 1e-5  # of the largest score: ten times what float32 loses in a few layers


def agrees(config_class: str, seed: int, folder: Path) -> bool:
    """Whether the model that is drawn runs, with the logits of transformers; False: it is refused."""
    rng = random.Random(f"{config_class} {seed}")
    settings = drawn(config_class, CASES[config_class], rng)
    print(f"{config_class}: OCTAVO_TEST_SEED={seed} {settings}")
    words = written(config_class, settings, folder, rng)
    reference = model_of(transformers.AutoConfig.from_pretrained(folder, **PLAIN), seed)
    save(reference, words, folder)
    try:
        model = load(folder)
    except OctavoError as error:
        check_refusal(error)
        return False
    chunk = rng.choice([1 << 30, 5])
    for _ in range(5):
        tokens = [rng.randrange(reference.config.vocab_size) for _ in range(rng.randint(17, 60))]
        if check(logits_of(model, [tokens], chunk)[0], reference, tokens) == len(tokens):
            return True
    raise AssertionError("rounding chooses experts in each of five texts")


@torch.inference_mode()
def check(ours: torch.Tensor, reference: transformers.PreTrainedModel, tokens: list[int]) -> int:
    """Compare logits [length, vocab_size] with transformers'; returns how many rows there was something to compare
    with: all, or those before the first token of which rounding chooses an expert."""
    theirs = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    rows, allowed = len(tokens), 1e-4 * max(1.0, theirs.abs().max().item())
    if (ours - theirs).abs().max() > allowed:  # too much for float32? Then for transformers as well
        with NearChoices(len(tokens)) as choices:
            exact = reference.double()(torch.tensor([tokens]), use_cache=False).logits[0]
        reference.float()
        rows = choices.near.index(True) if any(choices.near) else rows
        print(f"compared with float64: {rows} of {len(tokens)} rows; on others rounding decides")
        allowed = max(allowed, 4 * (theirs - exact)[:rows].abs().amax().item()) if rows else allowed
        theirs = exact.float()
    torch.testing.assert_close(ours[:rows], theirs[:rows], rtol=0, atol=allowed)
    return rows


class NearChoices(TorchFunctionMode):
    """Sees routers choose experts (or groups of these). ``near`` says of each of ``length`` tokens whether the last
    that is chosen and the first that is not are so near to each other that rounding to float32 may swap them."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.near = [False] * length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            scores, count = args[0], kwargs["k"] if "k" in kwargs else args[1]
            if count < scores.shape[-1]:
                best = scores.sort(-1, descending=True).values
                size = scores.abs().masked_fill(scores.isinf(), 0.0).amax(-1)
                near = best[..., count - 1] - best[..., count] <= NEAR * size
                self.near = [a or b for a, b in zip(self.near, near.view(len(self.near), -1).any(-1), strict=True)]
        return func(*args, **kwargs)


def written(config_class: str, settings: dict[str, Any], folder: Path, rng: random.Random) -> dict[str, Any]:
    """Write config.json of ``settings``, in other words or not; returns what it says."""
    path = folder / "config.json"
    getattr(transformers, config_class)(**settings).save_pretrained(folder)
    words: dict[str, Any] = json.loads(path.read_text())
    if rng.random() < 0.5:
        words = in_other_words(config_class, words, rng)
        if "layer_types" not in settings:
            words.pop("layer_types", None)
    path.write_text(json.dumps(words))
    return words


def save(model: transformers.PreTrainedModel, words: dict[str, Any], folder: Path) -> None:
    """The weights, and config.json as it was written."""
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(words | {"architectures": [type(model).__name__]}))


def check_refusal(error: OctavoError) -> None:
    print("refused:", error)
    assert "\n" not in str(error) and any(name in str(error) for name in NAMED), error


def test_near_choices_are_seen() -> None:
    """Of tokens, whether their experts or groups of these are chosen; what is certain is not near."""
    scores = torch.tensor(
        [[0.9, 0.5, 0.5 + 1e-7, 0.1], [0.9, 0.5, 0.4, 0.1], [0.9, 0.9, 0.5, 0.1]], dtype=torch.float64
    )
    with NearChoices(3) as choices:
        torch.topk(scores, 2)
        scores.topk(k=4, dim=-1)  # all of them: there is no other
        scores.view(3, 2, 2).topk(2, dim=-1)
    assert choices.near == [True, False, False]
    with NearChoices(3) as choices:
        torch.topk(scores, k=1, dim=-1, sorted=False)
    assert choices.near == [False, False, True]


@pytest.mark.sampled(share=3)
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


def encoder_agrees(config_class: str, seed: int, folder: Path) -> bool:
    """Whether the encoder that is drawn runs, with the vectors or classes of transformers; False: it is refused."""
    rng = random.Random(f"{config_class} {seed}")
    settings, head = drawn_encoder(config_class, ENCODER_CASES[config_class], rng), rng.random() < 0.5
    head &= config_class != "Gemma3TextConfig"
    print(f"{config_class}: OCTAVO_TEST_SEED={seed} {'classes of' if head else 'vectors of'} {settings}")
    words = written(config_class, settings, folder, rng)
    reference = encoder_of(transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager"), head, seed)
    save(reference, words, folder)
    try:
        llm = LLM(str(folder), skip_tokenizer_init=True)
    except OctavoError as error:
        check_refusal(error)
        return False
    # LongRoPE turns texts within its original context by other angles there, and here by those of the longest text.
    lengths = [17, 40, 64] if "longrope" in str(settings) else [1, 2, 17, 40, 64]
    texts = [[rng.randrange(5, 60) for _ in range(rng.choice(lengths))] for _ in range(3)]
    prompts: Any = [{"prompt_token_ids": text} for text in texts]
    params = PoolingParams(use_activation=False) if head else PoolingParams(pooling="mean", normalize=False)
    if head:
        found = [output.outputs.probs for output in llm.classify(prompts, params, use_tqdm=False)]
    else:
        found = [output.outputs.embedding for output in llm.embed(prompts, params, use_tqdm=False)]
    for text, ours in zip(texts, found, strict=True):
        check_answer(torch.tensor(ours), reference, text, head)
    return True


@torch.inference_mode()
def check_answer(ours: torch.Tensor, reference: transformers.PreTrainedModel, text: list[int], head: bool) -> None:
    def answer() -> torch.Tensor:
        found = reference(torch.tensor([text]), attention_mask=torch.ones(1, len(text), dtype=torch.int64))
        return found.logits[0] if head else found.last_hidden_state[0].mean(0)

    theirs = answer()
    allowed = 1e-4 * max(1.0, theirs.abs().max().item())
    if (ours - theirs).abs().max() > allowed:  # too much for float32? Then for transformers as well
        reference.double()
        exact = answer()
        reference.float()
        allowed, theirs = max(allowed, 4 * (theirs - exact).abs().max().item()), exact.float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)


@pytest.mark.parametrize("config_class", ENCODER_CASES)
def test_one_encoder(config_class: str, tmp_path: Path) -> None:
    encoder_agrees(config_class, SEED, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("config_class", ENCODER_CASES)
def test_forty_encoders(config_class: str, tmp_path: Path) -> None:
    ran = 0
    for number in range(40):
        ran += encoder_agrees(config_class, SEED + number, tmp_path / "model")
        shutil.rmtree(tmp_path / "model")
    assert ran >= 20, "most of what is drawn is there"
