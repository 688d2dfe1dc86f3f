"""Models that read images give the logits of transformers, in whatever steps their prompts are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.vision import CASES, Prompt, answer, greedy, reference_logits, tokens_of

from octavo import LLM

TOLERANCE = 1e-3
ANSWER = 24  # tokens of those that are preempted


def make_llm(path: Path, **options: Any) -> LLM:
    options = {"max_num_batched_tokens": 256, "max_model_len": 160, "max_num_seqs": 4} | options
    return LLM(str(path), dtype="float32", quantization="none", skip_tokenizer_init=True, **options)


def prompts_of(case: str) -> list[Prompt]:
    """With 0, 1, 2 and 4 images: between text, one after the other, first and last."""
    rng = np.random.default_rng(0)
    a, b, c, d = (CASES[case].make_image(rng) for _ in range(4))
    between = [54] if CASES[case].apart else []
    return [[5, 17, 200, 3], [7, 8, a, 9, 30, 31], [b, 40, a, 41, 42], [50, a, 51, b, *between, c, 52, 53, d]]


def check_logprobs(llm: LLM, prompts: list[Prompt], logits: list[torch.Tensor]) -> None:
    for expected, output in zip(logits, answer(llm, prompts, prompt_logprobs=5, max_tokens=1), strict=True):
        assert output.prompt_logprobs is not None
        for position, found in enumerate(output.prompt_logprobs[1:]):
            assert found is not None
            for token, ours in found.items():
                assert abs(ours.logprob - expected[position].log_softmax(-1)[token]) < TOLERANCE, position


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference, prompts, of_state = CASES[case].save(tmp_path), prompts_of(case), CASES[case].state_blocks
    llm, logits = make_llm(tmp_path), [reference_logits(reference, prompt) for prompt in prompts]
    check_logprobs(llm, prompts, logits)
    expected_tokens = [greedy(reference, prompt, 5) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in answer(llm, prompts, max_tokens=5)] == expected_tokens
    # In small steps, cut inside images where that may be, and without the room for all.
    most = 5 if not CASES[case].whole else 24
    blocks = of_state + (90 if CASES[case].whole else 40)
    tight = make_llm(tmp_path, max_num_batched_tokens=most, block_size=4, num_gpu_blocks_override=blocks)
    outputs = answer(tight, [*prompts, prompts[2]], max_tokens=5)
    assert [output.outputs[0].token_ids for output in outputs] == [*expected_tokens, expected_tokens[2]]
    if not CASES[case].whole and not of_state:  # whose groups of layers leave room for all; states come one by one
        assert tight.totals.num_preemptions or tight.totals.prefix_cache_hits
    encoder = tight.engine.executor.worker.runner.images
    assert encoder.num_encoded == 4, "each image is encoded once, in however many requests it is"
    check_logprobs(tight, prompts, logits)
    # Preempted while they decode: the three prompts fit, their answers do not.
    rng = np.random.default_rng(1)
    crowd: list[Prompt] = [[number, 7, CASES[case].make_image(rng), number, 9] for number in range(3)]
    lengths = [len(tokens_of(prompt)) for prompt in crowd]
    most = max(lengths) + ANSWER
    blocks = 60 if CASES[case].whole else max(-(-most // 4), sum(-(-length // 4) for length in lengths) + 2)
    blocks += 3 * of_state
    full = make_llm(tmp_path, block_size=4, max_model_len=most, num_gpu_blocks_override=blocks)
    outputs, alone = answer(full, crowd, max_tokens=ANSWER), answer(llm, crowd, max_tokens=ANSWER)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in alone]
    assert full.totals.num_preemptions
    assert full.engine.executor.worker.runner.images.num_encoded == 3
