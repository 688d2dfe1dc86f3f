"""Requests that only torch's sampler can draw change no bit of those beside them, nor do these of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from support.overlapped import overlapped

from octavo import LLM, SamplingParams
from octavo.interface.structured_output import StructuredOutputsParams

COMMON: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.9, "top_p": 0.9, "seed": 2, "logprobs": 0},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 1.0, "logprobs": 2},
    {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="[a-f ]{40,}"), "logprobs": 1},
]
ODD: dict[str, dict[str, Any]] = {
    "named": {"temperature": 0, "logprob_token_ids": [9, 4, 77]},
    "dry": {"temperature": 0.9, "seed": 8, "dry_multiplier": 2.0, "dry_allowed_length": 1, "logprobs": 3},
    "xtc": {"temperature": 0.9, "seed": 9, "xtc_probability": 0.5, "top_n_sigma": 3.0, "logprobs": 3},
}


def run(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    found = []
    for output in outputs:
        steps = output.outputs[0].logprobs or []
        found.append([{token: one.logprob for token, one in step.items()} for step in steps])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "speculating", "overlapped"])
def test_no_bit_depends_on_company_that_torch_draws(kind: str) -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": 256, "max_model_len": 512, "enable_prefix_caching": False}
    if kind == "speculating":
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(dtype="float32", **options)
    llm = overlapped(llm) if kind == "overlapped" else llm
    params = [SamplingParams(**COMMON, **one) for one in (*PLAIN, *ODD.values())]
    prompts = [f"{number} times a ring, a ring, a ring of {number}" for number in range(len(params))]
    alone = [run(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    assert all(len(steps) == COMMON["max_tokens"] for steps in alone)
    for odd in range(len(PLAIN), len(params)):
        some = [*range(len(PLAIN)), odd]
        together = run(llm, [prompts[i] for i in some], [params[i] for i in some])
        assert together == [alone[i] for i in some], f"beside {[*ODD][odd - len(PLAIN)]}"
    assert run(llm, prompts[::-1], params[::-1]) == alone[::-1]
