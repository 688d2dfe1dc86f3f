"""Engines whose ranks have a GPU each: they answer as one, whichever way they exchange, and end as a whole."""

from __future__ import annotations

import gc
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.overlapped import CASES, PARAMS, prompts_of, tiny

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("msgspec") is None, reason="ranks need the package msgspec"),
]
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, {GPUS} can be seen")


def answers(path: Path, family: str, **changes: Any) -> list[list[tuple[int, ...]]]:
    """Twice: with and without hits of the prefix cache."""
    llm = tiny(path, device="cuda", **changes)
    params = [SamplingParams(**values) for values in PARAMS]
    found = []
    for _ in range(2):
        outputs = llm.generate(prompts_of(family, len(PARAMS)), params, use_tqdm=False)
        assert not [output.error for output in outputs if output.error]
        found += [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]
    del llm
    gc.collect()
    return found


def test_more_ranks_than_gpus_are_refused(tiny_checkpoints: dict[str, Path]) -> None:
    ranks = 2 if GPUS == 1 else 2 * GPUS
    with pytest.raises(ConfigError, match=rf"needs a GPU for each rank, and {GPUS} can be seen|attention heads"):
        tiny(tiny_checkpoints["llama"], device="cuda", tensor_parallel_size=ranks)


@needs_two
@pytest.mark.parametrize("case", CASES)
def test_two_gpus_answer_alike_whichever_way_they_exchange(case: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Captured or not, through each other's memory or through NCCL."""
    family, changes = CASES[case]
    path, changes = tiny_checkpoints[family], changes | {"tensor_parallel_size": 2}
    expected = answers(path, family, **changes)
    assert answers(path, family, **changes, enforce_eager=True) == expected
    assert answers(path, family, **changes, disable_custom_all_reduce=True) == expected


@needs_two
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt"])
def test_first_tokens_are_those_of_one_gpu(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def first(ranks: int) -> list[int]:
        llm = tiny(tiny_checkpoints[family], device="cuda", tensor_parallel_size=ranks, dtype="float32")
        return [o.outputs[0].token_ids[0] for o in llm.generate(prompts_of(family, 8), params, use_tqdm=False)]

    assert first(2) == first(1)


@needs_two
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_named(number: signal.Signals, tiny_checkpoints: dict[str, Path]) -> None:
    llm: LLM = tiny(tiny_checkpoints["llama"], device="cuda", tensor_parallel_size=2, distributed_timeout_seconds=5)
    os.kill(llm.engine.executor._ranks._ranks[0].process.pid, number)
    with pytest.raises(Exception, match="rank 1 "):
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
