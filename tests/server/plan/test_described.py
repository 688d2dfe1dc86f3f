"""What config.json, or the headers, say of a quantised checkpoint is what the engine holds of it."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_files import (
    Writer,
    awq,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    compressed,
    fp8,
    fp8_of_transformers,
    gpt_oss_as_released,
    gptq,
    nvfp4,
    quantize_checkpoint,
    write_checkpoint,
)
from support.tiny_models import FAMILIES, make_model

from octavo.engine.args import EngineArgs
from octavo.errors import ModelError
from octavo.fetch.description import describe_path
from octavo.interface.engine_config import EngineConfig
from octavo.loader.checkpoint import stored_weights
from octavo.loader.weight_bytes import WeightSize, model_without_memory, weight_size
from octavo.plan.model import planned_model
from octavo.worker.device import resolve_dtype
from octavo.worker.model_memory import measure_built

Recipe = tuple[Writer, dict[str, Any]]


def gptq_of(bits: int, group: int, symmetric: bool = True) -> Recipe:
    described = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return gptq(bits, group, symmetric=symmetric), described


def awq_of(group: int) -> Recipe:
    return awq(group), {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def packed(bits: int, group: int, symmetric: bool = True) -> Recipe:
    by = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **by)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "awq-32": lambda: awq_of(32),
    "awq-128": lambda: awq_of(128),
    "gptq-4": lambda: gptq_of(4, 64),
    "gptq-4-asymmetric": lambda: gptq_of(4, 32, False),
    "gptq-8": lambda: gptq_of(8, 128),
    "gptq-rows": lambda: gptq_of(4, -1),
    "w4a16": lambda: packed(4, 128),
    "w4a16-asymmetric": lambda: packed(4, 32, False),
    "w8a16": lambda: packed(8, -1),
    "w8a8": lambda: compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8-tensor": lambda: (fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-transformers": lambda: (
        fp8_of_transformers(),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "fp8-block": lambda: (
        fp8("block", name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "fp8-compressed": lambda: (
        fp8("row"),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel")[1],
    ),
    "nvfp4": lambda: (nvfp4(), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": lambda: (
        bitsandbytes_4bit(nested=True, block=64),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "nf4-plain": lambda: (
        bitsandbytes_4bit(nested=False, block=64),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "llm-int8": lambda: (bitsandbytes_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make_model(*MODELS[name]).save_pretrained(folder)
        return folder

    return made


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 2,
    "tie_word_embeddings": False,
    "head_dim": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", FAMILIES["llama"][1] | SIZES),
    "experts": ("Qwen3MoeConfig", FAMILIES["llama"][1] | SIZES | EXPERTS),
    "mixtral": ("MixtralConfig", FAMILIES["llama"][1] | SIZES | {"num_local_experts": 3, "tie_word_embeddings": False}),
}


def config_of(folder: Path, device: str, **options: Any) -> EngineConfig:
    with planned_model(EngineArgs(model=str(folder), max_model_len=100, **options)) as model:
        return replace(model.config, device=device)


def both_are_what_is_built(whole: Path) -> None:
    tensors = load_file(whole / "model.safetensors")
    plain = {name for name, t in tensors.items() if name.endswith(".weight") and t.dtype == torch.float32}
    save_file(tensors | {name: tensors[name].bfloat16() for name in plain}, whole / "model.safetensors")
    (whole / "alone").mkdir()
    shutil.copy(whole / "config.json", whole / "alone")
    for options in ({}, {"quantization": "none"}, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}):
        by_headers = measure_built(config_of(whole, "cpu", **options), 1)
        assert WeightSize(by_headers.weights, by_headers.parameters) == size_of_all(whole, **options), options
        alone = measure_built(config_of(whole / "alone", "cpu", **options), 1, is_described=True)
        assert replace(alone, model=by_headers.model) == by_headers, options


def size_of_all(folder: Path, **options: Any) -> WeightSize:
    """Of a model with all of its experts, where a plan measures one of those that are stored alike."""
    config = resolve_dtype(config_of(folder, "cpu", **options), torch.device("cpu")).model
    return weight_size(model_without_memory(config, "cpu"), stored_weights(config))


@pytest.mark.parametrize("recipe", RECIPES)
def test_config_json_and_headers_say_what_the_engine_holds(
    recipe: str, plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger of a CPU, to the byte; see test_pretended_gpu for GPUs."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    for name in ("llama", "experts"):
        quantize_checkpoint(plain(name), tmp_path / name, *RECIPES[recipe](), dtype="bfloat16", torch_dtype="bfloat16")
        both_are_what_is_built(tmp_path / name)


def test_gpt_oss_is_planned_as_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    config, tensors = gpt_oss_as_released()
    del config["torch_dtype"]  # its config.json does not say
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    both_are_what_is_built(folder)
    assert {config_of(path, "cpu").model.dtype for path in (folder, folder / "alone")} == {"bfloat16"}


def test_headers_supply_facts_that_config_json_omits(plain: Callable[[str], Path], tmp_path: Path) -> None:
    whole = plain("llama")
    tensors, config = load_file(whole / "model.safetensors"), json.loads((whole / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        folder = write_checkpoint(tmp_path / name, config, {key: tensor.to(dtype) for key, tensor in tensors.items()})
        assert config_of(folder, "cpu").model.dtype == name
    for header in (b'{"a": {"dtype": "F16", "shape": [1e999]}}', b"[" * 99_999, b'{"a": 1}'):
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ModelError, match="damaged"):
            describe_path(folder)


def test_modules_that_are_listed_as_plain_stay_plain(
    plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a merged layer of which one part is."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    write, described = gptq_of(4, 64)
    listed = {"modules_to_not_convert": ["layers.1", "v_proj"]}
    writers = {"layers.1": None, "v_proj": None, "_proj": write}
    quantize_checkpoint(plain("llama"), tmp_path / "m", writers, described | listed, dtype="bfloat16")
    both_are_what_is_built(tmp_path / "m")


@pytest.mark.parametrize("family", ["llama", "experts", "mixtral"])
def test_plain_tensors_may_have_several_types(
    family: str, plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its own where a CPU holds it as it is stored; experts that differ are all measured."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    tensors = load_file(plain(family) / "model.safetensors")

    def drawn_type(draw: int, name: str) -> torch.dtype:
        rng = random.Random(f"{draw} {re.sub('[.][0-9]+[.](?=[a-z0-9_]+[.]weight$)', '.', name)}")
        return rng.choice([torch.float32, torch.bfloat16, torch.float16])

    for draw in range(3):
        folder = tmp_path / str(draw)
        drawn = {name: tensor.to(drawn_type(draw, name)) for name, tensor in tensors.items()}
        write_checkpoint(folder, json.loads((plain(family) / "config.json").read_text()) | {"dtype": "float32"}, drawn)
        for options in ({}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "float16"}):
            found = measure_built(config_of(folder, "cpu", **options), 1)
            assert WeightSize(found.weights, found.parameters) == size_of_all(folder, **options), (draw, options)
