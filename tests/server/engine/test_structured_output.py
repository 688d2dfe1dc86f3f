"""Constrained answers keep to their grammar, beside answers that are free."""

from __future__ import annotations

import json
import re
import time

import pytest

from octavo import LLM, SamplingParams
from octavo.structured_output import StructuredOutputsParams, to_grammar

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
def test_a_broken_grammar_is_refused_by_name_within_a_second(field: str, value: object) -> None:
    started = time.perf_counter()
    with pytest.raises(ValueError, match=f"structured_outputs.{field}"):
        to_grammar(StructuredOutputsParams(**{field: value}))  # type: ignore[arg-type]
    assert time.perf_counter() - started < 1


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


def test_exactly_one_kind_must_be_given() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams()
