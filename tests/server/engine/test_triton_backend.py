"""Whole models on the Triton kernels, in Triton's interpreter, give the tokens of the plain torch ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import triton.language as tl
from support.family_cases import MOE_CASES
from support.overlapped import overlapped
from support.triton_interpreter import hasten
from triton.runtime import interpreter

import octavo_kernels
from octavo import LLM, SamplingParams
from octavo_kernels.triton import INTERPRETED, sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1"),
]

if INTERPRETED:
    hasten()

PROMPTS = [[5, 9, 300, 17, 3, 44, 8], list(range(20, 40)), [7]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=11, max_tokens=4, ignore_eos=True, presence_penalty=0.5, logit_bias={7: 2.0}),
    SamplingParams(temperature=1.2, seed=12, max_tokens=4, ignore_eos=True, top_k=40, top_p=0.9, min_p=0.01),
]


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    yield
    octavo_kernels.select_backend("auto")


def engine(path: Path, backend: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> LLM:
    monkeypatch.setenv("OCTAVO_KERNEL_BACKEND", backend)
    octavo_kernels.select_backend("auto")
    assert octavo_kernels.backend_name(torch.device("cpu")) == backend
    return LLM(
        str(path),
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_model_len=64,
        max_num_batched_tokens=16,  # the second prompt comes in chunks, beside rows that decode
        **{"max_num_seqs": 4} | given,
    )


def generate(llm: LLM) -> list[tuple[list[int], object]]:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    llm.engine.check_integrity()
    first = [sorted(step) for step in outputs[0].outputs[0].logprobs or []]
    return [(o.outputs[0].token_ids, first) for o in outputs]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.long)])
def test_models_give_the_reference_backends_tokens(
    family: str, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, prompts in chunks and decoding rows in one step, log-probabilities of the same tokens."""
    monkeypatch.setattr(sampling, "CONFIG", sampling.SamplingConfig(tile=128, steps=4, keep=32))
    expected = generate(engine(tiny_checkpoints[family], "reference", monkeypatch))
    assert generate(engine(tiny_checkpoints[family], "triton", monkeypatch)) == expected


def test_a_mixture_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny Mixtral: rows that are sorted by expert, and few that are not."""
    monkeypatch.setattr(sampling, "CONFIG", sampling.SamplingConfig(tile=128, steps=4, keep=32))
    name, config = MOE_CASES["mixtral"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**config | {"vocab_size": 320}))
    model.save_pretrained(tmp_path)
    expected = generate(engine(tmp_path, "reference", monkeypatch))
    assert generate(engine(tmp_path, "triton", monkeypatch)) == expected


@pytest.mark.parametrize(("max_num_seqs", "lengths"), [(1, (2, 9)), (3, (2, 5, 8, 9, 35))], ids=["one row", "three"])
def test_steps_that_would_be_captured(
    max_num_seqs: int, lengths: tuple[int, ...], tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of plain steps, and again when what remains of a prompt after its known beginning is short."""
    monkeypatch.setattr(sampling, "CONFIG", sampling.SamplingConfig(tile=128, steps=4, keep=32))
    prompts = [{"prompt_token_ids": list(range(20, 20 + length))} for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        return [output.outputs[0].token_ids for batch in outputs for output in batch]

    expected = tokens(engine(tiny_checkpoints["llama"], "reference", monkeypatch, max_num_seqs=max_num_seqs))
    llm = overlapped(engine(tiny_checkpoints["llama"], "triton", monkeypatch, max_num_seqs=max_num_seqs))
    assert tokens(llm) == expected


@pytest.fixture
def rounding_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry when it rounds to e4m3 (126.24 becomes 64); GPUs and torch do not."""
    plain = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return plain(values, source, target, rounding)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.usefixtures("rounding_of_a_gpu")
def test_an_fp8_cache(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cache than float32's, the same in both backends; asked again, prompts go on in copies of its blocks."""
    path, copied = tiny_checkpoints["llama"], []
    expected = generate(engine(path, "reference", monkeypatch, kv_cache_dtype="fp8"))
    llm = engine(path, "triton", monkeypatch, kv_cache_dtype="fp8")
    worker = llm.engine.executor.worker  # type: ignore[attr-defined]
    kv_cache = worker.runner.kv_cache
    assert kv_cache.blocks.nbytes == worker.ledger.kv_cache
    assert {layer.dtype for layer in kv_cache.layers} == {torch.float8_e4m3fn}
    plain = octavo_kernels.copy_blocks
    monkeypatch.setattr(octavo_kernels, "copy_blocks", lambda *given: plain(*given) or copied.append(given))
    assert generate(llm) == expected and not copied
    assert generate(llm) == expected and copied
