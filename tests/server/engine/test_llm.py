"""The offline API: what it refuses, and that refusing leaves it usable."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import VOCAB_SIZE

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError
from octavo_kernels.packing import fill_dense

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_checkpoints: dict[str, Path]) -> LLM:
    return LLM(str(tiny_checkpoints["llama"]), dtype="float32", skip_tokenizer_init=True, max_model_len=128)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([VOCAB_SIZE], "prompt_token_ids"),
        ([5, -1], "prompt_token_ids"),
        ([5, True], "prompt_token_ids"),
        ([5] * 128, "prompt"),
        ("text without a tokenizer", "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_by_name_before_anything_runs(llm: LLM, prompt: Any, field: str) -> None:
    good = {"prompt_token_ids": [5, 6]}
    bad = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    with pytest.raises(ValueError, match=field):
        llm.generate([good, bad], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    assert len(llm.generate([good], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_nan_parameters_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: math.nan})


def test_nan_logits_end_their_request_and_no_other(tiny_checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(tiny_checkpoints["qwen2"]), dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False)
    expected = llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    table = llm.engine.executor.worker.model.model.embed_tokens.table.method.weight
    fill_dense(table, 300, torch.full((1, table.width), math.nan, dtype=table.parts[0].data.dtype))
    prompts = [{"prompt_token_ids": [5, 300]}, {"prompt_token_ids": [5, 6, 7]}]
    bad, good = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and "NaN" in (bad.error or "")
    assert good.outputs[0].token_ids == expected
    llm.engine.check_integrity()


def test_a_step_that_fails_ends_its_requests_and_leaves_the_engine_usable(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_checkpoints["llama"]), dtype="float32", skip_tokenizer_init=True)
    worker = llm.engine.executor.worker
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner.device_runner, "recorded_steps", None)
        patch.setattr(worker.runner.device_runner, "model", None)  # the next forward pass raises
        failed = llm.generate([{"prompt_token_ids": [5, 6]}], GREEDY, use_tqdm=False)[0]
    assert failed.outputs[0].finish_reason == "error" and failed.error
    fine = llm.generate([{"prompt_token_ids": [5, 6]}], GREEDY, use_tqdm=False)[0]
    assert fine.outputs[0].finish_reason == "length"
    llm.engine.check_integrity()


def test_max_model_len_must_fit_the_cache_or_may_be_fitted(tiny_checkpoints: dict[str, Path]) -> None:
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 4}
    with pytest.raises(ConfigError, match="--max-model-len to 64"):
        LLM(str(tiny_checkpoints["llama"]), max_model_len=128, **options)
    for length in ({}, {"max_model_len": "auto"}, {"max_model_len": -1}):
        assert LLM(str(tiny_checkpoints["llama"]), **length, **options).config.scheduler.max_model_len == 64


def test_an_unknown_argument_or_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_sequences"):
        LLM(max_sequences=3)
    with pytest.raises(ModelError):
        LLM(str(tmp_path))
