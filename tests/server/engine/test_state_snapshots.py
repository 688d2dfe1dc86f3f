"""Prefixes of models with recurrent layers: a hit ends at a snapshot of the state, and gives the bits of no hit."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.agent_chats import WORDS, tokenizer
from support.family_cases import FAMILY_CASES
from support.hybrids import HYBRIDS, LENGTH, engine, prompts, run
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams
from octavo.core.states.points import Points


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    config_class, settings = FAMILY_CASES[request.param]
    make_model(config_class, settings | {"max_position_embeddings": 4096}).save_pretrained(path)
    tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": tokenizer().chat_templates["default"]}))
    return str(path)


@pytest.fixture(scope="module")
def plain(model: str) -> LLM:
    return engine(model, enable_prefix_caching=False)


def cached_tokens(llm: LLM, prompt: Any, **params: Any) -> int:
    asked = SamplingParams(temperature=0.0, max_tokens=1, **params)
    return llm.generate([prompt], asked, use_tqdm=False)[0].num_cached_tokens


def tokens_of(prompt: Any) -> list[int]:
    return list(prompt["prompt_token_ids"])


def test_the_turn_after_begins_where_the_answer_or_the_prompt_ended(model: str, plain: LLM) -> None:
    (prompt,), (more,) = prompts(70), prompts(9)
    llm = engine(model)
    ((answer, _),) = run(llm, [prompt], max_tokens=20)[0]
    replayed = {"prompt_token_ids": tokens_of(prompt) + list(answer) + tokens_of(more)}
    rendered_anew = {"prompt_token_ids": tokens_of(prompt) + list(answer[3:]) + tokens_of(more)}
    for turn, hit in ((replayed, 88), (rendered_anew, 48)):
        found = llm.generate([turn], SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens
        assert found == hit
        assert run(llm, [turn]) == run(plain, [turn])


def test_a_chat_goes_on_from_its_last_round_or_question(model: str) -> None:
    """The next round begins with all that was there; a new question drops the thoughts since the last one."""
    rng = random.Random(5)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=70))

    def ask(llm: LLM) -> tuple[list[int], int, list[tuple[Any, Any]]]:
        (output,) = llm.chat(chat, params, use_tqdm=False)
        answers = [(one.token_ids, one.cumulative_logprob) for one in output.outputs]
        return output.prompt_token_ids, output.num_cached_tokens, answers

    sizes = {"max_model_len": 3000, "skip_tokenizer_init": False}
    llm, plain = engine(model, **sizes), engine(model, enable_prefix_caching=False, **sizes)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    chat = [{"role": "system", "content": text()}, {"role": "user", "content": text()}]
    asked, _, _ = ask(llm)
    for more in ([{"role": "tool", "tool_call_id": "1", "content": text()}], [{"role": "user", "content": text()}]) * 2:
        chat += [{"role": "assistant", "content": text(), "reasoning_content": text()}, *more]
        prompt, hit, answers = ask(llm)
        pairs = enumerate(zip(asked, prompt, strict=False))
        common = next((i for i, (ours, theirs) in pairs if ours != theirs), len(asked))
        assert common - 70 <= hit <= common, "a hit ends at the boundary before the first difference"
        assert ask(plain)[2] == answers
        asked = prompt


@pytest.mark.parametrize("position", [1, 15, 16, 17, 32, 69])
@pytest.mark.parametrize("diverges", [-1, 0, 1])
def test_a_hit_ends_at_a_snapshot_at_any_token(
    model: str, plain: LLM, monkeypatch: pytest.MonkeyPatch, position: int, diverges: int
) -> None:
    (prompt,), (tail,) = prompts(70), prompts(30)
    monkeypatch.setattr(Points, "choose", lambda *_: [(position, "prompt")])
    llm = engine(model)
    run(llm, [prompt], max_tokens=1)
    monkeypatch.setattr(Points, "choose", lambda *_: [])
    shared = tokens_of(prompt)[: max(0, position + diverges)]
    other = [token for token in tokens_of(tail) if token != tokens_of(prompt)[len(shared) % 70]]
    turn = {"prompt_token_ids": shared + other}
    expected = run(plain, [turn])
    found = llm.generate([turn], SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens
    assert found == (position if diverges >= 0 else 0)
    assert run(llm, [turn]) == expected


def test_another_salt_hits_nothing(model: str) -> None:
    (prompt,) = prompts(70)
    llm = engine(model)
    for salt, hit in ((None, 0), ("a", 0), ("b", 0), ("a", 69), (None, 69)):
        salted = prompt if salt is None else prompt | {"cache_salt": salt}
        assert cached_tokens(llm, salted, ignore_eos=True) == hit


def test_the_third_prompt_hits_what_two_share(model: str, plain: LLM) -> None:
    (shared,), tails = prompts(90), prompts(60, 61, 62)
    llm = engine(model)
    some = [{"prompt_token_ids": tokens_of(shared) + tokens_of(tail)} for tail in tails]
    assert [cached_tokens(llm, one) for one in some] == [0, 0, 90]
    assert run(llm, some) == run(plain, some)


def test_a_reset_forgets_snapshots(model: str) -> None:
    (prompt,) = prompts(70)
    llm = engine(model)
    assert [cached_tokens(llm, prompt), cached_tokens(llm, prompt)] == [0, 69]
    assert llm.reset_prefix_cache()
    assert cached_tokens(llm, prompt) == 0


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("seed", range(4))
def test_conversations_in_a_pool_of_any_size_give_the_bits_of_no_cache(model: str, plain: LLM, seed: int) -> None:
    """Turns that replay answers or render them anew, samples, and company, where snapshots are evicted and sequences
    preempted."""
    rng = random.Random(seed)
    most = plain.engine.executor.kv_layout.most_blocks(LENGTH)
    sizes = {"num_gpu_blocks_override": int(most * rng.choice([1.02, 1.5, 3, 10])), "block_size": rng.choice([16, 32])}
    llm = engine(model, max_num_batched_tokens=rng.choice([16, 40, 400]), **sizes)
    histories: list[list[int]] = [[]]
    for _ in range(6):
        turns = []
        for _ in range(rng.randint(1, 3)):
            history = rng.choice(histories)[: rng.choice([10, 33, 500])]
            more = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
            turns.append({"prompt_token_ids": (history + more)[-150:]})
        params = {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 1, 3]), "temperature": 0.7, "seed": 1}
        found = run(llm, turns, **params)
        assert found == run(plain, turns, **params)
        histories += [turn["prompt_token_ids"] + list(one[0][0]) for turn, one in zip(turns, found, strict=True)]
    if sizes["num_gpu_blocks_override"] > 2 * most:
        assert llm.totals.prefix_cache_hits > 0
