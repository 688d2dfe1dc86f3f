"""Every family in an engine: the greedy tokens of transformers, and steps on a CPU that are recorded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams
from octavo.interface.architectures import MODELS

NUM_TOKENS, TIE = 64, 1e-4
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
# One of each family; what is not here is compared in tests/server/engine (test_parity, test_recorded_steps).
FAMILIES = [
    "phi3", "phi4-mini", "granite", "granite4-dense", "smollm3", "olmo2", "olmo3", "glm", "glm4", "cohere", "cohere2",
    "ministral", "starcoder2", "gpt-neox", "falcon-7b", "falcon-40b", "gpt2",
    "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe", "granite-moe-shared", "glm4-moe",
    "gpt-oss", "deepseek-v2", "deepseek-v3",
]  # fmt: skip
OLDER = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM",
         "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"}  # fmt: skip

RENAMED = {"InternLM2ForCausalLM", "InternLM3ForCausalLM"}  # see test_renamed_families


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for case in FAMILIES:
        model = make_model(*FAMILY_CASES[case])
        model.save_pretrained(tmp_path_factory.getbasetemp() / case)
        found[case] = model, str(tmp_path_factory.getbasetemp() / case)
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


def test_every_architecture_has_a_case(references: dict[str, Any]) -> None:
    tested = {type(model).__name__ for model, _ in references.values()}
    alike = {name for name, module in MODELS.items() if module == "text_of_vision"}  # see test_text_of_vision
    assert set(MODELS) - alike == tested | OLDER | RENAMED
