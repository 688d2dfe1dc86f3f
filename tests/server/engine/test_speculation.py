"""Speculation changes no token and no log-probability, whatever is guessed, in float32 and with packed weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.encoders import make_encoder
from support.examples import examples_of
from support.overlapped import PARAMS, overlapped, prompts_of, tiny
from support.speculation import Oracle, accepted, all_of, drafts_of, speculate
from support.tiny_models import FAMILIES, VOCAB_SIZE

from octavo import LLM, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.spec_decode.drafts import Drafts
from octavo.core.spec_decode.lengths import StepTimes
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.interface.engine_config import SpeculativeConfig
from octavo.interface.step import SchedulerOutput
from octavo.interface.structured_output import StructuredOutputsParams
from octavo.metrics.prometheus import EngineMetrics
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.suffix import SuffixDrafter

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFTERS = ("right", "wrong", "half")


def check(llm: LLM, prompts: list[Any], params: list[SamplingParams], ks: range, kinds: Any = DRAFTERS) -> None:
    plain = speculate(llm, None, 0).generate(prompts, params, use_tqdm=False)
    for k in ks:
        for kind in kinds:
            counted = llm.totals.spec_decode
            drafts_before, accepted_before = counted.num_draft_tokens, counted.num_accepted_tokens
            speculate(llm, Oracle(kind, plain, llm.config.model.vocab_size), k)
            assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(plain), (kind, k)
            llm.engine.check_integrity()
            drafts, right = accepted(llm)
            drafts, right = drafts - drafts_before, right - accepted_before
            assert drafts > 0 and (kind == "half" or right == (drafts if kind == "right" else 0))


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_changes_a_token(family: str, greedy: bool, tiny_checkpoints: dict[str, Path]) -> None:
    llm = tiny(tiny_checkpoints[family], enable_prefix_caching=False)
    prompts = prompts_of(family, 4)
    common: dict[str, Any] = {"max_tokens": 25, "ignore_eos": True, "logprobs": 2}
    params = [SamplingParams(temperature=0 if greedy else 0.7, seed=i, **common) for i in range(4)]
    check(llm, prompts, params, range(1, 8) if family == "llama" else range(3, 8, 4))
    check(llm, prompts[:1], params[:1], range(2, 8, 5))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "chunks": ("llama", {"enable_prefix_caching": False, "long_prefill_token_threshold": 7}),
    "preempted": ("qwen3", {"num_gpu_blocks_override": 14, "max_model_len": 208}),
    "windows": ("gemma2", {"num_gpu_blocks_override": 34, "max_model_len": 208, "long_prefill_token_threshold": 7}),
    "few rows": ("llama", {"max_num_seqs": 3}),
    "one row": ("llama", {"max_num_seqs": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_nor_does_it_with_requests_of_every_kind(case: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Penalties, bias, top-k, top-p, min-p, stops, min_tokens, n = 3, prompt_logprobs: all in one batch."""
    family, changes = CASES[case]
    llm = tiny(tiny_checkpoints[family], **changes)
    prompts = prompts_of(family, len(PARAMS) + 1)
    more = {"temperature": 0.8, "frequency_penalty": 0.9, "seed": 8, "max_tokens": 30, "logprobs": 3, "n": 2}
    params = [SamplingParams(**values) for values in (*PARAMS, more)]
    check(llm, prompts, params, range(1, 6, 2))
    assert case != "preempted" or llm.totals.num_preemptions > 0


def test_right_drafts_are_all_accepted_in_as_few_steps_as_that_takes(tiny_checkpoints: dict[str, Path]) -> None:
    llm = tiny(tiny_checkpoints["llama"])
    prompt, params = prompts_of("steps", 1), SamplingParams(temperature=0.8, seed=1, max_tokens=41, ignore_eos=True)
    plain = llm.generate(prompt, params, use_tqdm=False)
    for k in range(1, 8):
        before = llm.engine.num_steps
        speculate(llm, Oracle("right", plain, VOCAB_SIZE), k).generate(prompt, params, use_tqdm=False)
        assert llm.engine.num_steps - before == 1 + -(-40 // (k + 1)), "the prompt's step, and k + 1 tokens a step"


class FreeTokens(StepTimes):
    """A step takes as long with a guess as without: what a busy machine has taught must not end the guessing here."""

    def line(self) -> tuple[float, float]:
        return 1.0, 1e-6

    def seconds(self, rows: int, line: tuple[float, float]) -> float:
        return 1.0


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[LLM, LLM]]:
    """The packed model on a CPU, without and with prompt lookup."""
    sizes: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 1024, "num_gpu_blocks_override": 256}
    plain, speculative = LLM(speculative_config={"method": "none"}, **sizes), LLM(speculative_config=NGRAM, **sizes)
    drafts_of(speculative)._lengths.times = FreeTokens()
    yield plain, speculative


TEXT = (
    "Whales are mammals. They breathe air through blowholes, and they nurse their young. The blue whale is the largest "
    "animal that has ever lived. It eats krill, which it filters from the water. "
)
PROMPTS = [
    f"Repeat the text word by word: {TEXT}\nThe text is: {TEXT[:40]}",
    f"{TEXT}\nIn short: whales are",
    "The capital of France is",
    '[{"name": "a", "size": 1}, {"name": "b", "size": 2}, {"name":',
]


@pytest.mark.model
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 5},
        {"temperature": 0.7, "seed": 11},
        {"temperature": 0.7, "seed": 12, "top_p": 0.9, "top_k": 50, "logprobs": 1},
        {"temperature": 0.7, "seed": 13, "n": 3},
        {"temperature": 0, "stop": ["breathe air", "\n", " is the"]},
        {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3},
        {"temperature": 0, "bad_words": ["blue whale", "air"], "min_tokens": 20},
        {"temperature": 0, "prompt_logprobs": 1},
    ],
    ids=lambda values: ",".join(values),
)
def test_prompt_lookup_changes_nothing_with_packed_weights(embedded: tuple[LLM, LLM], values: dict[str, Any]) -> None:
    plain, speculative = embedded
    params = SamplingParams(max_tokens=60, **values)
    before = accepted(speculative)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    assert all_of(speculative.generate(PROMPTS, params, use_tqdm=False)) == all_of(expected)
    alone = [speculative.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [one[1] for one in all_of(alone)] == [one[1] for one in all_of(expected)], "one request at a time"
    assert accepted(speculative)[1] > before[1], "no guess was right: nothing is shown"
    speculative.engine.check_integrity()


@pytest.mark.model
@pytest.mark.parametrize(
    "values", [{"temperature": 0, "logprobs": 2}, {"temperature": 0.7, "seed": 11, "n": 2}], ids=str
)
def test_nor_do_guesses_from_recent_answers(
    embedded: tuple[LLM, LLM], values: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Asked together, and then again one by one, when what was answered before is known."""
    plain, speculative = embedded
    scheduler = speculative.engine.scheduler
    assert isinstance(scheduler, Scheduler)
    drafts = Drafts(SuffixDrafter(24, 99, 1.0, 0.1), 4, speculative.config.model.vocab_size)
    request.addfinalizer(partial(scheduler.use_drafts, scheduler.drafts))
    scheduler.use_drafts(drafts)
    params, before = SamplingParams(max_tokens=60, **values), accepted(speculative)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    assert all_of(speculative.generate(PROMPTS, params, use_tqdm=False)) == all_of(expected)
    alone = [speculative.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [one[1] for one in all_of(alone)] == [one[1] for one in all_of(expected)]
    tokens, right = (now - then for now, then in zip(accepted(speculative), before, strict=True))
    assert 100 < right < tokens
    speculative.engine.check_integrity()


WORDS = ("name", "size", "city", "tags", "note", "count")


def some_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of the kinds that people write: objects, lists, choices, numbers, texts with patterns and lengths."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(3, 30)},
        {"type": "string", "pattern": rng.choice(["^[a-z]{2,8}$", "^(Mr|Ms) [A-Z][a-z]+$", "^[0-9]{4}-[0-9]{2}$"])},
        {"type": "integer", "minimum": 0, "maximum": rng.choice([9, 100, 5000])},
        {"type": "boolean"},
        {"enum": rng.sample(["red", "green", "blue", "redder", 1, None], 3)},
        {"anyOf": [{"type": "null"}, {"type": "number"}]},
    ]
    if depth < 2:
        kinds += [{"type": "array", "items": some_schema(rng, depth + 1), "maxItems": rng.randint(1, 4)}]
        kinds += [some_object(rng, depth + 1)]
    return rng.choice(kinds)


def some_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: some_schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def structured(schema: dict[str, Any], number: int) -> SamplingParams:
    """Greedy, or drawn, some of several samples, of a length that cuts some answers."""
    return SamplingParams(
        temperature=0 if number % 2 else 0.9,
        seed=number,
        n=1 + (number % 7 == 0),
        max_tokens=20 + number % 30,
        logprobs=1 if number % 5 == 0 else None,
        structured_outputs=StructuredOutputsParams(json=schema),
        repetition_penalty=1.1 if number % 6 == 0 else 1.0,
    )


@pytest.mark.model
@pytest.mark.slow
def test_answers_to_many_schemas_are_the_same(embedded: tuple[LLM, LLM]) -> None:
    plain, speculative = embedded
    rng, count = random.Random(27), examples_of(40)
    params = [structured(some_object(rng), number) for number in range(count)]
    prompts = [f"{PROMPTS[number % 4]} Answer in JSON." for number in range(count)]
    before = accepted(speculative)
    expected = plain.generate(prompts, params, use_tqdm=False)
    assert all_of(speculative.generate(prompts, params, use_tqdm=False)) == all_of(expected)
    assert accepted(speculative)[1] > before[1]
    speculative.engine.check_integrity()


@pytest.mark.model
def test_drafts_that_a_grammar_forbids_are_not_computed(
    embedded: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, llm = embedded
    monkeypatch.setattr("octavo.worker.grammars.sequences.CUT_SECONDS", 30.0)
    choice = StructuredOutputsParams(choice=["whales sing in the cold and dark sea"])
    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs=choice)
    expected = plain.generate(PROMPTS[2], params, use_tqdm=False)
    computed, worker = list[tuple[int, int]](), llm.engine.executor.worker
    execute = worker.execute_model

    def watched(step: SchedulerOutput) -> Any:
        computed.append((step.total_num_scheduled_tokens, sum(map(len, step.scheduled_spec_decode_tokens.values()))))
        return execute(step)

    monkeypatch.setattr(worker, "execute_model", watched)
    before, drafts = accepted(llm), llm.engine.scheduler.drafts
    for kind, num_tokens in (("wrong", 1), ("right", 4)):
        del computed[:]
        speculate(llm, Oracle(kind, expected, llm.config.model.vocab_size), 3)
        assert all_of(llm.generate(PROMPTS[2], params, use_tqdm=False)) == all_of(expected)
        assert all(total == 1 + guessed for total, guessed in computed[1:])
        assert max(total for total, _ in computed[1:]) == num_tokens
    llm.engine.scheduler.use_drafts(drafts)
    assert accepted(llm)[0] > before[0] + 10, "those were asked for all the same"


@pytest.mark.model
def test_a_grammar_follows_guesses_and_goes_back(embedded: tuple[LLM, LLM]) -> None:
    """Right ones, wrong ones that it allows, and forbidden ones, up to the end of its text and beyond."""
    plain, _ = embedded
    schemas = [some_object(random.Random(number)) for number in range(6)]
    params = [structured(schema, 2 * number + 1) for number, schema in enumerate(schemas)]
    params.append(SamplingParams(temperature=0, max_tokens=60))
    prompts = [f"{number} {PROMPTS[number % 4]}" for number in range(7)]
    llm = LLM(
        max_num_seqs=32,
        max_model_len=1024,
        num_gpu_blocks_override=256,
        speculative_config={**NGRAM, "num_speculative_tokens": 5},
    )
    expected = speculate(plain, None, 0).generate(prompts, params, use_tqdm=False)
    for kind in DRAFTERS:
        speculate(llm, Oracle(kind, expected, llm.config.model.vocab_size), 5)
        before = accepted(llm)
        steps = llm.engine.num_steps
        assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(expected), kind
        drafts, right = (now - then for now, then in zip(accepted(llm), before, strict=True))
        assert drafts > 0 and (kind == "wrong") == (right == 0)
        # The last token of a text that is complete is not followed.
        assert kind != "right" or (llm.engine.num_steps - steps < 30 and right >= 0.8 * drafts)


@pytest.mark.model
def test_grammars_go_without_guesses_beside_others_where_steps_overlap(embedded: tuple[LLM, LLM]) -> None:
    """On the runner of GPUs, here on a CPU, which also weighs by itself whether to wait for what guesses follow."""
    plain, _ = embedded
    schema = some_object(random.Random(3))
    params = [
        structured(schema, 2 * number + 1) if number % 2 else SamplingParams(max_tokens=50) for number in range(4)
    ]
    for number, one in enumerate(params):
        one.temperature, one.seed = 0.5 * (number // 2), number
    expected = speculate(plain, None, 0).generate(PROMPTS, params, use_tqdm=False)
    llm = overlapped(LLM(max_num_seqs=32, max_model_len=1024, num_gpu_blocks_override=256, speculative_config=NGRAM))
    drafts_of(llm)._lengths.times = FreeTokens()
    assert all_of(llm.generate(PROMPTS, params, use_tqdm=False)) == all_of(expected)
    assert accepted(llm)[1] > 0
    speculate(llm, Oracle("half", expected, llm.config.model.vocab_size), 4)
    before = accepted(llm)
    assert all_of(llm.generate(PROMPTS, params, use_tqdm=False)) == all_of(expected)
    assert accepted(llm) > before
    llm.engine.check_integrity()


@pytest.mark.model
def test_metrics_tell_of_drafts(embedded: tuple[LLM, LLM]) -> None:
    plain, speculative = embedded
    speculative.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert not [m for m in plain.get_metrics() if "spec_decode" in m.name]
    found = {m.name.removeprefix("vllm:spec_decode_"): m for m in speculative.get_metrics() if "spec_decode" in m.name}
    assert set(found) == {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"}
    drafts, tokens, right = (found[n].value for n in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    assert 0 < drafts <= tokens <= 4 * drafts and 0 < right <= tokens
    per_pos = found["num_accepted_tokens_per_pos"].values
    assert len(per_pos) == 4 and sum(per_pos) == right and per_pos == sorted(per_pos, reverse=True)
    assert per_pos[0] <= drafts


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "ngrm", "num_speculative_tokens": 4}, "method 'ngrm' is not there; there are none, ngram"),
        ({"method": "dflash", "num_speculative_tokens": 4}, "method 'dflash' is not there; there are none, ngram"),
        ({"num_speculative_tokens": 4}, "needs a method; there are none, ngram, suffix"),
        ({**NGRAM, "suffix_decoding_max_spec_factor": 2}, "suffix_decoding_max_spec_factor is not of method ngram"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "must be a number from 0 to 1, got 2"),
        ({**NGRAM, "prompt_lookup_mx": 4}, "no key 'prompt_lookup_mx'; did you mean prompt_lookup_max"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 64, got 0"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({**NGRAM, "prompt_lookup_min": 5}, "prompt_lookup_min 5 is above prompt_lookup_max 4"),
        ({**NGRAM, "prompt_lookup_min": "2"}, "prompt_lookup_min must be an integer from 1 to 64, got '2'"),
        ("ngram", "must be a JSON object"),
    ],
)
def test_contradicting_settings_are_refused_by_name(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineArgs(speculative_config=config).create_engine_config()


def test_more_guesses_than_positions_are_refused(tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens 9 must be below max_model_len \(8\)"):
        tiny(tiny_checkpoints["llama"], max_model_len=8, speculative_config={**NGRAM, "num_speculative_tokens": 9})


@pytest.mark.parametrize("case", CASES)
def test_nor_does_it_where_steps_overlap(case: str, tiny_checkpoints: dict[str, Path]) -> None:
    """On the runner of GPUs, here on a CPU: drafts are verified by captured steps, and beside prompts."""
    family, changes = CASES[case]
    config = {**NGRAM, "num_speculative_tokens": 7}
    llm = overlapped(tiny(tiny_checkpoints[family], speculative_config=config, **changes))
    prompts = prompts_of(family, len(PARAMS) + 1)
    more = {"temperature": 0.8, "logit_bias": {7: 2.0}, "seed": 8, "max_tokens": 30, "logprobs": 3, "n": 2}
    params = [SamplingParams(**values) for values in (*PARAMS, more)]
    check(llm, prompts, params, range(1, 8, 3))
    assert case != "preempted" or llm.totals.num_preemptions > 0


def test_an_encoder_has_nothing_to_guess(tmp_path: Path) -> None:
    make_encoder("roberta", tmp_path)
    with pytest.raises(ConfigError, match=r"speculative_config: .* generates no text; leave it out"):
        LLM(str(tmp_path), speculative_config=NGRAM)


def test_suffix_guesses_as_vllm_does_by_default(tiny_checkpoints: dict[str, Path]) -> None:
    """And changes nothing, with an answer that has been given before."""
    llm = tiny(tiny_checkpoints["llama"], speculative_config={"method": "suffix"})
    assert llm.config.speculative.num_speculative_tokens == 24
    scheduler = llm.engine.scheduler
    assert isinstance(scheduler, Scheduler) and scheduler.drafts is not None
    scheduler.drafts._lengths = None  # how long steps take on this machine decides nothing here
    prompts, params = prompts_of("suffix", 2), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first = llm.generate(prompts, params, use_tqdm=False)
    before = accepted(llm)
    assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(first)
    drafts, right = (now - then for now, then in zip(accepted(llm), before, strict=True))
    assert 40 < right >= drafts - 2, "few tokens were not guessed, and what more than one token told of was right"
    llm.engine.check_integrity()


def test_one_line_says_what_a_cpu_does_by_default(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = SpeculativeConfig("ngram", 4, 4, 2)
    for default in (SpeculativeConfig(), on):
        monkeypatch.setattr("octavo.worker.worker.DEFAULT_ON_CPU", default)
        llm = tiny(tiny_checkpoints["llama"])
        assert llm.engine.executor.worker, "in this process, where the default is another one now"
        assert llm.config.speculative == default
        metrics = EngineMetrics(EngineArgs(str(tiny_checkpoints["llama"])).create_engine_config(), "m")
        metrics.record_cache(llm.config, 9, 1)  # when the device is known
        assert (b"spec_decode_num_drafts_total" in metrics.expose()) == default.is_on
    assert not tiny(tiny_checkpoints["llama"], speculative_config={"method": "none"}).config.speculative.is_on


def test_method_none_is_off(tiny_checkpoints: dict[str, Path]) -> None:
    llm = tiny(tiny_checkpoints["llama"], speculative_config={"method": "none"})
    assert not llm.config.speculative.is_on and llm.engine.scheduler.drafts is None


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1, 2]),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8, 1]),  # the longest end, not the latest place
        ([2, 3, 9, 2, 3, 8, 2, 3], [8, 2, 3, 8, 2]),  # among equals the latest
        ([5, 5, 5], [5, 5, 5, 5, 5]),  # round and round
        ([1, 2, 1, 3, 1], []),  # one token alone is too short
        ([1], []),
    ],
)
def test_prompt_lookup_continues_where_the_last_tokens_stood(tokens: list[int], expected: list[int]) -> None:
    def drafter() -> NgramDrafter:
        ngram = NgramDrafter(2, 4)
        ngram.start("0#r", b"", 1)
        return ngram

    assert drafter().propose("0#r", tokens, 5) == expected
    growing = drafter()
    for length in range(1, len(tokens)):
        growing.propose("0#r", tokens[:length], 5)
    assert growing.propose("0#r", tokens, 5) == expected
