"""Every family in an engine: the greedy tokens of transformers, and steps on a CPU that are recorded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES, FIRST_CASES, SMALL, architecture
from support.internlm import save_internlm2, save_internlm3
from support.tiny_models import FAMILIES as OLDER_FAMILIES
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams

NUM_TOKENS, TIE = 64, 1e-4
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
# Compared with more prompts and types in tests/server/engine (test_parity, test_recorded_steps).
OLDER = {architecture(case) for case in OLDER_FAMILIES.values()}
INTERNLM = {"internlm2": save_internlm2, "internlm3": save_internlm3}
FAMILIES = [
    *(case for name, case in FIRST_CASES.items() if name not in OLDER), "phi4-mini", "falcon-40b",
    "gemma3n-default", "gemma4-shared", "gemma4-moe", *INTERNLM,
]  # fmt: skip


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for case in FAMILIES:
        path = tmp_path_factory.getbasetemp() / case
        if case in INTERNLM:
            model = INTERNLM[case](path, SMALL)
        else:
            model = make_model(*FAMILY_CASES[case])
            model.save_pretrained(path)
        found[case] = model, str(path)
    return found


def recorded(llm: LLM) -> bool:
    return llm.engine.executor.worker.runner.device_runner.recorded_steps.can_record  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_by_recorded_steps(case: str, references: dict[str, Any]) -> None:
    model, path = references[case]
    rng = random.Random(case)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 20, 70)]
    llm = LLM(path, dtype="float32", quantization="none", max_num_batched_tokens=32, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():  # all at once: each token is the best after those before, or tied with it
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen).max() < TIE
    assert recorded(llm)


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_with_8_bit_weights_are_recorded(case: str, dtype: str, references: dict[str, Any]) -> None:
    llm = LLM(references[case][1], dtype=dtype, quantization="int8", **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(range(3, 30))}], params, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 4 and recorded(llm)
