"""vLLM's own benchmark client runs against us as it is. Skipped where vLLM is not installed: set OCTAVO_VLLM to its
executable, or have `vllm` on the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

VLLM = os.environ.get("OCTAVO_VLLM") or shutil.which("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")]


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("openai", ["--request-rate", "20", "--burstiness", "0.5", "--logprobs", "2"]),
        ("openai-chat", ["--endpoint", "/v1/chat/completions", "--max-concurrency", "3", "--num-warmups", "1"]),
        ("openai-embeddings", ["--endpoint", "/v1/embeddings", "--ready-check-timeout-sec", "20"]),
    ],
)
def test_bench_serve(shared_server, tiny_model, tmp_path, backend, flags):
    command = [
        VLLM,
        "bench",
        "serve",
        "--backend",
        backend,
        "--base-url",
        shared_server.url,
        "--model",
        "tiny",
        "--tokenizer",
        tiny_model,
        "--dataset-name",
        "random",
        "--random-input-len",
        "24",
        "--random-output-len",
        "8",
        "--num-prompts",
        "10",
        "--ignore-eos",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        tmp_path,
        "--result-filename",
        "result.json",
        *flags,
    ]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **settings})
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 10 and not any(result.get("errors", [])), result
    if backend != "openai-embeddings":
        assert result["failed"] == 0 and result["output_lens"] == [8] * 10
