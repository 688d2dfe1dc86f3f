"""Recorded steps change no bit of any answer: every family in every dtype that an engine on a CPU takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from support.gguf_files import write_gguf
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import ConfigError
from octavo.metrics.prometheus import EngineMetrics

PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 7, 16, 33)]
# Random weights' logits lie within some 5 of each other; garbage is off by as much.
MAX_ERROR = {"float32": 0.2, "bfloat16": 0.5, "float16": 0.2}
# quantization and dtypes of the KV cache, by the model's dtype. Steps with a float16 cache are never recorded.
CASES = {
    "float32": [*product(["int8"], ["auto", "float32", "bfloat16", "float16", "int8"]), ("none", "auto")],
    "bfloat16": [*product(["int8"], ["auto", "float32", "bfloat16", "float16", "int8"]), ("none", "auto")],
    "float16": [("int8", "auto"), ("none", "auto")],
}


@pytest.fixture(scope="module")
def models(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoints, and a GGUF file whose tied head is the embedding table."""
    gguf = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    model = make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128})
    write_gguf(gguf, model, arch="llama", qtype="Q8_0", vocabulary=False)
    return tiny_checkpoints | {"gguf": gguf}


def generate(llm: LLM, prompt_logprobs: int | None = None) -> list[RequestOutput]:
    told: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": prompt_logprobs}
    params = [SamplingParams(temperature=temperature, seed=1, **told) for temperature in (0, 0, 0.8, 0.8)]
    return llm.generate(PROMPTS, params, use_tqdm=False)


def facts(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.error, o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def worst_error(outputs: list[RequestOutput], reference: LLM) -> float:
    """Of the log-probabilities of generated tokens, against those that ``reference`` gives the same texts."""
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    told = SamplingParams(max_tokens=1, prompt_logprobs=0)
    worst = 0.0
    for ours, theirs in zip(outputs, reference.generate(texts, told, use_tqdm=False), strict=True):
        assert ours.outputs[0].logprobs is not None and theirs.prompt_logprobs is not None
        places = range(len(ours.prompt_token_ids), len(theirs.prompt_token_ids))
        for token, mine, at in zip(ours.outputs[0].token_ids, ours.outputs[0].logprobs, places, strict=True):
            known = theirs.prompt_logprobs[at]
            assert known is not None
            worst = max(worst, abs(mine[token].logprob - known[token].logprob))
    return worst


@pytest.mark.parametrize("family", [*FAMILIES, "gguf"])
def test_recorded_steps_give_the_bits_of_called_ones_and_the_model(family: str, models: dict[str, Path]) -> None:
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "num_gpu_blocks_override": 32,
    }
    path = str(models[family])
    reference = LLM(path, dtype="float32", quantization="none", kv_cache_dtype="float32", **options)
    for dtype, quantization, kv_dtype in [(dtype, *case) for dtype, cases in CASES.items() for case in cases]:
        which = f"{family} {dtype} quantization {quantization} KV {kv_dtype}"
        try:
            llm = LLM(path, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_dtype, **options)
        except ConfigError as error:
            assert kv_dtype == "int8" and "head_size" in str(error), which
            continue
        runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
        recorded = [generate(llm), generate(llm, prompt_logprobs=0)]
        steps, runner.device_runner.recorded_steps = runner.device_runner.recorded_steps, None
        called = [generate(llm), generate(llm, prompt_logprobs=0)]
        assert not any(o.error for o in called[0]), which
        for ours, theirs in zip(recorded, called, strict=True):
            assert facts(ours) == facts(theirs), which
        worst = worst_error(called[0], reference)
        assert worst < MAX_ERROR[dtype], f"{which}: {worst}"
        assert steps.can_record == (kv_dtype != "float16"), f"{which}: recorded {steps.can_record}"


def test_the_obstacle_to_recording_steps_is_a_metric(models: dict[str, Path]) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "num_gpu_blocks_override": 32}
    for kv_dtype, said in (("float16", "torch's own"), ("auto", None)):
        llm = LLM(str(models["llama"]), kv_cache_dtype=kv_dtype, **options)
        metrics = EngineMetrics(llm.config, "tiny")
        step = llm.engine.step

        def counted(step: Callable[[], Any] = step, metrics: EngineMetrics = metrics) -> Any:
            outputs = step()
            metrics.record_step(outputs.stats)
            return outputs

        llm.engine.step = counted  # type: ignore[method-assign]
        generate(llm)
        reasons = [
            line
            for line in generate_latest(metrics.registry).decode().splitlines()
            if line.startswith("octavo:unrecorded_steps{")
        ]
        assert len(reasons) == (said is not None), reasons
        assert said is None or (said in reasons[0] and reasons[0].endswith(" 1.0")), reasons


# Of each layer up to its attention, and from there to the next one
ATTENTION = {
    "none": ["rms_norm", "dense_linear", "rope_and_cache", "paged_attention"],
    "int8": ["quantize", "quantized_linear", "rope_and_cache", "paged_attention"],
}
REST = {
    "none": ["dense_linear", "rms_norm", "dense_linear", "silu_and_mul", "dense_linear"],
    "int8": [
        "quantize",
        "quantized_linear",
        "quantize",
        "quantized_linear",
        "quantized_linear",
        "quantize",
        "quantized_linear",
    ],
}
# `quantize` has the norm or the activation in it; what follows the last attention is of sampled rows alone
ENDS = {
    "none": (["dense_embedding"], ["rms_norm", "dense_linear", "argmax"]),
    "int8": (["embedding"], ["rms_norm", "quantize", "quantized_head"]),
}


@pytest.mark.parametrize("quantization", ATTENTION)
def test_a_step_of_one_rank_holds_these_operations_in_this_order(quantization: str, models: dict[str, Path]) -> None:
    """What only engines of several ranks need costs one rank nothing."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "num_gpu_blocks_override": 32}
    llm = LLM(str(models["llama"]), dtype="float32", quantization=quantization, **options)
    generate(llm)
    steps = llm.engine.executor.worker.runner.device_runner.recorded_steps  # type: ignore[attr-defined]
    attention, rest, (first, last) = ATTENTION[quantization], REST[quantization], ENDS[quantization]
    layers = [*attention, *rest] * (llm.config.model.hf_config["num_hidden_layers"] - 1) + attention
    assert steps._step.kinds == [*first, *layers, "embedding", "embedding", *rest, *last]
