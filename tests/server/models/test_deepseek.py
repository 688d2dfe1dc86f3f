"""DeepSeek's latent cache in an engine: small, and the same bits however sequences share it; what it does not do."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of
from support.quantized_files import fp8
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError
from octavo.interface.kv_cache_spec import KVCacheSpec, latent_specs

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "quantization": "none"}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("deepseek")
    make_model(*FAMILY_CASES["deepseek-v3"]).save_pretrained(path)
    return str(path)


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    found = []
    for output in outputs:
        ids = output.outputs[0].token_ids
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append((ids, [step[i].logprob for step, i in zip(logprobs, ids, strict=True)]))
    return found


def test_the_same_bits_alone_chunked_preempted_and_with_hits(folder: str) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(37)]
    prompts = [shared + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 9, 30)]
    roomy = LLM(folder, max_num_seqs=1, num_gpu_blocks_override=64, enable_prefix_caching=False, **OPTIONS)
    alone = [answers(roomy, [prompt])[0] for prompt in prompts]
    tight = LLM(folder, max_num_seqs=4, num_gpu_blocks_override=10, max_num_batched_tokens=16, **OPTIONS)
    assert answers(tight, prompts) == alone
    metrics = {metric.name: getattr(metric, "value", 0) for metric in tight.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0, "there was room for all"
    again = LLM(folder, max_num_seqs=4, num_gpu_blocks_override=64, **OPTIONS)
    answers(again, [shared])
    assert answers(again, prompts) == alone, "with parts of blocks that are cached"


def test_the_cache_holds_one_latent_a_token(folder: str) -> None:
    (spec, *others) = load(folder).kv_cache_specs()
    settings = FAMILY_CASES["deepseek-v3"][1]
    width = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    assert spec == KVCacheSpec(1, width, "float32", kind="mla") and set(others) == {spec}
    assert spec.bytes_per_token() == 4 * width


def test_features_that_the_latent_cache_lacks_are_refused(folder: str) -> None:
    spec = KVCacheSpec(1, 32, "float32", kind="mla")
    assert latent_specs([spec], "auto", True, True) == [replace(spec, dtype="bfloat16")]
    assert latent_specs([spec], "auto", False, True) == [spec]
    half = replace(spec, dtype="bfloat16")
    assert latent_specs([half], "auto", True, False) == latent_specs([half], "bfloat16", True, False) == [half]
    for kv_dtype in ("fp8", "float32"):
        with pytest.raises(ConfigError, match=rf"kv_cache_dtype={kv_dtype}.*is bfloat16;"):
            latent_specs([half], kv_dtype, False, False)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8.*float32 or bfloat16"):
        latent_specs([spec], "int8", False, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", 0),
        ("qk_nope_head_dim", "8"),
        ("scoring_func", "softmax"),
        ("n_group", 3),
        ("num_experts_per_tok", 9),
        ("moe_layer_freq", 2),
        ("topk_method", "greedy"),
        ("qk_rope_head_dim", 7),
    ],
)
def test_meaningless_values_of_config_json_are_refused(field: str, value: object, folder: str, tmp_path: Path) -> None:
    config = json.loads((Path(folder) / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(Path(folder) / "model.safetensors")
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    assert field in str(error.value) and "\n" not in str(error.value)


def test_fp8_in_blocks_as_it_is_released(tmp_path: Path) -> None:
    """Experts one by one, latents' projections in FP8 too, and the tensors of a layer of multi-token prediction."""
    model = make_model(*FAMILY_CASES["deepseek-v3"])
    model.save_pretrained(tmp_path)
    tensors, values, block = load_file(tmp_path / "model.safetensors"), {}, 16
    write = fp8("block", (block, block), "weight_scale_inv")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_with_mqa.weight"))]:
        stored, exact = write(tensors.pop(name))
        tensors |= {name.removesuffix("weight") + leaf: tensor for leaf, tensor in stored.items()}
        values[name] = exact
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.data.copy_(values[name])
        elif ".experts." in name:
            prefix, parts = name.rpartition(".")[0], ("gate", "up") if "gate_up" in name else ("down",)
            for number, expert in enumerate(parameter.data):
                expert.copy_(torch.cat([values[f"{prefix}.{number}.{part}_proj.weight"] for part in parts]))
    tokens = list(range(3, 60))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    exact = logits_of(load(tmp_path), [tokens])[0]
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64)
    assert len(answers(llm, [tokens])[0][0]) == GREEDY.max_tokens


@pytest.mark.parametrize("kind", ["int8_per_group", "int8_per_channel"])
def test_weights_in_eight_bits_are_absorbed_too(folder: str, kind: str) -> None:
    """Its experts have a scale for every 32 columns with both."""
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", quantization=kind, num_gpu_blocks_override=64)
    exact = LLM(folder, num_gpu_blocks_override=64, **OPTIONS)
    prompt = list(range(3, 40))
    (ids, logprobs), (expected, own) = answers(llm, [prompt])[0], answers(exact, [prompt])[0]
    assert ids[:3] == expected[:3] and abs(logprobs[0] - own[0]) < 0.2
