"""Images before recurrent layers: states are kept and found by what the images are, and give the bits of no hit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import vision
from support.draft_heads import not_adapting
from support.hybrid_mtp import add_layer
from support.hybrids import spoil
from support.images import image_of, make_tokenizer
from support.speculation import Oracle, all_of, speculate
from support.vision import CASES, Prompt, answer, greedy, reference_logits, tokens_of

from octavo import LLM, SamplingParams
from octavo.core.states.points import Points

FAMILIES = ["qwen3.5", "qwen3.5-moe"]
LENGTH = 200
HOW: dict[str, Any] = {"dtype": "float32", "quantization": "none", "max_model_len": LENGTH, "skip_tokenizer_init": True}
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|image_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(case: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(case)
    return path, CASES[case].save(path)


@pytest.fixture(scope="module")
def plain(saved: tuple[Path, Any]) -> LLM:
    return engine(saved[0], enable_prefix_caching=False)


def engine(path: Path, **changes: Any) -> LLM:
    llm = LLM(str(path), **HOW | {"num_gpu_blocks_override": 800, "max_num_seqs": 4} | changes)
    spoil(llm)
    return llm


def run(llm: LLM, prompts: list[Prompt], **params: Any) -> list[Any]:
    """Tokens, and log-probabilities to the last bit."""
    outputs = answer(llm, prompts, logprobs=2, **{"max_tokens": 12} | params)
    assert not any(output.error for output in outputs)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def pictures(count: int, rows: int = 4, columns: int = 5, seed: int = 0) -> list[vision.TestImage]:
    """Of one size, and as many embeddings as ``rows * columns``."""
    rng, patches = np.random.default_rng(seed), 4 * rows * columns
    return [
        vision.TestImage(
            {
                "pixel_values": rng.standard_normal((patches, 3 * 2 * 4 * 4), np.float32),
                "image_grid_thw": np.array([[1, 2 * rows, 2 * columns]]),
            },
            [300] * (rows * columns),
            grid=(1, rows, columns),
        )
        for _ in range(count)
    ]


def some_prompts() -> list[Prompt]:
    (a, b), (c,) = pictures(2), pictures(1, 7, 3)
    return [[5, 17, 200, 3], [7, 8, a, 9, 30, 31, b, *range(40, 60)], [c, 40, a, 41, 42], [*range(3, 40), b, c, 5]]


def test_logits_of_two_images_are_those_of_transformers(saved: tuple[Path, Any], plain: LLM) -> None:
    prompts = [prompt for prompt in some_prompts() if prompt[-2] != 300][:3]
    for prompt, output in zip(prompts, answer(plain, prompts, prompt_logprobs=5, max_tokens=1), strict=True):
        expected = reference_logits(saved[1], prompt).log_softmax(-1)
        assert output.prompt_logprobs is not None
        for position, found in enumerate(output.prompt_logprobs[1:]):
            ours = {token: one.logprob for token, one in (found or {}).items()}
            assert ours == pytest.approx({token: expected[position, token].item() for token in ours}, abs=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_prompts_in_shares_have_the_bits_of_whole_ones(saved: tuple[Path, Any], plain: LLM, tokens: int) -> None:
    prompts = some_prompts()
    alone = [run(plain, [prompt])[0] for prompt in prompts]
    assert run(plain, prompts) == alone
    seqs = min(4, tokens)
    assert run(engine(saved[0], max_num_batched_tokens=tokens, max_num_seqs=seqs, block_size=32), prompts) == alone


def test_steps_are_recorded(plain: LLM) -> None:
    run(plain, some_prompts())
    steps = plain.engine.executor.worker.runner.device_runner.recorded_steps
    assert steps.can_record and steps._image_step is not None


@pytest.mark.parametrize("position", [1, 2, 3, 16, 17, 21, 22, 25, 44, 45])
def test_a_hit_ends_inside_an_image_with_the_bits_of_none(
    saved: tuple[Path, Any], plain: LLM, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """The images lie at 2 to 22 and at 25 to 45."""
    a, b = pictures(2)
    turn: Prompt = [7, 8, a, 9, 30, 31, b, 32, *range(60, 80)]
    monkeypatch.setattr(Points, "choose", lambda *_: [(position, "prompt")])
    llm = engine(saved[0])
    run(llm, [[7, 8, a, 9, 30, 31, b, 99, 98]], max_tokens=1)
    monkeypatch.setattr(Points, "choose", lambda *_: [])
    (output,) = answer(llm, [turn], max_tokens=1)
    assert output.num_cached_tokens == position
    assert run(llm, [turn]) == run(plain, [turn])
    llm.engine.check_integrity()


@pytest.mark.parametrize("replaced", [0, 1])
def test_another_image_of_the_same_size_hits_nothing_behind_its_place(
    saved: tuple[Path, Any], plain: LLM, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    monkeypatch.setattr("octavo.engine.core.DEFAULT_INTERVAL", 1)  # a state at the end of every step
    *images, other = pictures(3)
    turn: Prompt = [7, 8, images[0], 9, 30, 31, images[1], 32, *range(60, 70)]
    llm = engine(saved[0], max_num_batched_tokens=4)
    assert run(llm, [turn]) == run(plain, [turn])
    (output,) = answer(llm, [turn], max_tokens=1)
    assert output.num_cached_tokens == len(tokens_of(turn)) - 1
    images[replaced] = other
    turn = [7, 8, images[0], 9, 30, 31, images[1], 32, *range(60, 70)]
    (output,) = answer(llm, [turn], max_tokens=1)
    assert output.num_cached_tokens == [2, 25][replaced] // 4 * 4
    assert run(llm, [turn]) == run(plain, [turn])


def test_long_answers_are_those_of_transformers_and_drafts_change_no_bit(saved: tuple[Path, Any], plain: LLM) -> None:
    """Text behind images has other positions than places, also where it is guessed."""
    path, reference = saved
    prompts, asked = some_prompts()[:3], {"max_tokens": 20, "logprobs": 2}
    expected = answer(plain, prompts, **asked)
    assert [one.outputs[0].token_ids for one in expected] == [greedy(reference, prompt, 20) for prompt in prompts]
    llm = engine(path, speculative_config=GUESSES)
    for kind in ("right", "wrong", "half"):
        llm.reset_prefix_cache()
        speculate(llm, Oracle(kind, expected, 320), 3)
        assert all_of(answer(llm, prompts, **asked)) == all_of(expected), kind
    assert llm.totals.spec_decode.num_draft_tokens > sum(llm.totals.spec_decode.num_accepted_per_pos) > 0


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("seed", range(4))
def test_conversations_in_a_pool_of_any_size_give_the_bits_of_no_cache(
    saved: tuple[Path, Any], plain: LLM, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Few images of one size come again and again, in turns that go on or begin anew, in small and large steps."""
    monkeypatch.setattr("octavo.engine.core.DEFAULT_INTERVAL", 8)
    rng, images = random.Random(seed), pictures(3, 3, 3)
    most = plain.engine.executor.kv_layout.most_blocks(LENGTH)
    sizes: dict[str, Any] = {"num_gpu_blocks_override": int(most * rng.choice([1.02, 1.5, 3, 10]))}
    llm = engine(saved[0], max_num_batched_tokens=rng.choice([16, 40, 400]), **sizes)
    histories: list[Prompt] = [[]]
    for _ in range(5):
        turns = list[Prompt]()
        for _ in range(rng.randint(1, 3)):
            history = rng.choice(histories)[: rng.choice([5, 12, 500])]
            more: Prompt = [rng.randrange(3, 60), rng.choice(images), *rng.choices(range(3, 12), k=rng.randint(1, 20))]
            turns.append([*history, *more] if len(tokens_of([*history, *more])) < 150 else more)
        found = run(llm, turns)
        assert found == run(plain, turns)
        llm.engine.check_integrity()
        histories += [[*turn, *tokens] for turn, (tokens, _) in zip(turns, found, strict=True)]
    if sizes["num_gpu_blocks_override"] > 2 * most:
        assert llm.totals.prefix_cache_hits > 0


def test_a_prompt_that_ends_behind_an_image_is_found_again(saved: tuple[Path, Any], plain: LLM) -> None:
    """Where no boundary is known a state is kept at the image's edge, not inside it and not nowhere."""
    (a,) = pictures(1, 9, 9)
    for tail, hit in (([9] * 10, 84), ([9] * 3, 3)):
        llm = engine(saved[0])
        run(llm, [[5, 6, 7, a, *tail]], max_tokens=1)
        turn: Prompt = [5, 6, 7, a, 9, 50, *range(60, 80)]
        (output,) = answer(llm, [turn], max_tokens=1)
        assert output.num_cached_tokens == hit
        assert run(llm, [turn]) == run(plain, [turn])


def test_a_chat_goes_on_behind_its_images(case: str, tmp_path: Path) -> None:
    """From the end of the last message: its images are not computed again."""
    tokenizer = make_tokenizer()
    CASES[case].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    image, begin = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<s>"])
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_token_id": image}))
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    sizes = {"size": {"shortest_edge": 64 * 36, "longest_edge": 64 * 64}, "patch_size": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(sizes))
    options: dict[str, Any] = {"max_model_len": 500, "skip_tokenizer_init": False}
    llm, plain = engine(tmp_path, **options), engine(tmp_path, enable_prefix_caching=False, **options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)

    def show(seed: int) -> dict[str, Any]:
        picture: Image.Image = image_of("RGB", 60, 50, np.random.default_rng(seed))
        return {"type": "image_pil", "image_pil": picture}

    def ask(one: LLM) -> tuple[list[int], int, Any]:
        (output,) = one.chat(chat, params, use_tqdm=False)
        return output.prompt_token_ids, output.num_cached_tokens, output.outputs[0].logprobs

    chat: list[dict[str, Any]] = [{"role": "user", "content": [show(1), show(2), {"type": "text", "text": "which?"}]}]
    asked, _, _ = ask(llm)
    for seed in (3, 4):
        chat += [
            {"role": "assistant", "content": "other words than were said"},
            {"role": "user", "content": [{"type": "text", "text": "and this? "}, show(seed)]},
        ]
        prompt, hit, logprobs = ask(llm)
        assert prompt[: len(asked)] == asked and prompt[:hit].count(image) == asked.count(image)
        assert hit == len(asked) - 1 - asked[::-1].index(begin), "where the answer was opened"
        assert ask(plain)[2] == logprobs
        asked = prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_for_prediction_guesses_beside_images(family: str, tmp_path: Path) -> None:
    """It reads placeholders as tokens, which costs right guesses and no token."""
    case = CASES[family]
    kind, text = case.config_class.replace("Config", "TextConfig"), case.settings["text_config"]
    add_layer(tmp_path, kind, text, case.save(tmp_path))
    plain, llm = engine(tmp_path), not_adapting(engine(tmp_path, speculative_config=MTP, max_num_seqs=12))
    for _ in range(2):
        assert run(llm, some_prompts()) == run(plain, some_prompts())
        llm.engine.check_integrity()
    assert llm.totals.spec_decode.num_draft_tokens > 0 < llm.totals.prefix_cache_hits


@pytest.mark.parametrize("guesses", [{}, {"speculative_config": MTP}], ids=["plain", "mtp"])
def test_two_ranks_answer_as_one(guesses: dict[str, Any], tmp_path: Path) -> None:
    case = CASES["qwen3.5"]
    add_layer(tmp_path, "Qwen3_5TextConfig", case.settings["text_config"], case.save(tmp_path))
    one, two = engine(tmp_path), LLM(str(tmp_path), tensor_parallel_size=2, **HOW, **guesses, max_num_seqs=12)
    for _ in range(2):  # the second time with what is in the prefix caches
        tokens = [[tokens for tokens, _ in run(llm, some_prompts())] for llm in (one, two)]
        assert tokens[0] == tokens[1]
    assert bool(guesses) == (two.totals.spec_decode.num_draft_tokens > 0)
