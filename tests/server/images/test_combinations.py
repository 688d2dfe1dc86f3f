"""Images beside what else an engine does: the tokens are those without it, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.draft_heads import Head
from support.images import image_of
from support.tiny_models import make_model
from support.vision import TEXT

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.interface.step import SchedulerOutput
from octavo.worker.image_encoder import ImageEncoder

IMAGE = 260
HOW: dict[str, Any] = {"dtype": "float32", "quantization": "none", "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def picture(seed: int) -> Image.Image:
    return image_of("RGB", 40, 50, np.random.default_rng(seed))


def prompt(ids: list[int], *seeds: int) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [picture(seed) for seed in seeds]}}


PROMPTS: list[Any] = [
    prompt([7, IMAGE, 8, IMAGE, 9], 3, 4),
    {"prompt_token_ids": [1, 2, 3]},
    prompt([5, 6, IMAGE], 3),
    prompt([7, IMAGE, 8, IMAGE, 11], 3, 4),
]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **HOW)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [llm.generate(one, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for one in PROMPTS]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize(
    "how",
    [
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
        {"max_num_batched_tokens": 5, "max_num_seqs": 4, "enable_prefix_caching": False},
        {"distributed_executor_backend": "mp", "mm_encoder_cache_tokens": 16},
    ],
    ids=["suffix", "chunks", "a process"],
)
def test_answers_are_the_same(how: dict[str, Any], folder: Path, expected: list[list[int]]) -> None:
    other = LLM(str(folder), **HOW | how)
    assert tokens(other) == expected
    assert tokens(other) == expected  # with what the prefix cache, or recent answers, have now
    other.engine.check_integrity()


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_model_guesses_beside_images(
    method: str, folder: Path, expected: list[list[int]], tmp_path: Path, drafted: list[int]
) -> None:
    """It reads placeholders as tokens, which costs right guesses and no token."""
    target = make_model("LlamaConfig", TEXT)
    if method == "draft_model":
        target.save_pretrained(tmp_path)
    else:
        Head(target, taps=(0, 1, 2) if method == "eagle3" else ()).save(tmp_path)
    how = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}
    other = LLM(str(folder), speculative_config=how, **HOW)
    assert tokens(other) == expected
    assert drafted, "nothing was guessed"


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens that were guessed."""
    from octavo.core.spec_decode.drafts import Drafts

    found: list[int] = []
    plain = Drafts.propose

    def noted(drafts: Drafts, request: Any, most: int) -> list[int]:
        found.extend(proposed := plain(drafts, request, most))
        return proposed

    monkeypatch.setattr(Drafts, "propose", noted)
    yield found


def test_layers_for_prediction_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"method mtp is there for .*LlavaForConditionalGeneration"):
        LLM(str(folder), speculative_config={"method": "mtp"}, **HOW)


def test_samples_logprobs_and_stop_strings(llm: LLM) -> None:
    encoder = llm.engine.executor.worker.runner.images
    fresh, before = prompt([7, IMAGE, 8, IMAGE, 9], 30, 31), encoder.num_encoded
    drawn = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)
    (first,), (again,) = (llm.generate(fresh, drawn, use_tqdm=False) for _ in range(2))
    assert encoder.num_encoded == before + 2, "three samples, and again three, read two images"
    assert len({tuple(one.token_ids) for one in first.outputs}) > 1
    for one, same in zip(first.outputs, again.outputs, strict=True):
        assert one.token_ids == same.token_ids
        for ours, theirs in zip(one.logprobs, same.logprobs, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-4 for token in ours)
    drawn = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    whole = llm.generate(fresh, drawn, use_tqdm=False)[0].outputs[0]
    place = max(whole.text.find(char) for char in set(whole.text) if char.isascii())
    stop = replace(drawn, stop=[whole.text[place]])
    cut = llm.generate(fresh, stop, use_tqdm=False)[0].outputs[0]
    assert place > 0
    assert (cut.finish_reason, cut.text) == ("stop", whole.text[:place])


def test_an_aborted_request_leaves_its_room_to_others(folder: Path, expected: list[list[int]]) -> None:
    """In the middle of its second image, and before a step has begun; the cache holds one image."""
    llm = LLM(str(folder), max_num_batched_tokens=12, max_num_seqs=4, mm_encoder_cache_tokens=16, **HOW)
    core, images = llm.engine, llm.engine.scheduler._images
    for steps in (0, 1, 2, 3):
        core.add_request(llm._input.process(f"a{steps}", PROMPTS[0], GREEDY))
        for _ in range(steps):
            core.step()
        core.abort_requests([f"a{steps}"])
        assert images._num_held == 0 and not images._held
        core.check_integrity()
        while core.has_unfinished_requests():
            core.step()
    assert tokens(llm) == expected


def test_an_encoder_that_fails_ends_its_step_alone(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), **HOW)
    plain, failing = ImageEncoder.update, [True]

    def update(encoder: ImageEncoder, step: SchedulerOutput) -> None:
        if step.encoder_inputs and failing and failing.pop():
            raise RuntimeError("no memory for it")
        plain(encoder, step)

    monkeypatch.setattr(ImageEncoder, "update", update)
    (failed,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert failed.error is not None and "no memory for it" in failed.error
    assert tokens(llm) == expected
    llm.engine.check_integrity()


def test_a_step_beyond_images_does_not_look_at_them(llm: LLM) -> None:
    encoder, core = llm.engine.executor.worker.runner.images, llm.engine
    core.add_request(llm._input.process("long", PROMPTS[0], GREEDY))
    core.step()
    core.step()
    assert not encoder._items
    while core.has_unfinished_requests():
        core.step()
