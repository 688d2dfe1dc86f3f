"""An engine whose worker has a process of its own (`--distributed-executor-backend mp`) answers as one without."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.serving import are_gone
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, DeviceLostError, ModelError

ROOT = Path(__file__).parents[3]
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8], [*range(3, 60)], [9] * 33)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, seed=8, max_tokens=40, ignore_eos=True, n=2, top_p=0.9),
]
# Of tests/server/engine: grammars, neighbours of those that fail, Ctrl-C, vectors. The whole suite: CONTRIBUTING.md.
SAMPLE = {
    "structured_output": "every_kind_of_grammar or samples_and_preemption or breaks_later",
    "interrupts": "cut_off_in_its_middle and within and one",
    "embeddings": "share_a_batch",
}


@pytest.mark.slow
def test_a_worker_in_a_process_of_its_own_gives_the_same_answers(tmp_path: Path) -> None:
    """Log-probabilities too, and where blocks are short; killed, it ends the engine."""
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "num_gpu_blocks_override": 10}

    def answers(llm: LLM) -> list[object]:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [(output.prompt_logprobs, output.outputs) for output in outputs]

    plain = LLM(str(tmp_path), **options)
    expected = answers(plain)
    llm = LLM(str(tmp_path), distributed_executor_backend="mp", **options)
    assert answers(llm) == expected and llm.totals.num_preemptions
    ours, theirs = llm.engine.executor, plain.engine.executor
    for name in ("num_blocks", "kv_layout", "weight_bytes", "memory_shares", "max_in_flight", "recording_obstacle"):
        assert getattr(ours, name) == getattr(theirs, name), name
    (process,) = ours._ranks.processes
    os.kill(process.process.pid, signal.SIGKILL)
    with pytest.raises(DeviceLostError, match=r"rank 0 \(process \d+\) was killed by signal 9"):
        answers(llm)
    del llm, ours
    gc.collect()
    assert are_gone([process.process.pid])


def test_its_errors_are_those_of_the_worker(tmp_path: Path) -> None:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    options = {"skip_tokenizer_init": True, "distributed_executor_backend": "mp"}
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(tmp_path), num_gpu_blocks_override=2, max_model_len=128, **options)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ModelError):
        LLM(str(tmp_path), **options)
    with pytest.raises(ConfigError, match="uni is one process"):
        LLM(str(tmp_path), tensor_parallel_size=2, distributed_executor_backend="uni")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.sampled(share=3)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_engines_suite_passes(name: str) -> None:
    file = f"tests/server/engine/test_{name}.py"
    command = [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-k", SAMPLE[name]]
    env = {**os.environ, "OCTAVO_TEST_EXECUTOR": "mp"}
    env.pop(
        "PYTEST_XDIST_WORKER", None
    )  # or its tests would wait behind one that wants the machine alone, and waits for us
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-5000:]
