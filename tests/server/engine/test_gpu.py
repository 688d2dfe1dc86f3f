"""The engine on a CUDA device: graphs and overlapping steps give what plain steps of the reference kernels give."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.adapters import save_adapter
from support.overlapped import CASES, PARAMS, answers, prompts_of, tiny

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import ConfigError
from octavo.loader.safetensors_reader import SafetensorsFile
from octavo.loader.staging import PIECE

LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(path: Path, **changes: Any) -> LLM:
    return tiny(path, device="cuda", **changes)


@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_token(case: str, tiny_checkpoints: dict[str, Path]) -> None:
    family, changes = CASES[case]
    path, prompts = tiny_checkpoints[family], prompts_of(family, len(PARAMS))
    params = [SamplingParams(**values) for values in PARAMS]
    graphs, eager = on_gpu(path, **changes), on_gpu(path, enforce_eager=True, **changes)
    for _ in range(2):
        ours = [[o.token_ids for o in r.outputs] for r in graphs.generate(prompts, params, use_tqdm=False)]
        assert ours == [[o.token_ids for o in r.outputs] for r in eager.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt"])
def test_greedy_tokens_are_those_of_the_cpu(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    prompts = prompts_of(family, 8)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    cpu = tiny(tiny_checkpoints[family], device="cpu")
    gpu = on_gpu(tiny_checkpoints[family])
    ours, theirs = (llm.generate(prompts, params, use_tqdm=False) for llm in (gpu, cpu))
    assert [o[0][0] for o in answers(ours)] == [o[0][0] for o in answers(theirs)]


@pytest.mark.parametrize("dtype, kv_dtype", [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "fp8")])
def test_half_precision_runs(dtype: str, kv_dtype: str, tiny_checkpoints: dict[str, Path]) -> None:
    llm = on_gpu(tiny_checkpoints["qwen3"], dtype=dtype, kv_cache_dtype=kv_dtype)
    outputs = llm.generate(prompts_of(dtype, 20), SamplingParams(temperature=0.7, max_tokens=40), use_tqdm=False)
    assert all(o.outputs[0].finish_reason in ("length", "stop") and o.outputs[0].token_ids for o in outputs)
    llm.engine.check_integrity()


@pytest.fixture(scope="module")
def adapters(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """None, and adapters of unlike ranks and layers."""
    from transformers import AutoModelForCausalLM

    folder, model = tmp_path_factory.mktemp("adapters"), AutoModelForCausalLM.from_pretrained(tiny_checkpoints["llama"])
    layers: list[str | list[str]] = ["all-linear", ["q_proj", "v_proj", "down_proj"], ["embed_tokens", "o_proj"]]
    found: list[LoRARequest | None] = [None]
    for i, modules in enumerate(layers):
        save_adapter(folder / f"{i}", model, i, r=3 + 5 * i, lora_alpha=16, target_modules=modules)
        found.append(LoRARequest(f"{i}", i + 1, str(folder / f"{i}")))
    return found


@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}, {"speculative_config": LOOKUP}], ids=str)
def test_adapters_answer_as_on_the_cpu(
    changes: dict[str, Any], adapters: list[LoRARequest | None], tiny_checkpoints: dict[str, Path]
) -> None:
    """Beside each other and the model, alone, and where they take turns in slots."""
    prompts = prompts_of("adapters", 5) * len(adapters)
    of_each = [adapter for adapter in adapters for _ in range(5)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def answer(llm: LLM, prompts: Any, of_each: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, params, lora_request=of_each, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    settings = {"enable_lora": True, "max_lora_rank": 13}
    cpu = answer(tiny(tiny_checkpoints["llama"], device="cpu", max_loras=3, **settings), prompts, of_each)
    assert cpu[:5] != cpu[5:10] != cpu[10:15] != cpu[15:]
    for slots in (3, 1):
        llm = on_gpu(tiny_checkpoints["llama"], max_loras=slots, max_cpu_loras=3, **settings, **changes)
        assert answer(llm, prompts, of_each) == cpu
        llm.reset_prefix_cache()
        assert [answer(llm, prompts[i], of_each[i])[0] for i in range(0, len(prompts), 4)] == cpu[::4]
        llm.engine.check_integrity()


@pytest.mark.parametrize("changes", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
def test_adapters_run_in_half_precision(
    changes: dict[str, Any], adapters: list[LoRARequest | None], tiny_checkpoints: dict[str, Path]
) -> None:
    llm = on_gpu(
        tiny_checkpoints["llama"], dtype="bfloat16", enable_lora=True, max_loras=3, max_lora_rank=13, **changes
    )
    prompts, params = prompts_of("half", 1) * 40, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(prompts, params, lora_request=[adapters[i % 4] for i in range(40)], use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 20 and not output.error for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) >= 4
    llm.engine.check_integrity()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_weights_arrive_as_they_are_stored(stored: torch.dtype, tmp_path: Path) -> None:
    """Of some pieces each, a little more and less, by several threads at once."""
    sizes = [pieces * PIECE // stored.itemsize + more for pieces in (0, 1, 2) for more in (-1, 0, 1)][1:]
    made = {f"{size}": torch.randn(size).to(stored) for size in sizes}
    save_file(made, tmp_path / "model.safetensors")
    sources = list(SafetensorsFile(tmp_path / "model.safetensors").sources()) * 3
    targets = [torch.zeros(source.shape, dtype=torch.bfloat16, device="cuda") for source in sources]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda source, target: source.load_into(target), sources, targets))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target.cpu(), made[source.name].to(torch.bfloat16))


def test_memory_that_is_too_small_names_the_flag(tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        LLM(str(tiny_checkpoints["llama"]), skip_tokenizer_init=True, device="cuda", gpu_memory_utilization=0.001)
