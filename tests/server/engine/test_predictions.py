"""A prediction changes no token, whatever it says; it saves steps, and costs nothing where there is none."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from support.family_cases import FAMILY_CASES
from support.overlapped import PARAMS, overlapped, prompts_of, tiny
from support.speculation import all_of
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams
from octavo.core.draft_scheduler import NoDrafts
from octavo.engine.spec_decode.predictions import MOST_PREDICTED
from octavo.interface.outputs import PredictedTokens, RequestOutput
from octavo.interface.structured_output import StructuredOutputsParams
from octavo.system import logging_setup


def predicted(
    llm: LLM, prompts: list[Any], params: Any, predictions: list[list[int] | None], monkeypatch: pytest.MonkeyPatch
) -> list[RequestOutput]:
    """Answers of requests that bring these predictions, in order."""
    rest, add = iter(predictions), llm._output.add_request

    def add_request(request: Any, *others: Any) -> None:
        request.prediction = next(rest)
        add(request, *others)

    with monkeypatch.context() as patch:
        patch.setattr(llm._output, "add_request", add_request)
        return llm.generate(prompts, params, use_tqdm=False)


def edited(answer: list[int], rng: random.Random) -> list[int]:
    """A text of which the answer would be an edit."""
    text = list(answer)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        text[at : at + rng.randrange(3)] = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(3))]
    return text


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("llama", {}),
    "ngram": ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}),
    "suffix": ("qwen3", {"speculative_config": {"method": "suffix"}}),
    "preempted": ("qwen3", {"num_gpu_blocks_override": 14, "max_model_len": 208}),
    "windows": ("gemma2", {"num_gpu_blocks_override": 40, "max_model_len": 208}),
    "few rows": ("llama", {"max_num_seqs": 3}),
    "one row": ("llama", {"max_num_seqs": 1}),
    "recurrent": ("qwen3.5", {}),
    "recurrent, ngram": ("qwen3.5", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}),
}


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("qwen3.5")
    make_model(*FAMILY_CASES["qwen3.5"]).save_pretrained(path)
    return {**tiny_checkpoints, "qwen3.5": path}


@pytest.mark.parametrize("case", CASES)
def test_no_prediction_changes_a_token(
    case: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, with penalties, bias, stops, n = 3, log-probabilities: all in one batch, some predicted."""
    family, changes = CASES[case]
    llm, rng = tiny(checkpoints[family], **changes), random.Random(case)
    prompts = prompts_of(case, len(PARAMS))
    params = [SamplingParams(**values) for values in PARAMS]
    plain = llm.generate(prompts, params, use_tqdm=False)
    for _ in range(3):
        texts = [edited(list(output.outputs[0].token_ids), rng) for output in plain]
        predictions = [text if text and rng.random() < 0.7 else None for text in texts]
        answers = predicted(llm, prompts, params, predictions, monkeypatch)
        assert all_of(answers) == all_of(plain)
        for answer, prediction in zip(answers, predictions, strict=True):
            counted = answer.predicted
            assert (counted is None) == (prediction is None)
            if counted is not None and prediction is not None:
                assert counted.accepted + counted.rejected == len(prediction) * len(answer.outputs)
        llm.engine.check_integrity()


def test_a_right_prediction_saves_steps_and_then_drafts_are_off_again(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny(tiny_checkpoints["llama"])
    prompt, params = prompts_of("steps", 1), SamplingParams(temperature=0.8, seed=1, max_tokens=120, ignore_eos=True)
    steps = [llm.engine.num_steps]
    (plain,) = llm.generate(prompt, params, use_tqdm=False)
    steps.append(llm.engine.num_steps)
    (answer,) = predicted(llm, prompt, params, [list(plain.outputs[0].token_ids)], monkeypatch)
    steps.append(llm.engine.num_steps)
    assert all_of([answer]) == all_of([plain]) and answer.predicted == PredictedTokens(120, 0)
    assert steps[2] - steps[1] < (steps[1] - steps[0]) / 2 and MOST_PREDICTED > 2
    llm.generate(prompt, params, use_tqdm=False)
    assert isinstance(llm.engine.scheduler._drafting, NoDrafts) and llm.engine._drafts is None
    assert llm.engine.num_steps - steps[2] == steps[1] - steps[0], "no draft without a prediction"


@pytest.mark.model
def test_a_prediction_beside_a_grammar_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 512, "num_gpu_blocks_override": 64}
    llm = LLM(speculative_config={"method": "none"}, **sizes)
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z ]+"))
    plain = llm.generate(["A cat is"] * 2, params, use_tqdm=False)
    ids = list(plain[0].outputs[0].token_ids)
    answers = predicted(llm, ["A cat is"] * 2, params, [ids, None], monkeypatch)
    assert all_of(answers) == all_of(plain)


@pytest.mark.parametrize(("family", "overlap"), [("llama", True), ("qwen3.5", False)])
def test_an_engine_that_cannot_follow_a_prediction_says_so_once(
    family: str,
    overlap: bool,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging_setup, "_logged_once", set())
    llm = tiny(checkpoints[family])
    llm = overlapped(llm) if overlap else llm
    prompts, params = prompts_of("obstacles", 2), SamplingParams(temperature=0, max_tokens=9)
    plain = llm.generate(prompts, params, use_tqdm=False)
    with caplog.at_level(logging.WARNING):
        ids = list(plain[0].outputs[0].token_ids)
        assert all_of(predicted(llm, prompts, params, [ids, ids], monkeypatch)) == all_of(plain)
    said = [record.getMessage() for record in caplog.records if "prediction:" in record.getMessage()]
    assert len(said) == 1 and "speculative_config" in said[0]
