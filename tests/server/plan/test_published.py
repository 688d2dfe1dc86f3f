"""Plans beside what vLLM's users saw in their logs, and what it takes to make one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.quantized_files import awq, quantize_checkpoint
from support.tiny_models import FAMILIES, make_model

from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.memory.dry_run import make_plan
from octavo.plan.gpus import GPUS
from octavo.plan.model import planned_model
from octavo.plan.report import as_json

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
QWEN_3B = LLAMA_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


QWEN_7B = LLAMA_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
QWEN_14B = QWEN_7B | {
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 13824,
}
QWEN_HALF_B = QWEN_3B | {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "intermediate_size": 4864,
}
QWEN_1_5B = QWEN_3B | {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "intermediate_size": 8960,
}
PHI_4 = LLAMA_8B | {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "intermediate_size": 17920,
    "vocab_size": 100352,
}
QWEN3_30B = LLAMA_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
INT8_BY_ROW = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8_BY_ROW}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
DEEPSEEK_V3 = LLAMA_8B | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "quantization_config": FP8,
}
# What users of vLLM have posted from their logs: GiB of weights, GiB of KV cache and its blocks, on each of the GPUs.
# vLLM keeps copies of a few tensors on each; in the last row it had a little less than it says on one of the four.
LOGS = {
    "Llama 3.1 70B W8A8": (LLAMA_70B | {"quantization_config": W8A8}, 1, 67.7229, None, None),
    "Phi-4": (PHI_4, 1, None, 45.21, 14_815),
    "Phi-4 GPTQ": (PHI_4 | {"quantization_config": GPTQ}, 1, 8.5107, 2.18, 715),
    "Qwen2.5 0.5B": (QWEN_HALF_B, 1, None, 34.81, 190_100),
    "Qwen2.5 0.5B, less": (QWEN_HALF_B, 1, None, 16.29, 88_952),
    "Qwen2.5 1.5B": (QWEN_1_5B, 1, None, 9.84, 23_032),
    "Qwen2.5 7B AWQ": (QWEN_7B | {"quantization_config": AWQ}, 1, 5.2032, None, None),
    "R1 Distill Qwen 14B": (QWEN_14B, 2, 13.9476, None, None),
    "Qwen3 30B A3B": (QWEN3_30B, 4, 14.2474, None, None),
    "Qwen3 235B A22B FP8": (QWEN3_235B | {"quantization_config": FP8}, 4, None, 8.11, 11_180),
}


def plan(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    status = main(["plan", str(folder), "--json", *flags])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if said["fits"] else 1)
    return said


def figures(folder: Path, config: dict[str, Any], gpu: str, ranks: int, **options: Any) -> dict[str, Any]:
    """The same figures without advice, which makes as many plans again as there is to advise."""
    (folder / "config.json").write_text(json.dumps(config))
    with planned_model(EngineArgs(model=str(folder), **options)) as found:
        device = GPUS[gpu].memory()
        made = make_plan(replace(found.config, device=device.kind), device, found.measure, ranks)
        return as_json(made, [], [], served=True)


def test_llama_3_8b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An A100 40 GB with 11.12 GiB of KV cache: 5,691 blocks; weights of 14.96 GiB, 7.48 GiB on each of two GPUs."""
    said = plan(tmp_path, LLAMA_8B, capsys, "--gpu", "a100-40gb", "--kv-cache-memory-bytes", "11.12GiB")
    assert said["kv_bytes_per_token"] == 131_072
    assert said["num_blocks"] == pytest.approx(5691, rel=0.005)
    assert said["weights_bytes"] == pytest.approx(14.96 * GIB, rel=0.02)
    said = plan(tmp_path, LLAMA_8B, capsys, "--gpu", "a100-80gb", "-tp", "2")
    assert said["weights_bytes"] == pytest.approx(7.48 * GIB, rel=0.02)
    assert said["kv_bytes_per_token"] == 131_072 and said["tensor_parallel_size"] == 2 and said["served"]


@pytest.mark.parametrize("name", LOGS)
def test_others_logs(name: str, tmp_path: Path) -> None:
    config, ranks, weights, cache, blocks = LOGS[name]
    options = {"kv_cache_memory_bytes": int(cache * GIB)} if cache else {}
    said = figures(tmp_path, config, "h100", ranks, max_model_len=2048, **options)
    if weights:
        assert said["weights_bytes"] == pytest.approx(weights * GIB, rel=0.02)
    if blocks:
        assert said["num_blocks"] == pytest.approx(blocks, rel=0.012 if ranks > 1 else 0.005)


def test_keys_and_values_are_those_of_the_heads_that_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4,096 tokens of Llama 3 70B take 1.25 GiB; with one key for each of its 64 query heads it would be 10."""
    said = plan(tmp_path, LLAMA_70B, capsys, "--gpu", "b200")
    assert said["kv_bytes_per_token"] == 327_680 and 4096 * said["kv_bytes_per_token"] == 1.25 * GIB
    assert said["weights_bytes"] == pytest.approx(131.4 * GIB, rel=0.01)


def test_heads_fewer_than_ranks_are_replicated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eight, sixteen = (
        plan(tmp_path, LLAMA_70B, capsys, "--gpu", "h100", "-tp", str(ranks), "--kv-cache-memory-bytes", "8GiB")
        for ranks in (8, 16)
    )
    assert eight["block_bytes"] == sixteen["block_bytes"] == 16 * 327_680 // 8
    assert eight["num_blocks"] == sixteen["num_blocks"]


def test_qwen_2_5_3b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(tmp_path, QWEN_3B, capsys, "--gpu", "l4")
    assert said["weights_bytes"] == pytest.approx(5.79 * GIB, rel=0.02)
    assert said["kv_bytes_per_token"] == 2 * 2 * 2 * 128 * 36


def test_deepseek_v3(tmp_path: Path) -> None:
    """671 billion parameters in FP8, and one latent of 512 + 64 numbers of 2 bytes a token in each of 61 layers."""
    said = figures(tmp_path, DEEPSEEK_V3, "h200", 8)
    assert said["fits"] and said["kv_bytes_per_token"] == 70_272 and said["weight_dtype"] == "fp8"
    assert said["parameters"] == pytest.approx(671e9, rel=0.001)
    assert 8 * said["weights_bytes"] == pytest.approx(671e9, rel=0.06)  # each rank has all latents' and routers'


@pytest.mark.parametrize("source", ["config.json", "latents", "gguf", "safetensors", "awq"])
def test_the_second_plan_of_a_model_takes_no_torch_no_memory_and_no_time(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Headers of a hub's files are planned from as those of files that are here (test_hub)."""
    model = tmp_path / "model"
    model.mkdir()
    if source != "gguf":
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    flags = ["--memory", "24GiB"]
    if source == "config.json":
        (model / "config.json").write_text(json.dumps(LLAMA_70B))
    elif source == "latents":
        (model / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"num_hidden_layers": 6}))
    elif source == "gguf":
        model = Path("smollm2-135m-instruct")
    else:
        make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128}).save_pretrained(model)
    if source == "awq":
        described = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
        quantize_checkpoint(model, tmp_path / "awq", awq(32), described)
        model = tmp_path / "awq"
    first = main(["plan", str(model), *flags])
    said = capsys.readouterr().out
    code = (
        "import json, re, sys, time; from octavo.cli.main import main; "
        f"status = main(['plan', {str(model)!r}, *{flags!r}]); "
        "peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); "
        "loaded = sorted({'torch', 'transformers'} & set(sys.modules)); "
        "print(json.dumps([status, time.process_time(), peak, loaded, 'numpy' in sys.modules]), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, seconds, peak, loaded, with_numpy = json.loads(ran.stderr)
    assert ran.stdout == said and status == first == (1 if source in ("config.json", "latents") else 0), ran.stderr
    assert not loaded and peak < 60 << 10, ran.stderr
    assert seconds < 2.5 and with_numpy == (source == "gguf"), ran.stderr
