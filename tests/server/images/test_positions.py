"""Positions of text after images (M-RoPE): those of transformers, whatever computes the steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.overlapped import overlapped
from support.speculation import drafts_of
from support.vision import CASES, IMAGE, Prompt, answer, greedy

from octavo import LLM, SamplingParams

LENGTH, SEEN = 24, 5
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def make_llm(path: Path, **options: Any) -> LLM:
    options = {"max_num_batched_tokens": 64, "max_model_len": 128, "max_num_seqs": 8, "block_size": 4} | options
    options = {"dtype": "float32", "quantization": "none", "num_gpu_blocks_override": 256} | options
    return LLM(str(path), skip_tokenizer_init=True, **options)


def tokens(llm: LLM, prompts: list[Prompt], **params: Any) -> list[list[int]]:
    outputs = answer(llm, prompts, max_tokens=LENGTH, **params)
    assert not any(output.error for output in outputs)
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.mark.parametrize("case", ["qwen2.5-vl", "qwen3-vl"])
def test_long_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Recorded, with guesses, with steps that overlap on rows of the device, after hits that end within an image."""
    reference, rng = CASES[case].save(tmp_path), np.random.default_rng(1)
    a, b, c = (CASES[case].make_image(rng) for _ in range(3))
    prompts: list[Prompt] = [
        [7, 8, a, 9, 30, 31, 9, 30],
        [b, 40, a, 41, 42, 41],
        [5, 6, 5, 6],
        [50, a, 51, b, 9, c, 53],
    ]
    expected = [greedy(reference, prompt, LENGTH) for prompt in prompts]
    plain = make_llm(tmp_path)
    assert plain.engine.executor.worker.runner.device_runner.recorded_steps.can_record
    part = SamplingParams(max_tokens=1, ignore_eos=True)
    beginning = plain._input.process(plain._new_id(), {"prompt_token_ids": [7, 8, *[IMAGE] * SEEN]}, part)
    beginning.mm_items = [replace(a.item(2), is_embed=[True] * SEEN)]  # as if no more of it was computed
    plain._run([beginning], [None], False)
    (first,) = answer(plain, prompts[:1], max_tokens=LENGTH)
    assert first.num_cached_tokens == 2 + SEEN and first.outputs[0].token_ids == expected[0]
    assert tokens(plain, prompts) == expected
    guessing = make_llm(tmp_path, speculative_config=GUESSES)
    drafts_of(guessing)._lengths = None  # guesses whatever steps have taken on a busy machine
    assert tokens(guessing, prompts) == expected
    assert sum(guessing.totals.spec_decode.num_accepted_per_pos), "some guesses after images are right"
    for options in ({}, {"speculative_config": GUESSES}, {"max_num_batched_tokens": 16}):
        device = overlapped(make_llm(tmp_path, **options))
        if "speculative_config" in options:
            drafts_of(device)._lengths = None
        for _ in range(2):  # the second time prompts are found in the cache
            assert tokens(device, prompts) == expected, options
        assert bool(sum(device.totals.spec_decode.num_accepted_per_pos)) == ("speculative_config" in options)
        device.engine.check_integrity()
