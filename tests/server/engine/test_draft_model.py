"""A draft model changes no token and no log-probability, whatever it is; one of the same mind is always right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encoders import make_encoder
from support.overlapped import CASES as OVERLAPPED
from support.overlapped import PARAMS, overlapped, prompts_of, tiny
from support.speculation import all_of, cut_gguf
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.interface.structured_output import StructuredOutputsParams
from octavo.memory.dry_run import make_plan
from octavo.memory.ledger import this_machine
from octavo.plan.measure import measure
from octavo.worker.model_runner import ModelRunner
from octavo.worker.worker import Worker


def drafting(target: Path, draft: Path, k: int, adapting: bool = False, **changes: Any) -> LLM:
    """``adapting``: guess only as much as pays; otherwise wherever there is room."""
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k}
    llm = tiny(target, speculative_config=config, **changes)
    return llm if adapting else not_adapting(llm)


def not_adapting(llm: LLM) -> LLM:
    scheduler = llm.engine.scheduler
    assert isinstance(scheduler, Scheduler) and scheduler.drafts is not None
    scheduler.drafts._lengths = None
    return llm


def drafts_of(llm: LLM) -> tuple[int, int]:
    """(drafts, accepted ones) so far."""
    return llm.totals.spec_decode.num_draft_tokens, llm.totals.spec_decode.num_accepted_tokens


def check(plain: LLM, llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> float:
    """That ``llm`` says what ``plain`` says. Returns the share of its guesses that were right."""
    before, expected = drafts_of(llm), plain.generate(prompts, params, use_tqdm=False)
    assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(expected)
    llm.engine.check_integrity()
    drafts, right = (after - then for after, then in zip(drafts_of(llm), before, strict=True))
    assert drafts > 0
    return right / drafts


def penalised(params: SamplingParams) -> bool:
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    return bool(penalties or params.shapes_logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_best_drafter_of_itself_and_another_one_does_no_harm(
    family: str, tiny_checkpoints: dict[str, Path]
) -> None:
    path, prompts = tiny_checkpoints[family], prompts_of(family, 4)
    other = tiny_checkpoints["qwen3" if family == "llama" else "llama"]
    settings: dict[str, Any] = {"enable_prefix_caching": False}
    plain = tiny(path, **settings)
    common: dict[str, Any] = {"max_tokens": 25, "ignore_eos": True, "logprobs": 2}
    params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, **common) for i in range(4)]
    assert check(plain, drafting(path, path, 3, **settings), prompts, params) == 1.0
    assert check(plain, drafting(path, other, 3, **settings), prompts, params) < 0.5
    if family == "llama":
        adapting = drafting(path, other, 3, adapting=True, **settings)
        check(plain, adapting, prompts, params)
        assert drafts_of(adapting)[0] < 50, "of 300 it would be asked for: it is left alone soon"


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "chunks": ("llama", {"enable_prefix_caching": False, "long_prefill_token_threshold": 7}),
    "small steps": ("llama", {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 12}),
    "preempted": ("qwen3", {"num_gpu_blocks_override": 14, "max_model_len": 208}),
    "windows": ("gemma2", {"num_gpu_blocks_override": 34, "max_model_len": 208, "long_prefill_token_threshold": 7}),
    "one row": ("llama", {"max_num_seqs": 1}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("itself", "k"), [(True, 1), (True, 5), (False, 3)])
def test_nor_does_it_with_requests_of_every_kind(
    case: str, itself: bool, k: int, tiny_checkpoints: dict[str, Path]
) -> None:
    """Penalties, bias, top-k, top-p, min-p, stops, min_tokens, n = 3, prompt_logprobs: all in one batch, then again
    with cached prefixes and without what may surprise a drafter of the same mind: penalties, and samples of a prompt
    that small steps have left it no time to read."""
    family, changes = CASES[case]
    path, prompts = tiny_checkpoints[family], prompts_of(family, len(PARAMS) + 1)
    more = {"temperature": 0.8, "frequency_penalty": 0.9, "seed": 8, "max_tokens": 30, "logprobs": 3, "n": 2}
    params = [SamplingParams(**values) for values in (*PARAMS, more)]
    plain = tiny(path, **changes)
    llm = drafting(path, path if itself else tiny_checkpoints["opt"], k, **changes)
    assert check(plain, llm, prompts, params) > (0.7 if itself and case != "small steps" else -1)
    tame = [i for i, one in enumerate(params) if not penalised(one) and (one.n == 1 or case != "small steps")]
    right = check(plain, llm, [prompts[i] for i in tame], [params[i] for i in tame])
    assert right == 1.0 if itself else right < 0.5
    assert case != "preempted" or not itself or llm.totals.num_preemptions > 0


def test_right_guesses_are_all_accepted_in_as_few_steps_as_that_takes(tiny_checkpoints: dict[str, Path]) -> None:
    path = tiny_checkpoints["llama"]
    prompt, params = prompts_of("steps", 1), SamplingParams(temperature=0.8, seed=1, max_tokens=41, ignore_eos=True)
    for k in range(1, 8, 2):
        llm = drafting(path, path, k, adapting=True)
        for _ in range(2):  # without and with a cached prefix
            before = llm.engine.num_steps
            llm.generate(prompt, params, use_tqdm=False)
            assert llm.engine.num_steps - before == 1 + -(-40 // (k + 1)), "the prompt's step, and k + 1 tokens a step"


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("case", OVERLAPPED)
@pytest.mark.parametrize(("itself", "k"), [(True, 3), (False, 5)])
def test_a_drafter_on_the_device_changes_nothing_either(
    case: str, itself: bool, k: int, tiny_checkpoints: dict[str, Path]
) -> None:
    """On the runner of GPUs, here on a CPU: the host knows how many tokens a step has brought one step late."""
    family, changes = OVERLAPPED[case]
    path, prompts = tiny_checkpoints[family], prompts_of(family, len(PARAMS) + 1)
    more = {"temperature": 0.8, "frequency_penalty": 0.9, "seed": 8, "max_tokens": 30, "logprobs": 3, "n": 2}
    params = [SamplingParams(**values) for values in (*PARAMS, more)]
    plain = overlapped(tiny(path, **changes))
    draft = path if itself else tiny_checkpoints["opt"]
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k}
    llm = not_adapting(overlapped(tiny(path, speculative_config=config, **changes)))
    known = [i for i, one in enumerate(params) if not one.shapes_logits]  # of other shapes it knows nothing
    for some in (known, known, range(len(params))):  # the second time prompts are found in the cache
        share = check(plain, llm, [prompts[i] for i in some], [params[i] for i in some])
        # Of tokens of a step without guesses the drafter knows the last two alone; some of those preempted, too.
        least = {"few rows": 0.6, "preempted": 0.9}.get(case, 1.0) if some is known else 0.6
        assert share >= (least if itself else 0)


def test_windows_of_one_position_are_refused_on_the_device(tmp_path: Path) -> None:
    """The drafter reads the last two tokens, of which such a window has passed one: its block may be another's."""
    config, settings = FAMILIES["gemma2"]
    make_model(config, settings | {"sliding_window": 1}).save_pretrained(tmp_path)
    llm = drafting(tmp_path, tmp_path, 2)
    with pytest.raises(ConfigError, match="needs windows of 2 positions or more on GPUs"):
        overlapped(llm)


def test_a_drafter_that_fails_costs_no_request(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = tiny_checkpoints["llama"], prompts_of("fails", 3)
    params = [SamplingParams(temperature=0, max_tokens=20)] * 3
    llm = drafting(path, path, 4)
    runner = llm.engine.executor.worker.runner
    assert isinstance(runner, ModelRunner) and runner.drafter is not None
    sample, calls = runner.drafter._runner.sample, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) % 3:
            raise RuntimeError("no")
        return sample(*args)

    monkeypatch.setattr(runner.drafter._runner, "sample", failing)
    expected = tiny(path).generate(prompts, params, use_tqdm=False)
    assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(expected)
    assert len(calls) > 3


def test_weights_that_are_no_numbers_guess_nothing(tiny_checkpoints: dict[str, Path]) -> None:
    path, prompts = tiny_checkpoints["llama"], prompts_of("nan", 2)
    params = [SamplingParams(temperature=0.5 * i, seed=1, max_tokens=20) for i in range(2)]
    llm = drafting(path, tiny_checkpoints["qwen2"], 4)
    runner = llm.engine.executor.worker.runner
    assert isinstance(runner, ModelRunner) and runner.drafter is not None
    with torch.no_grad():
        runner.drafter._runner.model.model.norm.weight.fill_(float("nan"))
    expected = tiny(path).generate(prompts, params, use_tqdm=False)
    assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(expected)


def test_a_short_drafter_stops_guessing_where_it_ends(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    config, settings = FAMILIES["llama"]
    make_model(config, settings | {"max_position_embeddings": 24}, seed=3).save_pretrained(tmp_path)
    path, prompts = tiny_checkpoints["llama"], [{"prompt_token_ids": [5] * 10}]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)]
    check(tiny(path), drafting(path, tmp_path, 4), prompts, params)


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's first 6 of 30 layers."""
    source = Path(EngineArgs().create_engine_config().model.files.weights[0])
    return cut_gguf(source, tmp_path_factory.mktemp("cut") / "six.gguf", 6)


@pytest.fixture(scope="module")
def embedded(six_layers: Path) -> Iterator[tuple[LLM, list[LLM]]]:
    """The packed model, without a drafter, with itself, and with its first 6 layers."""
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512, "num_gpu_blocks_override": 256}
    llms = [
        not_adapting(LLM(speculative_model=str(model), num_speculative_tokens=3, **sizes))
        for model in ("smollm2-135m-instruct", six_layers)
    ]
    yield LLM(**sizes), llms


TEXTS = ["The capital of France is", "Repeat: one two three one two three one", "def add(a, b):"]


@pytest.mark.sampled(share=3)
@pytest.mark.model
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.7, "seed": 12, "top_p": 0.9, "n": 2},
        {"temperature": 0, "repetition_penalty": 1.1, "stop": [" is the", "three one"], "bad_words": ["Paris"]},
    ],
    ids=lambda values: ",".join(values),
)
def test_packed_weights(embedded: tuple[LLM, list[LLM]], values: dict[str, Any]) -> None:
    plain, (itself, first_layers) = embedded
    params = [SamplingParams(max_tokens=24, **values)] * len(TEXTS)
    assert check(plain, itself, TEXTS, params) > (0.8 if "bad_words" in values else 0.999)
    check(plain, first_layers, TEXTS, params)
    for llm in (itself, first_layers):
        assert llm.engine.executor.recording_obstacle is None, "both models' steps are recorded"


@pytest.mark.model
def test_a_grammar_beside_it(embedded: tuple[LLM, list[LLM]]) -> None:
    plain, (itself, _) = embedded
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    grammar = SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputsParams(json=schema))
    check(plain, itself, TEXTS, [grammar, SamplingParams(temperature=0, max_tokens=30), grammar])


@pytest.mark.model
def test_the_plan_is_the_ledger(six_layers: Path) -> None:
    args = EngineArgs(speculative_model=str(six_layers), num_speculative_tokens=3, kv_cache_memory_bytes=64 << 20)
    config = replace(args.create_engine_config(), device="cpu")
    worker = Worker(config)
    plan = make_plan(config, this_machine(), measure)
    assert plan.ledger is not None and plan.ledger.shares() == worker.ledger.shares()
    assert plan.ledger.num_blocks == worker.ledger.num_blocks
    assert 0 < worker.ledger.drafter < worker.ledger.weights / 2
    assert any(line.startswith("drafter ") for line in worker.ledger.lines({}))


def test_unsuitable_drafters_are_refused_in_a_line(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    path = str(tiny_checkpoints["llama"])
    config, settings = FAMILIES["llama"]
    make_model(config, settings | {"vocab_size": 300}).save_pretrained(tmp_path / "small")
    make_encoder("roberta", tmp_path / "encoder")
    of_model = {"method": "draft_model", "num_speculative_tokens": 3}
    for more, says in (
        ({"speculative_config": of_model}, "method draft_model needs a model"),
        ({"speculative_config": of_model | {"model": 3}}, "model must be a text, got 3"),
        (
            {"speculative_config": of_model | {"model": path, "draft_tensor_parallel_size": 2}},
            "must be an integer from 1 to 1, got 2",
        ),
        ({"speculative_config": of_model | {"model": path, "quantization": "int9"}}, "quantization must be one of"),
        ({"speculative_config": {**of_model, "method": "ngram", "model": path}}, "model is not of method ngram"),
        ({"speculative_config": of_model | {"model": str(tmp_path / "small")}}, "a vocabulary of 300 tokens, .* 320"),
        ({"speculative_config": of_model | {"model": str(tmp_path / "encoder")}}, "generates no text"),
        ({"speculative_model": path}, "needs num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, "needs a speculative_model"),
        ({"speculative_model": path, "speculative_config": of_model}, "is part of speculative_config"),
        ({"speculative_model": path, "num_speculative_tokens": 9, "max_model_len": 8}, "must be below max_model_len"),
    ):
        args = EngineArgs(model=path, skip_tokenizer_init=True, **more)
        with pytest.raises(ConfigError, match=says) as refused:
            args.create_engine_config()
        assert "\n" not in str(refused.value)


@pytest.mark.model
def test_another_tokenizer_is_refused_with_the_first_token_that_differs(six_layers: Path, tmp_path: Path) -> None:
    files = EngineArgs(model=str(six_layers)).create_engine_config().model.files
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        text = (files.tokenizer_path / name).read_text()
        (tmp_path / name).write_text(text.replace("<filename>", "<folder>"))
    args = EngineArgs(tokenizer=str(tmp_path), speculative_model=str(six_layers), num_speculative_tokens=3)
    with pytest.raises(ConfigError, match=r"another tokenizer than .* \(token \d+ is '<filename>', not '<folder>'\)"):
        args.create_engine_config()


def test_drafts_come_from_the_worker(tiny_checkpoints: dict[str, Path]) -> None:
    path = tiny_checkpoints["llama"]
    scheduler = drafting(path, path, 2).engine.scheduler
    assert isinstance(scheduler, Scheduler) and scheduler.drafts is not None
    assert scheduler.drafts.num_lookahead == 2
