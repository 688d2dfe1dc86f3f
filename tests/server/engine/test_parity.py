"""Greedy tokens are those of transformers, or differ first where its two best logits are closer than 1e-4."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from support.tiny_models import FAMILIES, VOCAB_SIZE

from octavo import LLM, SamplingParams
from octavo.bench.hugging_face import transformers_arguments

TIE = 1e-4
NUM_PROMPTS, NUM_TOKENS = 20, 64


@torch.inference_mode()
def assert_greedy_choices(model: transformers.PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """Every token of ``answer`` is the reference's best one after what precedes it, up to a tie of its two best logits.

    That is what comparing with `generate` means, in one pass: equal so far, the next tokens are given the same context.
    """
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    for i, token in enumerate(answer):
        if token != best.indices[i, 0].item():
            gap = (best.values[i, 0] - best.values[i, 1]).item()
            assert gap < TIE, f"token {i}: {token} instead of {best.indices[i, 0].item()}, which leads by {gap:.2e}"
            return  # from a tie on, the two texts may go apart


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_checkpoints_give_the_tokens_of_transformers(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    rng = random.Random(family)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 120))] for _ in range(NUM_PROMPTS)]
    llm = LLM(str(tiny_checkpoints[family]), dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoints[family], dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == NUM_TOKENS
        assert_greedy_choices(model, prompt, output.outputs[0].token_ids)
    generated = model.generate(torch.tensor([prompts[0]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert generated[0, len(prompts[0]) :].tolist() == outputs[0].outputs[0].token_ids[:8]
    llm.engine.check_integrity()


@pytest.mark.long  # its logits are compared in tests/server/models/test_embedded.py, the engine with small models above
def test_the_embedded_model_gives_the_tokens_of_transformers() -> None:
    subjects = ["France", "a river", "the moon", "bread", "a queue", "winter", "Python", "music", "a cell", "gravity"]
    prompts = [
        text.format(s) for s in subjects for text in ("The most important fact about {} is", "Q: What is {}?\nA:")
    ]
    llm = LLM(quantization="none", dtype="float32", num_gpu_blocks_override=256, max_model_len=512)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    path = Path(llm.config.model.files.weights[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(**transformers_arguments(path), dtype=torch.float32)
    for output in outputs:
        assert_greedy_choices(model, output.prompt_token_ids, output.outputs[0].token_ids)
    assert len(outputs) == NUM_PROMPTS
