"""Constrained answers keep to their grammar, beside answers that are free."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.run_queue import OwnTime

from octavo import LLM, SamplingParams
from octavo.interface.structured_output import StructuredOutputsParams
from octavo.worker.grammars.child import MEMORY_BYTES
from octavo.worker.grammars.process import GrammarProcess

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_model_len=512, num_gpu_blocks_override=64)


def params(seed: int | None = None, **grammar: object) -> SamplingParams:
    return SamplingParams(
        temperature=0 if seed is None else 1.0,
        seed=seed,
        max_tokens=80,
        structured_outputs=StructuredOutputsParams(**grammar) if grammar else None,  # type: ignore[arg-type]
    )


def test_every_kind_of_grammar_is_kept_beside_free_neighbours(llm: LLM) -> None:
    free = llm.generate(["Once upon a time"], params(), use_tqdm=False)[0].outputs[0].token_ids
    wanted = [
        params(),
        params(json=PERSON),
        params(regex=r"\d{3}-\d{4}"),
        params(choice=["river", "mountain"]),
        params(grammar='start: "yes" | "no"'),
        params(grammar='root ::= "up" | "down"'),
        *[params(seed=seed, json=PERSON) for seed in range(4)],
    ]
    prompts = ["Once upon a time", *["Answer:"] * (len(wanted) - 1)]
    outputs = [o.outputs[0] for o in llm.generate(prompts, wanted, use_tqdm=False)]
    llm.engine.check_integrity()
    assert outputs[0].token_ids == free, "a neighbour's grammar changed a free answer"
    for output in (outputs[1], *outputs[6:]):
        person = json.loads(output.text)
        assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 99
        assert output.finish_reason == "stop"
    assert re.fullmatch(r"\d{3}-\d{4}", outputs[2].text)
    assert outputs[3].text in ("river", "mountain")
    assert outputs[4].text in ("yes", "no") and outputs[5].text in ("up", "down")


def test_ended_processes_give_back_the_slots_of_masks_that_nobody_waited_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that ends at max_tokens has one more mask on its way; its grammar may be idle until it is ended."""
    monkeypatch.setattr(GrammarProcess, "is_stale", property(lambda process: process.is_idle))
    pool = llm.engine.executor.worker.runner.requests.grammar_pool  # type: ignore[attr-defined]
    few, free = replace(params(regex=r"\d{9}"), max_tokens=2), len(pool.free_slots)
    for _ in range(5):
        assert llm.generate(["Answer:"], few, use_tqdm=False)[0].outputs[0].text
    assert len(pool.free_slots) >= free - 2


def test_samples_and_preemption_keep_to_the_grammar() -> None:
    small = LLM(dtype="float32", max_model_len=128, num_gpu_blocks_override=9)
    wanted = SamplingParams(
        temperature=1, seed=1, n=6, max_tokens=60, structured_outputs=StructuredOutputsParams(json=PERSON)
    )
    output = small.generate(["Describe a person as JSON, with name and age:"], wanted, use_tqdm=False)[0]
    assert small.totals.num_preemptions > 0
    for sample in output.outputs:
        assert json.loads(sample.text).keys() == {"name", "age"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "(a"),
        ("json", {"type": "nonsense"}),
        ("json", "{"),
        ("json", "[" * 100_000),
        ("grammar", "start: nothing"),
        ("choice", []),
    ],
)
def test_a_broken_grammar_is_refused_by_name_within_a_second(llm: LLM, field: str, value: object) -> None:

    def seconds() -> float:
        own = OwnTime([])
        with pytest.raises(ValueError, match=f"structured_outputs.{field} .*"):
            llm.generate("Answer:", params(**{field: value}), use_tqdm=False)
        return own.seconds

    assert any(seconds() < 1 for _ in range(3)), "unless others have the processor"


def test_a_grammar_that_explodes_harms_no_neighbour(llm: LLM) -> None:
    """llguidance bounds its work: the request ends with an error or an answer, soon."""
    free = llm.generate(["Once upon a time"], params(), use_tqdm=False)[0].outputs[0].token_ids
    bomb = params(regex="(x{1,9999}){1,9999}" * 500)
    bombed, neighbour = llm.generate(["x", "Once upon a time"], [bomb, params()], use_tqdm=False)
    assert neighbour.outputs[0].token_ids == free
    assert bombed.outputs[0].finish_reason in ("error", "length") and set(bombed.outputs[0].text) <= {"x"}


def test_white_space_in_json_has_an_end(llm: LLM) -> None:
    """A model that would rather write white space than an answer gets to the answer."""
    spaces = llm.tokenizer.encode("\n\t  \n", add_special_tokens=False)  # type: ignore[union-attr]
    eager = params(json=PERSON)
    eager.logit_bias = dict.fromkeys(spaces, 100.0)
    output = llm.generate(["Answer:"], eager, use_tqdm=False)[0].outputs[0]
    assert json.loads(output.text).keys() == {"name", "age"}


def test_objects_have_no_properties_but_those_that_are_named(llm: LLM) -> None:
    """Unless the standard's reading is asked for, by which this model goes on inventing some."""
    silent = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    eager = params(json=silent)
    eager.logit_bias = dict.fromkeys(llm.tokenizer.encode("},", add_special_tokens=False)[1:], 100.0)  # type: ignore[union-attr]
    assert json.loads(llm.generate("Answer:", eager, use_tqdm=False)[0].outputs[0].text).keys() == {"a"}
    llm._input.strict_json_schema = False
    try:
        text = llm.generate("Answer:", eager, use_tqdm=False)[0].outputs[0].text
    finally:
        llm._input.strict_json_schema = True
    assert text.count('"') > 2, text


@pytest.mark.parametrize(
    "limits",
    [{"allowed_token_ids": [1000, 1001]}, {"bad_words": ["zebra"]}, {"min_tokens": 20}],
    ids=lambda one: next(iter(one)),
)
def test_limits_that_leave_nothing_to_say_end_that_request_alone(llm: LLM, limits: dict[str, object]) -> None:
    limited = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["zebra"]), max_tokens=30, **limits)  # type: ignore[arg-type]
    ended, neighbour = llm.generate(["Answer:", "Answer:"], [limited, params(choice=["zebra"])], use_tqdm=False)
    assert ended.outputs[0].finish_reason == "error" and ended.error_param == "structured_outputs.choice"
    assert ended.error is not None and "allows no token together" in ended.error
    assert neighbour.outputs[0].text == "zebra"


def test_a_grammar_that_breaks_later_ends_that_request_alone(llm: LLM) -> None:
    """Two seconds would go into one of its masks."""
    free = llm.generate(["Once upon a time"], params(), use_tqdm=False)[0].outputs[0].token_ids
    late = params(grammar=f'start: /[0-9]{{3}}/ "{"y" * 900_000}"')
    ended, neighbour = llm.generate(["x", "Once upon a time"], [late, params()], use_tqdm=False)
    assert neighbour.outputs[0].token_ids == free
    assert ended.outputs[0].finish_reason == "error" and ended.error_param == "structured_outputs.grammar"
    assert llm.generate("x", params(choice=["yes"]), use_tqdm=False)[0].outputs[0].text == "yes"


@pytest.mark.parametrize(("length", "samples"), [(100_000, 1), (30_000, 32)])
def test_a_slow_grammar_holds_up_its_own_sequences_alone(llm: LLM, length: int, samples: int) -> None:
    """Where its masks, or those of its many samples together, take longer than a step, its neighbour gets tokens
    meanwhile."""
    slow = params(seed=1, grammar=f'start: "{"y" * length}"')
    slow.ignore_eos, slow.max_tokens, slow.n = True, 12 if samples > 1 else 40, samples
    free = params()
    free.ignore_eos, free.max_tokens = True, 400
    core = llm.engine
    for name, one in (("slow", slow), ("free", free)):
        core.add_request(llm._input.process(name, "Answer:", one))
    got: dict[str, list[int]] = {"slow": [], "free": []}  # the steps of the tokens
    while len(got["slow"]) < (20 if samples == 1 else 10):
        for output in core.step().outputs:
            assert output.error is None, output.error
            if output.index == 0:
                got[output.request_id] += [core.num_steps] * len(output.new_token_ids)
    core.abort_requests(["slow", "free"])
    while core.has_unfinished_requests():
        core.step()
    meanwhile = [step for step in got["free"] if got["slow"][0] < step <= got["slow"][-1]]
    assert len(meanwhile) > 1.2 * len(got["slow"]), got


def test_a_grammars_process_that_is_killed_ends_its_own_requests(llm: LLM) -> None:
    core, ended = llm.engine, {}

    def processes() -> set[int]:
        program = core.executor.worker.runner.requests.grammar_pool._program  # type: ignore[attr-defined]
        return set(map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()))

    def add(name: str) -> None:
        one = params(regex=f"({name}|[a-z ])+")
        one.ignore_eos, one.max_tokens = True, 60
        core.add_request(llm._input.process(name, "Answer:", one))

    def step() -> None:
        for output in core.step().outputs:
            if output.finish_reason is not None:
                ended[output.request_id] = output.error

    add("stays")
    while not core.scheduler.has_request("stays"):
        step()
    others = processes()
    add("goes")
    while not core.scheduler.has_request("goes"):
        step()
    for pid in processes() - others:
        os.kill(pid, signal.SIGKILL)
    while core.has_unfinished_requests():
        step()
    assert ended["stays"] is None and "simplify it" in str(ended["goes"])


def test_a_grammars_process_has_no_secrets_and_can_gain_no_rights(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate("Answer:", params(choice=["started"]), use_tqdm=False)
    monkeypatch.setenv("OCTAVO_API_KEY", "secret-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-2")
    pool = llm.engine.executor.worker.runner.requests.grammar_pool  # type: ignore[attr-defined]
    pool._end_program()  # the next one is started with these in our environment
    llm.generate("Answer:", params(choice=["a new program"]), use_tqdm=False)
    about = Path(f"/proc/{pool._program.pid}")
    environment = (about / "environ").read_bytes()
    assert b"PATH=" in environment and b"secret" not in environment
    assert "NoNewPrivs:\t1" in (about / "status").read_text()
    assert (about / "oom_score_adj").read_text() == "1000\n"


def test_a_program_that_no_longer_forks_is_replaced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, or hanging: the request that finds out ends with an error that blames no grammar, the next is served."""
    llm.generate("Answer:", params(choice=["started"]), use_tqdm=False)
    monkeypatch.setattr("octavo.worker.grammars.pool.FORK_SECONDS", 1.0)
    program = llm.engine.executor.worker.runner.requests.grammar_pool._program  # type: ignore[attr-defined]
    os.kill(program.pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match="does not answer"):
        llm.generate("Answer:", params(choice=["stopped"]), use_tqdm=False)
    assert program.returncode is not None
    assert llm.generate("Answer:", params(choice=["again"]), use_tqdm=False)[0].outputs[0].text == "again"


@pytest.mark.parametrize(("limit", "most"), [("MAX_PROCESSES", 3), ("MAX_BYTES", MEMORY_BYTES + (1 << 20))])
def test_many_grammars_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    """More than there may be processes or memory: every request is served, and what nobody uses makes room."""
    monkeypatch.setattr(f"octavo.worker.grammars.pool.{limit}", most)
    pool = llm.engine.executor.worker.runner.requests.grammar_pool  # type: ignore[attr-defined]
    start, running, taken = pool._start, [], []

    def watched_start(process: GrammarProcess) -> None:
        start(process)
        now = pool._by_descriptor.values()
        running.append(len(now))
        taken.append(sum(p.memory if p.compiled else MEMORY_BYTES for p in now))

    monkeypatch.setattr(pool, "_start", watched_start)
    wanted = [params(choice=[f"word {i}"]) for i in range(10)]
    outputs = llm.generate(["Answer:"] * 10, wanted, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [f"word {i}" for i in range(10)]
    assert len(running) >= 10 and max(running if limit == "MAX_PROCESSES" else taken) <= most
    llm.generate("Answer:", params(), use_tqdm=False)  # the runner hears of their end
    deadline = time.monotonic() + 90
    while len(pool.free_slots) < 2 * llm.config.scheduler.max_num_seqs:
        assert time.monotonic() < deadline, "places among the masks are lost"
        pool.poll(0.1)


def test_exactly_one_kind_must_be_given() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams()
