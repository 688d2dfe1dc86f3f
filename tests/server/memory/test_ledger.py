"""`octavo plan` says what the engine does: to the byte."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES
from support.gguf_files import write_gguf
from support.tiny_models import FAMILIES, make_model

from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.flags.fields import parse_int
from octavo.layers.parallel import Replicas, TensorParallel
from octavo.memory.dry_run import make_plan
from octavo.memory.ledger import DeviceMemory
from octavo.memory.plan import EXCHANGED_BYTES
from octavo.plan.measure import measure
from octavo.plan.model import planned_model
from octavo.system import limits
from octavo.worker.worker import Worker
from octavo_kernels.cpu.collectives import shared_memory_bytes

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"tie_word_embeddings": True},
    "mistral": LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 96, "head_dim": 24},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "opt": LLAMA | {"architectures": ["OPTForCausalLM"], "ffn_dim": 100},
    "gemma3": LLAMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 32,
        "num_hidden_layers": 3,
        "sliding_window": 200,
        "sliding_window_pattern": 3,
    },
    "deepseek": LLAMA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 48,
        "q_lora_rank": 40,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "n_group": 4,
        "topk_group": 2,
    },
}
CASES = list(itertools.product(CONFIGS, (None, "int8"), ("auto", "bfloat16", "int8"), (None, 512, 1000), (3, 64)))


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def plan_of(model: str, total: int = GIB, ranks: int = 1, **options: Any) -> Any:
    device = DeviceMemory("cpu", total, has_matrix_units=limits.has_matrix_units())
    with planned_model(EngineArgs(model=model, **options)) as model:
        return make_plan(replace(model.config, device="cpu"), device, measure, ranks)


def outcome(ledger: Any) -> tuple[Any, ...]:
    return (ledger.weights, ledger.kv_cache, ledger.num_blocks, ledger.block_bytes, ledger.max_model_len, ledger.parts)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("octavo.system.limits.memory_limit", lambda: GIB)
    yield


@pytest.mark.parametrize(("name", "units"), [*((name, False) for name in CONFIGS), ("llama", True)])
def test_it_is_the_engines_ledger_to_the_byte(
    name: str, units: bool, tmp_path: Path, limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a CPU with matrix units, whose int8 is of another size."""
    monkeypatch.setattr("octavo.system.limits.has_matrix_units", lambda: units)
    compare(write(tmp_path, CONFIGS[name]), [case[1:] for case in CASES if case[0] == name], 20, load_format="dummy")


@pytest.mark.parametrize("qtype", ["Q4_1", "Q8_0"])
def test_gguf_files_have_the_engines_ledger_too(
    qtype: str, tmp_path: Path, limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    settings = FAMILIES["llama"][1] | {"intermediate_size": 160}
    write_gguf(tmp_path / "m.gguf", make_model("LlamaConfig", settings), arch="llama", qtype=qtype, vocabulary=False)
    cases = itertools.product((None, "int8"), ("auto", "bfloat16", "int8"), (None, 100), (3, 64))
    compare(str(tmp_path / "m.gguf"), list(cases), 7)


def compare(model: str, cases: list[tuple[Any, ...]], at_least: int, **more: Any) -> None:
    """Plans and engines with (quantization, kv_cache_dtype, max_model_len, max_num_seqs)."""
    compared = 0
    for quantization, kv_dtype, length, seqs in cases:
        options: dict[str, Any] = {
            "quantization": quantization,
            "kv_cache_dtype": kv_dtype,
            "max_model_len": length,
            "max_num_seqs": seqs,
            "skip_tokenizer_init": True,
            "gpu_memory_utilization": 0.27,
            **more,
        }
        try:
            worker = Worker(EngineArgs(model=model, device="cpu", **options).create_engine_config(progress=False))
        except ConfigError as error:
            plan = None
            try:
                plan = plan_of(model, **options)
            except ConfigError as ours:
                assert str(ours) == str(error)
            assert plan is None or plan.ledger is None
            continue
        plan = plan_of(model, **options)
        assert outcome(plan.ledger) == outcome(worker.ledger)
        assert plan.kv_bytes_per_token == sum(spec.bytes_per_token() for spec in worker.ledger.layout.specs)
        compared += 1
    assert compared > at_least


@pytest.mark.parametrize(
    ("limit", "flags", "ways"),
    [
        (96, [], {"--quantization"}),
        (140, [], {"--quantization", "--gpu-memory-utilization"}),
        (147, ["--max-model-len", "8192"], {"--quantization", "--max-model-len"}),
        (147, ["--kv-cache-memory-bytes", "16GiB"], {"--kv-cache-memory-bytes", "--quantization"}),
        (24, [], set()),
    ],
)
def test_the_engine_refuses_in_the_words_and_with_the_flags_of_the_plan(
    limit: int,
    flags: list[str],
    ways: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("octavo.system.limits.memory_limit", lambda: limit * GIB)
    path = write(tmp_path, LLAMA_70B)
    assert main(["plan", path, "--cpu", "--json", *flags]) == 1
    said = json.loads(capsys.readouterr().out)
    options = {
        flag[2:].replace("-", "_"): parse_int(value) for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    args = EngineArgs(model=path, device="cpu", load_format="dummy", skip_tokenizer_init=True, **options)
    with pytest.raises(ConfigError) as error:
        Worker(args.create_engine_config(progress=False))
    assert said["reasons"][0] == f"will not start: {error.value}"
    named = re.findall(r"with (--[a-z-]+) (\S+) \(", str(error.value))
    assert named == [(way["flag"], way["value"]) for way in said["suggestions"]]
    assert ways <= set(dict(named)) and bool(ways) == bool(named)
    for flag, value in named:
        kept = [word for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] != flag for word in pair]
        assert main(["plan", path, "--cpu", *kept, flag, value]) == 0, (flag, value)


def test_the_embedded_model_is_planned_from_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2-135m-instruct", "--memory", "24GiB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["fits"], said["served"], said["block_size"]) == (True, True, 16)
    assert said["num_blocks"] * 195_840 <= said["kv_cache_bytes"] == (said["num_blocks"] + 1) * 195_840
    room = int(24 * GIB * 0.9) - (256 << 20) - said["weights_bytes"]
    assert 0 <= room - said["kv_cache_bytes"] < 195_840
    assert main(["show", "smollm2-135m-instruct", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_per_token"] == said["kv_bytes_per_token"] == 12_240


@pytest.mark.parametrize(("ranks", "engines"), [(1, 1), (3, 1), (1, 2)])
def test_the_plan_of_ranks_is_the_ledger_of_each(
    ranks: int, engines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the embedded model: weights, blocks, and what ranks exchange; of several engines each one's, and the sums."""
    monkeypatch.setattr("octavo.system.limits.memory_limit", lambda: 3 * GIB)
    args = EngineArgs(tensor_parallel_size=ranks, data_parallel_size=engines)
    config = args.create_engine_config(progress=False)
    threads = torch.get_num_threads()
    worker = Worker(config, tp=TensorParallel(ranks - 1, ranks))
    torch.set_num_threads(threads)
    flags = ["--cpu", "-tp", str(ranks), "-dp", str(engines)]
    assert main(["plan", *flags]) == 0
    assert ("engines " in capsys.readouterr().out) == (engines > 1)
    assert main(["plan", *flags, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["served"] and (said["tensor_parallel_size"], said["data_parallel_size"]) == (ranks, engines)
    assert said["num_blocks_in_all"] == engines * said["num_blocks"]
    assert said["weights_bytes"] == worker.ledger.weights == worker.model.num_weight_bytes()
    assert said["num_blocks"] == worker.ledger.num_blocks - 1
    exchanged = worker.ledger.shares().get("communication", 0)
    assert exchanged == (0 if ranks == 1 else EXCHANGED_BYTES)
    assert ranks == 1 or abs(exchanged * ranks - shared_memory_bytes(ranks)) <= 4096


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_plan_of_ranks_with_whole_experts_is_the_ledger_of_the_first(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which has three of OLMoE's five; the second has two. So they have where each is an engine of its own."""
    monkeypatch.setattr("octavo.system.limits.memory_limit", lambda: GIB)
    model = make_model(*FAMILY_CASES["olmoe"])
    model.save_pretrained(tmp_path)
    parameters = sum(weight.numel() for weight in model.parameters())
    options: dict[str, Any] = {"quantization": quantization, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, **options)
    config, threads = args.create_engine_config(progress=False), torch.get_num_threads()
    ledgers = [Worker(config, tp=TensorParallel(rank, 2, expert_parallel=True)).ledger for rank in range(2)]
    alone = replace(config, parallel=replace(config.parallel, tensor_parallel_size=1, data_parallel_size=2))
    engine = Worker(alone, tp=TensorParallel(expert_parallel=True, replicas=Replicas(0, 2))).ledger
    torch.set_num_threads(threads)
    for flag, ledger in (("-tp", ledgers[0]), ("-dp", engine)):
        flags = ["--cpu", flag, "2", "-ep", "--quantization", quantization]
        assert main(["plan", str(tmp_path), *flags, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["weights_bytes"], said["num_blocks"]) == (ledger.weights, ledger.num_blocks - 1)
        assert said["served"] and said["parameters"] == parameters
    assert ledgers[1].weights < ledgers[0].weights < engine.weights


def test_a_model_that_does_not_fit_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, LLAMA_70B)
    assert main(["plan", path, "--memory", "24GiB", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] is False and any("will not start" in reason for reason in said["reasons"])
    assert said["kv_bytes_per_token"] == 327_680  # its 8 heads of keys and values, not 64
    assert main(["plan", path + "/config.json", "--gpu", "h100"]) == 1
    assert "will not start" in capsys.readouterr().out
    assert main(["plan", path, "--gpu", "b200", "--json"]) == 0
    assert main(["plan", path, "--gpu", "h100", "--json"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"flag": "--tensor-parallel-size", "value": "2"}.items() <= said["suggestions"][-1].items()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu", "h100"), "bfloat16"),
        (("--gpu", "h100", "--quantization", "fp8"), "fp8"),
        (("--gpu", "h100", "--quantization", "int8"), "int8"),
        (("--memory", "1GiB", "--quantization", "int8"), "int8"),
        (("--memory", "1GiB", "--dtype", "float32"), "float32"),
    ],
)
def test_it_says_what_weights_are_held_in(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path, LLAMA)
    assert main(["plan", model, *flags]) == 0
    assert re.search(rf"(?m)^weights +\d+ MiB  {said} ", capsys.readouterr().out)
    assert main(["plan", model, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weight_dtype"] == said
