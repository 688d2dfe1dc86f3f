"""Nothing is loaded that cannot fit: what a model takes is known from headers, and said with a way out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import cpu_time
from support.gguf_files import write_gguf
from support.paged import model_config
from support.quantized_files import awq, quantize_checkpoint
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.interface.engine_config import CacheConfig, EngineConfig
from octavo.interface.kv_cache_layout import make_layout
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.quantization.canonical import GroupCodes
from octavo.layers.quantization.checkpoint import CodesLinearMethod
from octavo.loader.checkpoint import stored_weights
from octavo.loader.load_model import load_model
from octavo.loader.weight_bytes import model_without_memory, weight_size
from octavo.memory import plan
from octavo.memory.advice import refusal as refusal_of
from octavo.memory.dry_run import make_plan
from octavo.memory.ledger import DeviceMemory, MemoryLedger, this_machine
from octavo.memory.plan import PROCESS_BYTES, plan_cpu_memory
from octavo.system import limits
from octavo.worker import worker
from octavo.worker.model_memory import measure_built, model_memory

GIB = 1 << 30
LLAMA_70B = {  # in a tenth of its layers, each ten times as large: a plan takes time by the layer
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 640,
    "num_key_value_heads": 80,
    "head_dim": 128,
    "intermediate_size": 286720,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def llama_70b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def engine_config(model: Path, **options: Any) -> EngineConfig:
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **options).create_engine_config(progress=False)


@pytest.mark.sampled
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_checkpoint_are_known_before_it_is_read(
    family: str, dtype: str, quantization: str, tiny_checkpoints: dict[str, Path]
) -> None:
    config = replace(model_config(tiny_checkpoints[family], dtype), quantization=quantization)
    size = weight_size(model_without_memory(config, "cpu"), stored_weights(config))
    loaded = load_model(config)
    assert size.nbytes == loaded.num_weight_bytes()
    held = {id(t): t.nbytes for t in [*loaded.parameters(), *loaded.buffers()]}
    assert size.nbytes == sum(held.values())
    assert size.parameters == sum(t.numel() for t in make_model(*FAMILIES[family]).parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q5_1", "F16", "BF16"])
def test_the_bytes_of_a_gguf_file_are_known_before_it_is_read(
    qtype: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    settings = FAMILIES["llama"][1] | {"intermediate_size": 160, "tie_word_embeddings": tied}
    write_gguf(tmp_path / "m.gguf", make_model("LlamaConfig", settings), arch="llama", qtype=qtype, vocabulary=False)
    for quantization in (None, "int8", "none"):
        config = replace(model_config(tmp_path / "m.gguf"), quantization=quantization)
        size = weight_size(model_without_memory(config, "cpu"), stored_weights(config))
        assert size.nbytes == load_model(config).num_weight_bytes(), quantization


@pytest.fixture(autouse=True)
def _no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them int8 takes less memory."""
    monkeypatch.setattr(limits, "has_matrix_units", lambda: False)


def test_a_model_that_cannot_fit_is_refused_before_anything_is_loaded(
    llama_70b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "memory_limit", lambda: 24 * GIB)
    monkeypatch.setattr(worker, "load_model", lambda *_: pytest.fail("the model is being loaded"))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}

    def refusal(**more: Any) -> str:
        with pytest.raises(ConfigError) as error:
            LLM(str(llama_70b), **options | more)
        assert "\n" not in str(error.value)
        return str(error.value)

    text = refusal()  # with what is imported
    with cpu_time.at_most(1, time.thread_time):  # what earlier tests' threads still do does not count
        assert refusal() == text
    assert "needs 131.4 GiB" in text and "24.0 GiB" in text and "70.7 GiB with --quantization int8: too much" in text
    assert "--model of at most 11 billion parameters in bfloat16, or 21 billion parameters in int8" in text
    assert "--dtype bfloat16" in refusal(dtype="float32")
    monkeypatch.setattr(limits, "memory_limit", lambda: 96 * GIB)
    assert "it fits with --quantization int8 (70.7 GiB)" in refusal()
    monkeypatch.setattr(limits, "memory_limit", lambda: 140 * GIB)
    assert "it fits with --gpu-memory-utilization 0.95 (131.4 GiB)" in refusal()
    # The weights would fit, one sequence of the length that is asked for would not.
    monkeypatch.setattr(limits, "memory_limit", lambda: 147 * GIB)
    text = refusal(max_model_len=8192)
    assert "max_model_len=8192 needs 512 KV cache blocks (2.50 GiB)" in text and "set --max-model-len to" in text
    assert "gpu_memory_utilization=0.9 leaves 0.6" in text
    assert "lower --kv-cache-memory-bytes" in refusal(kv_cache_memory_bytes=16 * GIB)
    text = refusal(max_model_len=512, kv_cache_memory_bytes=10 << 20)
    assert "there is room for 1; set --max-model-len to 16" in text


def test_the_context_is_what_fits_unless_a_number_is_asked_for(
    llama_70b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama 3.1 8B with its 131,072 tokens, on machines of several sizes."""
    settings = {"hidden_size": 4096, "num_attention_heads": 128, "num_key_value_heads": 32, "intermediate_size": 57344}
    (llama_70b / "config.json").write_text(json.dumps(LLAMA_70B | settings | {"max_position_embeddings": 131072}))

    def planned(limit: int, **options: Any) -> MemoryLedger:
        monkeypatch.setattr(limits, "memory_limit", lambda: limit)
        config = engine_config(llama_70b, load_format="dummy", quantization="int8", **options)
        needs = model_memory(config, CPU)
        layout = make_layout(needs.specs, 131072, config.cache.block_size, 192)
        return plan_cpu_memory(config.cache, layout, needs.weights, 131072, config.fit_max_model_len)

    for words in ({}, {"max_model_len": "auto"}, {"max_model_len": -1}):
        ledger = planned(24 * GIB, **words)
        assert ledger.max_model_len == 131072 and ledger.shortened(131072, CacheConfig()) is None
        # All that is left, of which prefixes of requests that have ended keep no more than their share.
        assert ledger.kv_cache == pytest.approx(int(24 * 0.9 * GIB) - PROCESS_BYTES - ledger.weights, abs=2**24)
        assert ledger.kv_cache > 8 * GIB
        assert ledger.prefix_cache_blocks * ledger.block_bytes == pytest.approx(3 * GIB, abs=2**24)
    ledger = planned(14 * GIB)
    line = ledger.shortened(131072, CacheConfig())
    assert 16384 < ledger.max_model_len < 131072 and line is not None and "\n" not in line
    assert f"max_model_len is {ledger.max_model_len:,}, not the model's 131,072" in line
    assert "--gpu-memory-utilization above 0.9" in line
    longer = planned(14 * GIB, gpu_memory_utilization=0.95)
    assert longer.max_model_len > ledger.max_model_len
    with pytest.raises(ConfigError, match=f"set --max-model-len to {ledger.max_model_len} or less"):
        planned(14 * GIB, max_model_len=131072)
    # Who says how much the cache gets may fill all of it with prefixes.
    assert planned(24 * GIB, kv_cache_memory_bytes=GIB).prefix_cache_blocks is None


def test_a_shorter_context_is_told_once_with_the_flag_for_a_longer_one(
    tiny: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    del tiny["num_gpu_blocks_override"]
    told = []
    for flags in ({"kv_cache_memory_bytes": 100_000}, {"num_gpu_blocks_override": 4}, {}):
        caplog.clear()
        llm = LLM(**tiny, **flags)
        length = llm.config.scheduler.max_model_len
        buffers = llm.engine.executor.worker.model.named_buffers()  # type: ignore[attr-defined]
        (table,) = (buffer for name, buffer in buffers if name.endswith("cos_sin_cache"))
        assert len(table) == length == llm.config.model.max_model_len
        lines = [r.getMessage() for r in caplog.records if "max_model_len is" in r.getMessage()]
        told.append((length, *(line.rpartition("take ")[2] for line in lines)))
        if length == 512:
            continue
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == length - 3
    (in_bytes, flag), (in_blocks, other), (own,) = told
    assert in_bytes < own == 512 and in_blocks == 64
    assert other == "--num-gpu-blocks-override 32"
    wanted = flag.split()
    assert wanted[0] == "--kv-cache-memory-bytes"
    assert LLM(**tiny, kv_cache_memory_bytes=int(wanted[1])).config.scheduler.max_model_len == 512


def test_prefixes_of_ended_requests_take_no_more_than_their_share(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other touches no further memory of the cache than that, many at once what they need."""
    del tiny["num_gpu_blocks_override"]
    monkeypatch.setattr(limits, "memory_limit", lambda: GIB)
    monkeypatch.setattr(plan, "PREFIX_CACHE_SHARE", 400_000 / GIB)
    llm = LLM(**tiny, max_model_len=128)
    batch = llm.engine.executor.worker.runner.requests.batch  # type: ignore[attr-defined]
    most = llm.engine.executor.prefix_cache_blocks
    assert most is not None and 16 < most < 200
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def prompts(count: int, first: int) -> list[Any]:
        numbers = range(first, first + count)
        return [{"prompt_token_ids": [3 + number % 300, 3 + number // 300, *range(3, 80)]} for number in numbers]

    for prompt in prompts(100, 0):
        llm.generate([prompt], params, use_tqdm=False)
    assert batch.highest_block == most
    (again,) = llm.generate(prompts(1, 99), params, use_tqdm=False)
    assert again.num_cached_tokens is not None and again.num_cached_tokens > 64
    llm.generate(prompts(100, 100), params, use_tqdm=False)
    assert most < batch.highest_block < 100 * 6 + 1
    llm.engine.check_integrity()


@pytest.mark.sampled
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ledger_lists_weights_as_they_are_held(
    family: str, quantization: str, tiny_checkpoints: dict[str, Path]
) -> None:
    config = replace(model_config(tiny_checkpoints[family], "bfloat16"), quantization=quantization)
    model = load_model(config)
    kinds = model.weight_bytes_by_kind()
    assert sum(kinds.values()) == model.num_weight_bytes()
    linear = sum(prod(shard.shape) for layer in model.linear_layers() for shard in layer.shards)
    if quantization == "none":
        assert kinds["bfloat16"] >= 2 * linear and "int8" not in kinds
    else:
        assert linear < kinds["int8"] < 1.5 * linear
    layout = make_layout([KVCacheSpec(1, 8, "float32")], 16, 16, 8)
    ledger = MemoryLedger(GIB, 3 << 20, 1 << 20, 3, 100, 16, layout)
    assert any(
        "weights" in line and "int4 2.0, float32 1.0" in line
        for line in ledger.lines({"int4": 2 << 20, "float32": 1 << 20})
    )


def test_a_file_of_4_bits_is_held_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    model = make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 160})
    write_gguf(tmp_path / "m.gguf", model, arch="llama", qtype="Q4_0", vocabulary=False)
    config = replace(model_config(tmp_path / "m.gguf"), quantization=None)
    kinds = load_model(config).weight_bytes_by_kind()
    assert next(iter(kinds)) == "int4" and "int8" not in kinds


@pytest.mark.parametrize("kept", ["packed", "as stored"])
def test_codes_of_a_checkpoint_are_listed_by_their_bits(kept: str, tmp_path: Path) -> None:
    if kept == "packed":  # on a CPU
        make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128}).save_pretrained(tmp_path / "plain")
        description = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
        quantize_checkpoint(tmp_path / "plain", tmp_path / "awq", awq(32), description)
        model = load_model(replace(model_config(tmp_path / "awq"), quantization=None))
        layer = model.model.layers[0].mlp.down_proj
    else:
        layer = LinearBase([Shard((64, 128), slice(0, 64), slice(0, 128), 0)], True, TensorParallel())
        layer.create_weights(method := CodesLinearMethod([]), torch.bfloat16)
        codes = torch.randint(16, (64, 128), dtype=torch.uint8)
        method.keep(0, GroupCodes(codes, torch.ones(64, 4, dtype=torch.float16), 32, None, None, 4))
        method.process_weights_after_loading(layer)
    held = layer.method.weight_kinds(layer)
    assert {id(tensor) for tensor, _ in held} == {id(t) for t in [*layer.parameters(), *layer.buffers()]}
    kinds = {kind for _, kind in held}
    assert kinds == ({"int4"} if kept == "packed" else {"int4", "bfloat16"})  # the latter has a bias


def test_a_gpu_has_other_ways_out(llama_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed to know what it would have to hold."""

    def refusal(total: int, host: int, **options: Any) -> str:
        monkeypatch.setattr(limits, "memory_limit", lambda: host)
        config = replace(engine_config(llama_70b, load_format="dummy", **options), device="cuda")
        plan = make_plan(config, DeviceMemory("cuda", total, GIB), measure_built)
        return refusal_of(config, plan, measure_built, this_machine())

    assert "it fits with --device cpu (131.4 GiB)" in refusal(24 * GIB, 256 * GIB)
    assert "it fits with --gpu-memory-utilization 0.95" in refusal(170 * GIB, GIB, gpu_memory_utilization=0.5)
    assert "with --dtype bfloat16 (131.4 GiB)" in refusal(192 * GIB, GIB, dtype="float32")
    text = refusal(24 * GIB, GIB)
    assert "--quantization int8: too much as well" in text and "at most 11 billion parameters" in text


def test_quantised_files_are_dequantised_on_a_gpu() -> None:
    config = EngineArgs(dtype="bfloat16").create_engine_config(progress=False)
    on_cpu, on_gpu = model_memory(config, CPU), model_memory(config, CUDA)
    assert (on_cpu.weight_dtype, on_gpu.weight_dtype) == ("gguf", "bfloat16") and on_cpu.parameters == on_gpu.parameters
    assert 2.0 < on_gpu.weights / on_gpu.parameters < 2.1 and on_cpu.weights / on_cpu.parameters < 0.8


def test_a_context_that_is_too_long_for_its_table_is_named(llama_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotary angles of 100 million positions alone take 48 GiB."""
    monkeypatch.setattr(limits, "memory_limit", lambda: 96 * GIB)
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "quantization": "int8"}
    config = LLAMA_70B | {"max_position_embeddings": 10**8}
    (llama_70b / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"it fits with --max-model-len \d+ \(70\.8 GiB\)$"):
        LLM(str(llama_70b), **options)
    config = LLAMA_70B | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    (llama_70b / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="max_model_len must be at most 134217728, got 1000000000000"):
        LLM(str(llama_70b), max_model_len=10**12, **options)


@pytest.mark.slow
def test_a_server_refuses_within_little_memory(llama_70b: Path) -> None:
    larger = LLAMA_70B | {"hidden_size": 1 << 16, "intermediate_size": 1 << 21}  # than any machine
    (llama_70b / "config.json").write_text(json.dumps(larger))
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        str(llama_70b),
        "--load-format",
        "dummy",
        "--skip-tokenizer-init",
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        tree, peak = psutil.Process(server.pid), 0
        while server.poll() is None:
            total = 0
            for process in [tree, *tree.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            peak = max(peak, total)
            time.sleep(0.02)
        assert server.stderr is not None
        *_, last = server.stderr.read().splitlines()
    assert server.returncode not in (0, None)
    assert last.startswith("octavo: error: ") and " GiB for its weights" in last and "--model of at most" in last
    assert 0 < peak < 600e6


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> dict[str, Any]:
    return {
        "model": str(tiny_checkpoints["llama"]),
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64,
        "device": "cpu",
    }


OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 24 GiB"
)
ADVICE = (
    r"out of memory \(CUDA out of memory\. Tried to allocate 2\.00 GiB\..*"
    r"try --max-num-seqs 64, --num-gpu-blocks-override 32, --quantization int8"
)


def test_out_of_memory_while_starting_is_advice(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(worker, "load_model", fail)
    with pytest.raises(ConfigError, match=ADVICE) as error:
        LLM(**tiny)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("when", ["launched", "read"])
def test_out_of_memory_in_a_step_is_advice_to_its_requests_alone(when: str, tiny: dict[str, Any]) -> None:
    llm = LLM(**tiny)
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]

    def fail(*_: object) -> Any:
        raise OUT_OF_MEMORY

    prompt, params = [{"prompt_token_ids": [3, 4, 5]}], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    runner.execute_model = fail if when == "launched" else lambda step: fail
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.error is not None and "\n" not in output.error
    assert "try --max-num-seqs 64" in output.error and "CUDA out of memory" in output.error
    del runner.execute_model
    assert len(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids) == 2
