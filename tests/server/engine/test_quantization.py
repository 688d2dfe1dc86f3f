"""What a CPU runs by default on a quantised file is that file's model, and batches change nothing in it either."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged import logits_of, model_config
from support.quantized_files import embedded_checkpoint, quantized_smollm2

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.interface.quantizations import STORED
from octavo.layers.quantization import registry
from octavo.loader.load_model import load_model
from octavo.text.tokenizer import Tokenizer
from octavo_kernels.packing import fill_dense
from octavo_kernels.quant import dequantize

MAX_KL = 0.02  # nats, mean over positions
MIN_AGREEMENT = 0.97


def assert_same_model(
    quantized: list[torch.Tensor],
    reference: list[torch.Tensor],
    max_kl: float = MAX_KL,
    min_agreement: float = MIN_AGREEMENT,
) -> None:
    """Mean KL divergence and agreement of the best token, over all positions."""
    ours, theirs = torch.cat(quantized).log_softmax(-1), torch.cat(reference).log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    assert kl <= max_kl, f"KL {kl:.4f}"
    assert agreement >= min_agreement, f"agreement {agreement:.3f}"


def test_the_embedded_file_in_4_bits_is_the_model_in_float32() -> None:
    config = model_config(None)
    tokenizer = Tokenizer.from_files(config.files)
    texts = [text[:1500] for text in list(pydoc_data.topics.topics.values())[5:8]]
    sequences = [tokenizer.encode(text)[:256] for text in texts]
    quantized = load_model(dataclasses.replace(config, quantization="int8"))
    assert quantized.is_quantized and quantized.num_weight_bytes() < 110e6
    assert_same_model(logits_of(quantized, sequences, kv_dtype="int8"), logits_of(load_model(config), sequences))


@pytest.mark.sampled(share=4)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["awq", "gptq", "w8a8", "fp8"])
def test_the_embedded_model_in_other_formats_is_its_values(
    recipe: str, plain_smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = quantized_smollm2(tmp_path_factory.mktemp(recipe), recipe, plain_smollm2)
    config = model_config(folder)
    tokenizer = Tokenizer.from_files(config.files)
    texts = [text[:1500] for text in list(pydoc_data.topics.topics.values())[5:8]]
    sequences = [tokenizer.encode(text)[:256] for text in texts]
    quantized = load_model(dataclasses.replace(config, quantization=None))
    assert quantized.is_quantized
    expected = logits_of(load_model(config), sequences)
    assert_same_model(logits_of(quantized, sequences, kv_dtype="int8"), expected, max_kl=5e-3)
    shutil.rmtree(folder)  # 700 MB


@pytest.fixture(scope="module")
def plain_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_checkpoint(tmp_path_factory.mktemp("smollm2") / "plain")


@pytest.mark.parametrize(
    ("quantization", "max_kl", "min_agreement"), [("int8_per_group", 1e-3, 0.95), ("int8_per_channel", 2e-3, 0.92)]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "opt", "mistral"])
def test_any_checkpoint_runs_in_8_bits_as_its_rounded_weights_would(
    family: str, quantization: str, max_kl: float, min_agreement: float, tiny_checkpoints: dict[str, Path]
) -> None:
    """Widths that are no multiple of a group, biases, untied heads (a tied one is rounded, its embedding is not)."""
    config = model_config(tiny_checkpoints[family])
    sequences = [[3 + (7 * i + j) % 300 for i in range(100)] for j in range(4)]
    quantized = load_model(dataclasses.replace(config, quantization=quantization))
    reference = load_model(config)
    packed = [layer.method.packed for layer in quantized.linear_layers()]
    kinds = {part.kind.by_row for weight in packed if not weight.margin for part in weight.parts}  # a head has a margin
    assert kinds == {quantization == "int8_per_channel"}
    for ours, theirs in zip(quantized.linear_layers(), reference.linear_layers(), strict=True):
        if not getattr(theirs, "is_tied", False):
            fill_dense(theirs.method.weight, 0, dequantize(ours.method.packed))
    # The best of random weights' nearly equal logits is no measure; how far all of them move is.
    assert_same_model(logits_of(quantized, sequences), logits_of(reference, sequences), max_kl, min_agreement)


def test_the_default_engine_gives_the_same_bits_in_every_batch() -> None:
    def run(llm: LLM, prompts: list[str]) -> list[tuple[list[int], float | None]]:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_integrity()
        return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]

    shared = "A river carries stones from the mountains to the sea, and the stones grow round on the way. "
    prompts = [shared + tail for tail in ("Why?", "How long does that take?", "")] + [
        "Bread is",
        "Once upon a time there was",
    ]
    options: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 64}
    llm = LLM(enable_prefix_caching=False, **options)
    alone = [run(llm, [prompt])[0] for prompt in prompts]
    assert run(llm, prompts) == alone
    assert run(LLM(long_prefill_token_threshold=7, block_size=48, **options), prompts) == alone
    caching = LLM(**options)
    assert run(caching, prompts) == alone and run(caching, prompts) == alone


def test_the_default_engine_knows_the_capital_of_france() -> None:
    """float32 is sure of it, by a nat a token: where it hangs on a hair, quantised weights may say something else."""
    llm = LLM(max_model_len=256, num_gpu_blocks_override=16)
    messages = [{"role": "user", "content": "Name the capital of France."}]
    assert (
        "Paris" in llm.chat(messages, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0].outputs[0].text
    )


def test_one_scale_a_channel_gives_the_same_bits_in_every_batch(plain_smollm2: Path) -> None:
    llm = LLM(str(plain_smollm2), quantization="int8_per_channel", max_model_len=128, num_gpu_blocks_override=64)
    prompts = ["The capital of France is", "Bread is", "A river carries stones from the mountains to the sea"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert alone.token_ids == output.outputs[0].token_ids
        assert alone.cumulative_logprob == output.outputs[0].cumulative_logprob
    assert "Paris" in together[0].outputs[0].text


@pytest.mark.parametrize(("units", "same"), [(True, "int8_per_channel"), (False, "int8_per_group")])
def test_int8_is_the_faster_kind_and_the_log_names_the_other(
    units: bool,
    same: str,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("octavo.system.limits.has_matrix_units", lambda: units)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 16}

    def answer(quantization: str) -> float | None:
        llm = LLM(str(tiny_checkpoints["llama"]), quantization=quantization, **options)
        output = llm.generate([{"prompt_token_ids": [5, 17, 200, 9]}], params, use_tqdm=False)[0]
        return output.outputs[0].cumulative_logprob

    with caplog.at_level("INFO", "octavo"):
        chosen = answer("int8")
    assert ("--quantization int8_per_group keeps one for every 32 weights" in caplog.text) == units
    kinds = {kind: answer(kind) for kind in ("int8_per_channel", "int8_per_group")}
    assert chosen == kinds[same] and len(set(kinds.values())) == 2


def test_one_scale_a_group_is_for_cpus(tiny_checkpoints: dict[str, Path]) -> None:
    config = dataclasses.replace(model_config(tiny_checkpoints["llama"]), quantization="int8_per_group")
    with pytest.raises(ConfigError, match="int8_per_group is for CPUs; use int8"):
        registry.quantization_config(config, "cuda")


def test_one_scale_a_channel_is_for_plain_weights() -> None:
    with pytest.raises(ConfigError, match=r"int8_per_channel is for plain weights.* leave it out"):
        LLM(quantization="int8_per_channel")


def test_an_unknown_quantization_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of"):
        LLM(quantization="magic")
    assert set(STORED) == {*registry._FORMATS, "gguf"}, "what is said before the engine is started and by it"


def test_recorded_steps_give_the_bits_of_steps_called_one_operation_at_a_time() -> None:
    """Whole generations, cumulative log-probabilities included, while sequences come and go beside each other."""
    options: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64}
    prompts = ["Bread is", "Once upon a time there was", "A river carries stones from", "The sea"]
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=6 + 5 * i, logprobs=2) for i in range(len(prompts))]
    recorded, called = LLM(**options), LLM(**options)
    steps = recorded.engine.executor.worker.runner.device_runner.recorded_steps  # type: ignore[attr-defined]
    called.engine.executor.worker.runner.device_runner.recorded_steps = None  # type: ignore[attr-defined]
    assert steps is not None
    for turn in range(3):  # the second finds its prompts in the prefix cache, the third wants to know about them
        params = [dataclasses.replace(given, prompt_logprobs=1 if turn == 2 else None) for given in params]
        outputs = [llm.generate(prompts, params, use_tqdm=False) for llm in (recorded, called)]
        ours, theirs = (
            [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in one] for one in outputs
        )
        assert ours == theirs
    assert steps._step is not None and steps._layers is not None and steps._head is not None


def test_log_probabilities_of_a_prompt_leave_its_tokens_alone() -> None:
    """Its logits are computed from the same states as the next token's, in memory that recorded steps use in turn."""
    few, many = (LLM(max_model_len=128, num_gpu_blocks_override=64, max_num_seqs=n) for n in (2, 64))
    plain = SamplingParams(max_tokens=4, temperature=0)
    told = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1)
    expected = few.generate("The capital of", plain, use_tqdm=False)[0].outputs[0].token_ids
    for llm in (few, many):
        assert llm.generate("The capital of", told, use_tqdm=False)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"kv_cache_dtype": "float16"}], ids=str)
def test_steps_that_cannot_be_recorded_run_one_operation_at_a_time(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    small: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64, "max_num_seqs": 2}
    prompts = ["The capital of", "Two"]
    tried, called = LLM(**small, **options), LLM(**small, **options)
    called.engine.executor.worker.runner.device_runner.recorded_steps = None  # type: ignore[attr-defined]
    outputs = [llm.generate(prompts, params, use_tqdm=False) for llm in (tried, called)]
    ours, theirs = ([(output.error, output.outputs[0].text) for output in one] for one in outputs)
    assert ours == theirs and all(text for _, text in ours)


def test_damaged_weights_end_in_an_error_and_not_in_tokens() -> None:
    llm = LLM(max_model_len=128, num_gpu_blocks_override=16)
    llm.engine.executor.worker.model.model.norm.weight.data.fill_(torch.nan)  # type: ignore[attr-defined]
    output = llm.generate(["Bread is"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
    assert output.error is not None and "no token could be sampled" in output.error
