"""What cuts a step off: Ctrl-C, and a device that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.overlapped import overlapped, prompts_of, tiny

from octavo import LLM, SamplingParams
from octavo.errors import DeviceLostError
from octavo.interface.step import PendingOutput, SchedulerOutput

SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["one step at a time", "overlapped"])
def llm(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> LLM:
    one = tiny(tiny_checkpoints["llama"], max_num_seqs=8)
    return overlapped(one) if request.param else one


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts_of("interrupted", 3), SAMPLED, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def at_step(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Have ``run(step, execute)`` in place of that step from now on."""
    real, count = llm.engine.executor.execute_model, 0

    def execute(step: SchedulerOutput) -> PendingOutput:
        nonlocal count
        count += 1
        return run(step, real) if count == number else real(step)

    monkeypatch.setattr(llm.engine.executor, "execute_model", execute)


def test_ctrl_c_takes_effect_after_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after_signal = tokens(llm), []

    def run(step: SchedulerOutput, real: Any) -> PendingOutput:
        os.kill(os.getpid(), signal.SIGINT)
        pending = real(step)
        after_signal.append(True)
        return pending

    at_step(llm, 3, monkeypatch, run)
    with pytest.raises(KeyboardInterrupt):
        tokens(llm)
    assert after_signal == [True], "the step was cut off"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm) == before
    llm.engine.check_integrity()


@pytest.mark.parametrize("place", ["before", "within", "waiting"])
def test_a_step_cut_off_in_its_middle_leaves_an_engine_that_works(
    llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokens(llm)

    def run(step: SchedulerOutput, real: Any) -> PendingOutput:
        if place == "before":
            raise KeyboardInterrupt
        real(step)
        if place == "within":
            raise KeyboardInterrupt

        def pending() -> Any:
            raise KeyboardInterrupt

        return pending

    at_step(llm, 3, monkeypatch, run)
    with pytest.raises(KeyboardInterrupt):
        tokens(llm)
    assert tokens(llm) == before
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished_requests() and not llm.engine.scheduler.num_in_flight


def test_a_lost_device_ends_the_engine_and_not_each_request_for_ever(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(step: SchedulerOutput, real: Any) -> PendingOutput:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    at_step(llm, 2, monkeypatch, run)
    assert [output.outputs[0].finish_reason for output in llm.generate(prompts_of("lost", 1), SAMPLED)] == ["error"]
    at_step(llm, 2, monkeypatch, run)
    monkeypatch.setattr(llm.engine.executor, "is_lost", lambda: True)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        tokens(llm)


class Recorder:
    """Grammars that allow everything and keep what they are told."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}  # by grammar
        self._grammar_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._grammar_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._grammar_of

    def add(self, req_id: str, grammar: str, tokens: list[int]) -> None:
        self._grammar_of[req_id] = grammar
        self.seen[grammar] = list(tokens)

    def remove(self, req_id: str) -> None:
        self._grammar_of.pop(req_id, None)

    def held(self) -> set[str]:
        return set()

    def cut(self, step: SchedulerOutput) -> None:
        pass

    def start_fill(self, req_ids: list[str], drafts: object) -> Callable[[], None]:
        return lambda: None

    def accept(self, tokens: Mapping[str, list[int]]) -> dict[str, str]:
        for req_id, new in tokens.items():
            if req_id in self:
                self.seen[self._grammar_of[req_id]] += new
        return {}


def test_a_token_under_way_does_not_reach_the_grammar_of_another_request_of_that_name(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = overlapped(tiny(tiny_checkpoints["llama"], enable_prefix_caching=False))
    core, recorder, ready = llm.engine, Recorder(), Future[None]()
    ready.set_result(None)
    requests = core.executor.worker.runner.requests  # type: ignore[attr-defined]
    monkeypatch.setattr(requests, "grammars", recorder)
    monkeypatch.setattr(requests.grammar_pool, "prepare", lambda grammar: ready)  # in time for the very next step
    monkeypatch.setattr(requests.grammar_pool, "release", lambda prepared: None)

    def add(request_id: str, prompt: list[int], grammar: str | None) -> None:
        params = SamplingParams(temperature=0, max_tokens=5 if grammar else 40, ignore_eos=True)
        request = llm._input.process(request_id, {"prompt_token_ids": prompt}, params)
        request.grammar = grammar
        core.add_request(request)

    def under_way() -> bool:
        return any("0#r" in step.num_scheduled_tokens for step, _ in core._in_flight)

    add("other", [9, 8, 7], None)
    add("r", [3, 4, 5], "first")
    while not under_way():
        assert core.has_unfinished_requests()
        core.step()
    core.abort_requests(["r"])
    add("r", [30, 40, 50], "second")
    got = []
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            if output.request_id == "r" and output.finish_reason != "abort":
                got += output.new_token_ids
    assert len(got) == 5
    assert recorder.seen["second"] == got
