"""Engines whose model is split over ranks: no answer depends on what else a step computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.split_cases import CASES
from support.tiny_models import make_model

from octavo import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8], [*range(3, 60)], [9] * 33, [*range(100, 140)])]
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3)


@pytest.mark.sampled(share=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dealt"),
    [("one-kv-head", False), ("experts", True), ("experts", False)],
)
def test_alone_batched_chunked_and_preempted_are_the_same_bits(case: str, dealt: bool, tmp_path: Path) -> None:
    """On two ranks; nearly those of one, and the same 64 tokens. Every step is recorded. ``dealt``: each rank has some
    experts whole."""
    make_model(*CASES[case]).save_pretrained(tmp_path)
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
    }
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": dealt, "num_gpu_blocks_override": 16}
    llm = LLM(str(tmp_path), **ranks, **options)
    together = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.totals.num_preemptions and llm.engine.executor.recording_obstacle is None
    one = LLM(str(tmp_path), **options).generate(PROMPTS, PARAMS, use_tqdm=False)
    for prompt, batched, whole in zip(PROMPTS, together, one, strict=True):
        (alone,) = llm.generate(prompt, PARAMS, use_tqdm=False)
        ours, theirs = alone.outputs[0], batched.outputs[0]
        assert ours.token_ids == theirs.token_ids == whole.outputs[0].token_ids
        assert ours.logprobs == theirs.logprobs
        assert ours.cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob, abs=1e-2)
