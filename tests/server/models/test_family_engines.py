"""Every family in an engine: the greedy tokens of transformers, and steps on a CPU that are recorded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES, FIRST_CASES, architecture
from support.internlm import save_internlm2, save_internlm3
from support.small_sizes import SMALL
from support.tiny_models import FAMILIES as OLDER_FAMILIES
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams

NUM_TOKENS, TIE = 64, 1e-4
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
# Compared with more prompts and types in tests/server/engine (test_parity, test_recorded_steps).
OLDER = {architecture(case) for case in OLDER_FAMILIES.values()}
INTERNLM = {"internlm2": save_internlm2, "internlm3": save_internlm3}
FAMILIES = [
    *(case for name, case in FIRST_CASES.items() if name not in OLDER),
    "phi4-mini",
    "falcon-40b",
    "gemma3n-default",
    "gemma4-shared",
    "gemma4-moe",
    "qwen3.5-recurrent",
    *INTERNLM,
]
QUICK = {
    "deepseek-v3",
    "gpt-oss",
    "gemma4-shared",
    "mixtral",
    "qwen3.5",
}  # latents, sinks, shared keys, experts, states


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


@pytest.mark.sampled(share=3)
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
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen).max() < TIE
    assert recorded(llm)


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_with_8_bit_weights_are_recorded(case: str, dtype: str, references: dict[str, Any]) -> None:
    llm = LLM(references[case][1], dtype=dtype, quantization="int8", **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(range(3, 30))}], params, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 4 and recorded(llm)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case not in QUICK)) for case in FAMILIES]
)
def test_company_hits_and_preemption_change_no_bit(case: str, references: dict[str, Any]) -> None:
    """As test_same_bits of tests/server/engine has it for the older families, with more ways of cutting."""
    rng = random.Random(case)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    prompts: list[Any] = [
        {"prompt_token_ids": shared[:common] + [rng.randrange(3, VOCAB_SIZE) for _ in range(own)]}
        for common, own in ((0, 60), (17, 33), (64, 5), (70, 16), (64, 60), (70, 1))
    ]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)

    def llm(**changes: Any) -> LLM:
        options: dict[str, Any] = {"num_gpu_blocks_override": 800, "enable_prefix_caching": False} | changes
        return LLM(references[case][1], dtype="float32", max_model_len=200, skip_tokenizer_init=True, **options)

    def run(engine: LLM, some: list[Any]) -> list[Any]:
        outputs = engine.generate(some, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]

    plain = llm()
    alone, layout = [run(plain, [prompt])[0] for prompt in prompts], plain.engine.executor.kv_layout
    assert run(plain, prompts) == alone, "batched"
    caching = llm(enable_prefix_caching=True)
    assert run(caching, prompts) == alone and run(caching, prompts) == alone, "with partial hits, then with full ones"
    small = llm(num_gpu_blocks_override=layout.most_blocks(200) + 1)
    assert run(small, prompts) == alone, "preempted"
    assert small.totals.num_preemptions > 0 or any(group.window for group in layout.groups), "the cache is large enough"
