"""Ranks that run as on GPUs, with steps in flight and results that stay on the device, sample what one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.emulated_tp import EmulatedTP
from support.overlapped import PARAMS, overlapped, prompts_of, tiny

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.executor.uniproc import UniProcExecutor
from octavo.interface.engine_config import EngineConfig
from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput
from octavo.layers.parallel import TensorParallel
from octavo.worker.worker import Worker


class Emulated(UniProcExecutor):
    """Ranks that are threads; they have to give the same tokens."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        config = replace(config, parallel=replace(config.parallel, tensor_parallel_size=size))
        workers: list[Worker] = []

        def build(tp: TensorParallel) -> Worker:
            workers.append(Worker(config, overlap=True, tp=tp))
            return workers[-1]

        self._ranks = EmulatedTP(size, build)
        self.worker = workers[0]
        self._describe()

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        self.worker.cut_drafts(step)
        pending = self._ranks.run(lambda worker: worker.execute_model(step))

        def wait() -> ModelRunnerOutput:
            first, *others = [output() for output in pending]
            assert all(other.sampled_token_ids == first.sampled_token_ids for other in others)
            return first

        return wait


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize(
    "family, size, changes",
    [
        ("llama", 2, {}),
        ("qwen3", 2, {"num_gpu_blocks_override": 14, "max_model_len": 200}),
        ("llama", 4, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)
def test_ranks_with_steps_in_flight_sample_what_one_process_does(
    family: str, size: int, changes: dict[str, Any], tiny_checkpoints: dict[str, Path]
) -> None:
    """Greedy and with noise, of which each rank draws from its part of the vocabulary; truncated, with penalties and
    log-probabilities; with fewer blocks than all need, and with guesses."""

    def answers(llm: LLM) -> list[Any]:
        params = [SamplingParams(**values) for values in PARAMS]
        outputs = llm.generate(prompts_of(family, len(PARAMS)), params, use_tqdm=False)
        return [[(sample.token_ids, sample.finish_reason) for sample in output.outputs] for output in outputs]

    path = tiny_checkpoints[family]
    expected = answers(overlapped(tiny(path, **changes)))
    llm = overlapped(tiny(path, **changes))
    config = llm.engine.config
    llm.engine = EngineCore(config, Emulated(config, size))
    assert answers(llm) == expected
