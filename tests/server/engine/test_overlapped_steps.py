"""Steps that overlap, on rows that live on the device, give what steps one after the other give.

The runner of GPUs runs here on the CPU: what it captures is done anew at every replay, into the results' first place.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import VOCAB_SIZE

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.executor.uniproc import UniProcExecutor
from octavo.outputs import RequestOutput


def overlapped(llm: LLM) -> LLM:
    """The same engine with two steps in flight."""
    core = EngineCore(llm.engine.config, UniProcExecutor(llm.engine.config, overlap=True))
    assert core.executor.max_in_flight == 2
    llm.engine = core
    return llm


def tiny(path: Path, **changes: Any) -> LLM:
    defaults: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 256}
    return LLM(str(path), **defaults | changes)


def prompts_of(seed: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    lengths = [rng.choice([1, 5, 16, 33, 60]) for _ in range(count)]
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [{"prompt_token_ids": shared[: rng.choice([0, 17, 40])] + tokens} for tokens in own]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(o.token_ids, o.cumulative_logprob, o.finish_reason, o.stop_reason) for o in output.outputs]
        for output in outputs
    ]


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 0.9, "seed": 1, "max_tokens": 33, "ignore_eos": True},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 2, "max_tokens": 7},
    {"temperature": 0.7, "min_p": 0.05, "seed": 3, "max_tokens": 25, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "max_tokens": 30, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 5, "max_tokens": 12, "n": 3},
    {"temperature": 0, "max_tokens": 15, "stop_token_ids": list(range(3, 60))},
    {"temperature": 0.5, "seed": 6, "max_tokens": 16, "min_tokens": 9, "stop_token_ids": list(range(3, 120))},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.8, "seed": 7, "max_tokens": 9, "logit_bias": {5: 4.0, 9: -100.0}, "prompt_logprobs": 1},
]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "chunks": ("llama", {"enable_prefix_caching": False, "long_prefill_token_threshold": 7}),
    "preempted": ("qwen3", {"num_gpu_blocks_override": 14, "max_model_len": 208}),
    "few rows": ("llama", {"max_num_seqs": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_overlapping_changes_no_bit(case: str, tiny_checkpoints: dict[str, Path]) -> None:
    family, changes = CASES[case]
    path, prompts = tiny_checkpoints[family], prompts_of(family, len(PARAMS))
    params = [SamplingParams(**values) for values in PARAMS]
    one, two = tiny(path, **changes), overlapped(tiny(path, **changes))
    for _ in range(2):  # the second time prompts are found in the cache
        assert answers(two.generate(prompts, params, use_tqdm=False)) == answers(
            one.generate(prompts, params, use_tqdm=False)
        )
        two.engine.check_integrity()
        assert not two.engine.has_unfinished_requests() and not two.engine.scheduler.num_in_flight


def test_sequences_that_end_or_are_aborted_leave_nothing_to_those_after_them(tiny_checkpoints: dict[str, Path]) -> None:
    """Rows, blocks and tokens under way of sequences that go are not seen by those that come, with the same ids too."""
    rng = random.Random(5)
    llm = tiny(tiny_checkpoints["llama"], enable_prefix_caching=False, max_num_seqs=4)
    prompts = prompts_of("aborted", 12)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(12)]
    alone = [
        llm.generate([p], [s], use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)
    ]
    core = overlapped(llm).engine
    ids = [f"r{i % 5}" for i in range(40)]
    running: dict[str, int] = {}
    got: dict[str, list[int]] = {}
    finished = 0
    while ids or running:
        if ids and ids[0] not in running and rng.random() < 0.6:
            request_id, which = ids.pop(0), rng.randrange(12)
            running[request_id], got[request_id] = which, []
            prompt = prompts[which]
            request = llm._input.process(request_id, prompt, params[which])
            core.add_request(request)
        elif running and rng.random() < 0.1:
            request_id = rng.choice(list(running))
            core.abort_requests([request_id])
            del running[request_id]
        for output in core.step().outputs:
            if output.request_id in running and output.finish_reason != "abort":
                got[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    assert output.error is None
                    assert got[output.request_id] == alone[running.pop(output.request_id)]
                    finished += 1
        core.check_integrity()
    assert finished > 15
