"""Quantised checkpoints of every format are read as their own tools read them, or refused in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.paged import load, logits_of, model_config
from support.quantized_files import (
    Writer,
    awq,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    compressed,
    fp8,
    fp8_of_transformers,
    gptq,
    mxfp4,
    nvfp4,
    quantize_checkpoint,
)
from support.tiny_models import FAMILIES, make_model

import octavo_kernels
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.layers.quantization.base import LinearBase
from octavo.layers.quantization.canonical import GroupCodes
from octavo.layers.quantization.checkpoint import CheckpointConfig
from octavo.layers.quantization.gpu_weights import GPUWeightMethod
from octavo.layers.quantization.online import OnlineConfig, OnlineMethod
from octavo.layers.quantization.scaled_weight import TYPES
from octavo.layers.quantization.unquantized import UnquantizedConfig
from octavo.loader import load_model as load_model_module
from octavo.loader.checkpoint import stored_weights
from octavo.loader.load_model import load_model
from octavo.loader.weight_bytes import model_without_memory, weight_size
from octavo_kernels import GroupWeight, ScaledWeight
from octavo_kernels.dense import unpack_dense
from octavo_kernels.quant import Kind

SEQUENCES = [[3 + (7 * i + j) % 300 for i in range(100)] for j in range(4)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are no multiples of 64: 96 and 160 columns, 96, 48 and 160 rows."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_model("LlamaConfig", FAMILIES["llama"][1] | sizes).save_pretrained(folder)
    return folder


def config_of(folder: Path, quantization: str | None = None, dtype: str = "float32", **hf: Any) -> ModelConfig:
    return replace(model_config(folder, dtype, **hf), quantization=quantization)


def kl(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Mean over positions, in nats."""
    p, q = torch.cat(theirs).log_softmax(-1), torch.cat(ours).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BY_BLOCK = FP8 | {"weight_block_size": [64, 64]}
MODELOPT = {"quant_method": "modelopt"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# name -> writer, description
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq in groups of 32": (awq(32), AWQ | {"group_size": 32}),
    "awq in whole rows": (awq(-1), AWQ | {"group_size": -1}),
    "awq with zeros of 8": (awq(32, symmetric=True), AWQ | {"group_size": 32}),
    "gptq": (gptq(), GPTQ),
    "gptq with zeros as they are": (gptq(version=2), GPTQ_V2),
    "gptq that says 1 and is 2": (gptq(version=2), GPTQ),
    "gptq asymmetric": (gptq(symmetric=False), GPTQ | {"sym": False}),
    "gptq asymmetric that says 1 and is 2": (gptq(symmetric=False, version=2), GPTQ | {"sym": False}),
    "gptq in whole rows": (gptq(group=-1, symmetric=False), GPTQ | {"sym": False, "group_size": -1}),
    "gptq with act order": (gptq(act_order=True), GPTQ | {"desc_act": True}),
    "gptq 8 bit": (gptq(8), GPTQ | {"bits": 8}),
    "gptq 8 bit asymmetric, act order": (
        gptq(8, symmetric=False, act_order=True),
        GPTQ | {"bits": 8, "desc_act": True, "sym": False},
    ),
    "W4A16": compressed("pack-quantized", **GROUP),
    "W4A16 asymmetric": compressed("pack-quantized", **GROUP, symmetric=False),
    "W4A16 with act order": compressed("pack-quantized", act_order=True, **GROUP),
    "W4A16 by row": compressed("pack-quantized", num_bits=4, strategy="channel"),
    "W8A16": compressed("pack-quantized", num_bits=8, strategy="group", group_size=32),
    "W8A16 in whole rows": compressed("pack-quantized", num_bits=8, strategy="channel"),
    "W8A8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "W8A8 by tensor": compressed("int-quantized", num_bits=8, strategy="tensor"),
    "W8A8 asymmetric": compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "FP8 by tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "FP8 by row": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "compressed MXFP4": (
        mxfp4("weight_packed", "weight_scale", by_block=False),
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)[1],
    ),
    "compressed NVFP4": (
        nvfp4("weight_packed", "weight_global_scale", reciprocal=True),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)[1],
    ),
    "FP8 in blocks": (
        fp8("block", (64, 64)),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 64])[1],
    ),
    "autofp8": (fp8(), FP8 | {"activation_scheme": "static"}),
    "fp8 as transformers": (
        fp8_of_transformers(),
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
    ),
    "fp8 in blocks": (fp8("block", (64, 64), "weight_scale_inv"), BY_BLOCK),
    "fbgemm": (fp8("row"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt fp8": (fp8(), MODELOPT | {"quant_algo": "FP8"}),
    "modelopt nvfp4": (nvfp4(), MODELOPT | {"quant_algo": "NVFP4"}),
    "mxfp4": (mxfp4(), {"quant_method": "mxfp4"}),
    "nf4": (bitsandbytes_4bit(nested=False), NF4),
    "nf4 with scales of scales": (bitsandbytes_4bit(nested=True), NF4),
    "bitsandbytes fp4": (bitsandbytes_4bit(nested=True, kind="fp4"), NF4 | {"bnb_4bit_quant_type": "fp4"}),
    "bitsandbytes int8": (bitsandbytes_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    write, description = FORMATS[name]
    folder = quantize_checkpoint(llama, tmp_path, write, description)
    ours, expected = load_model(config_of(folder, "none")), load(folder / "values")
    for layer, theirs in zip(ours.linear_layers(), expected.linear_layers(), strict=True):
        assert torch.equal(unpack_dense(layer.method.weight), unpack_dense(theirs.method.weight)), layer
    assert kl(logits_of(ours, SEQUENCES), logits_of(expected, SEQUENCES)) == 0.0


# Activations of e4m3 keep 4 significant bits, and this model's random weights cancel nothing of what that loses.
OF_8_BITS = {"W8A": 5e-3, "INT": 5e-3, "FP8": 0.08}


@pytest.mark.parametrize(
    "name",
    [
        "awq in groups of 32",
        "awq in whole rows",
        "gptq with act order",
        "gptq 8 bit asymmetric, act order",
        "W8A16",
        "W8A16 in whole rows",
        "W4A16 asymmetric",
        "W8A8",
        "FP8 by row",
        "fp8 in blocks",
        "compressed NVFP4",
        "mxfp4",
    ],
)
def test_a_gpu_computes_on_the_codes(name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its kernels are given stands for the very values, here multiplied by plain torch; with activations of 8 bits
    where the format is made for them."""
    write, description = FORMATS[name]
    folder = quantize_checkpoint(llama, tmp_path, write, description)
    expected = load_model(config_of(folder, "none", "float16"))
    before = CheckpointConfig.__init__
    monkeypatch.setattr(CheckpointConfig, "__init__", lambda *args: before(*args[:5], UnquantizedConfig(), True))
    model = load_model(config_of(folder, "none", "float16"))
    methods = [m.method for m in model.modules() if isinstance(m, LinearBase)]
    packed = [weight for m in methods if isinstance(m, GPUWeightMethod) for weight in m.weights]
    assert len(packed) >= 2 * 4
    if name in ("W8A8", "FP8 by row"):
        assert all(isinstance(weight, ScaledWeight) for weight in packed)
        assert kl(logits_of(model, SEQUENCES), logits_of(expected, SEQUENCES)) <= OF_8_BITS[name[:3]]
        return
    assert all(isinstance(weight, GroupWeight) for weight in packed)
    for ours, theirs in zip(logits_of(model, SEQUENCES), logits_of(expected, SEQUENCES), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_gpu_rounds_plain_weights_to_8_bits(name: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_model_module, "quantization_config", lambda *args: OnlineConfig(name, torch.device("cpu")))
    model = load_model(config_of(llama, None, "float16"))
    layers = [m.method for m in model.modules() if isinstance(m, LinearBase)]
    kept = [weight for method in layers if isinstance(method, OnlineMethod) for weight in method.weights]
    assert len(kept) == len(layers) - 1, "the head is left alone, and parts of merged layers are one weight"
    assert {weight.values.dtype for weight in kept} == {TYPES[name]}
    assert kl(logits_of(model, SEQUENCES), logits_of(load(llama), SEQUENCES)) <= OF_8_BITS[name[:3].upper()]


def test_fp8_is_refused_where_a_gpu_does_not_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.9.* use int8"):
        OnlineConfig("fp8", torch.device("cuda"))
    OnlineConfig("int8", torch.device("cuda"))


def test_fp8_of_plain_weights_is_refused_on_a_cpu_which_has_int8(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"fp8 .*GPUs alone.* use int8") as caught:
        load_model(config_of(llama, "fp8"))
    assert "\n" not in str(caught.value)
    assert load_model(config_of(llama, "int8")).is_quantized


KEPT = {
    "mxfp4": Kind(4, table=True),
    "compressed MXFP4": Kind(4, table=True),
    "nf4": Kind(4, table=True),
    "nf4 with scales of scales": Kind(4, table=True),
    "bitsandbytes fp4": Kind(4, table=True),
    "modelopt nvfp4": Kind(4, halves=True, table=True),
    "compressed NVFP4": Kind(4, halves=True, table=True),
    "W8A8": Kind(8, by_row=True),
    "W8A8 by tensor": Kind(8, by_row=True),
    "W8A8 asymmetric": Kind(8),
    "W8A16 in whole rows": Kind(8, by_row=True),
    "bitsandbytes int8": Kind(8, by_row=True),
    "awq in groups of 32": Kind(4, affine=True),
    "gptq with act order": Kind(4),
    "W4A16": Kind(4),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_cpu_computes_on_the_codes_by_default(name: str, llama: Path, tmp_path: Path) -> None:
    write, description = FORMATS[name]
    folder = quantize_checkpoint(llama, tmp_path, write, description)
    config = config_of(folder)
    model = load_model(config)
    assert model.is_quantized
    assert kl(logits_of(model, SEQUENCES), logits_of(load(folder / "values"), SEQUENCES)) <= 5e-3
    kinds = {part.kind for layer in model.model.layers for part in layer.mlp.down_proj.method.packed.parts}
    assert name not in KEPT or kinds == {KEPT[name]}
    told = weight_size(model_without_memory(config, "cpu"), stored_weights(config)).nbytes
    assert model.num_weight_bytes() <= told <= 1.1 * model.num_weight_bytes()


def test_transformers_reads_the_same_values_from_blocks_of_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = mxfp4()(torch.randn(96, 160))
    theirs = convert_moe_packed_tensors(tensors["weight_blocks"][None], tensors["weight_scales"][None])
    assert torch.equal(values.bfloat16(), theirs[0].T)


@pytest.mark.parametrize("asked", ["awq", "awq_marlin", "none", None])
def test_the_formats_own_name_changes_nothing(asked: str | None, llama: Path, tmp_path: Path) -> None:
    folder = quantize_checkpoint(llama, tmp_path, *FORMATS["awq in groups of 32"])
    assert load_model(config_of(folder, asked)).is_quantized == (asked != "none")


@pytest.mark.parametrize(("asked", "stored"), [("gptq", "awq"), ("int8", "awq"), ("fp8", "awq"), ("gguf", None)])
def test_a_name_that_contradicts_the_file_is_refused_with_both(
    asked: str, stored: str | None, llama: Path, tmp_path: Path
) -> None:
    folder = quantize_checkpoint(llama, tmp_path, *FORMATS["awq in groups of 32"]) if stored else llama
    with pytest.raises(ConfigError, match=f"{asked} was asked for, but .* {stored or 'is not quantised'}"):
        load_model(config_of(folder, asked))


def test_parts_of_a_merged_layer_may_be_stored_apart(llama: Path, tmp_path: Path) -> None:
    """q plain, k and v of different bits, a whole layer left out: each as the checkpoint's own lists say it."""
    four, said = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    eight, of_eight = compressed("pack-quantized", num_bits=8, strategy="channel")
    said["config_groups"] |= {"group_1": of_eight["config_groups"]["group_0"] | {"targets": ["re:.*v_proj"]}}
    said["ignore"] = ["lm_head", "re:.*q_proj", "model.layers.1.mlp.up_proj", "re:model.layers.2.*mlp.*"]
    writers: dict[str, Writer | None] = dict.fromkeys(("q_proj", "layers.1.mlp.up_proj", "layers.2.mlp"))
    folder = quantize_checkpoint(llama, tmp_path, writers | {"v_proj": eight, "_proj": four}, said)
    expected = load(folder / "values")
    exact, usual = load_model(config_of(folder, "none")), load_model(config_of(folder))
    assert kl(logits_of(exact, SEQUENCES), logits_of(expected, SEQUENCES)) == 0.0
    assert kl(logits_of(usual, SEQUENCES), logits_of(expected, SEQUENCES)) <= 5e-3


def test_parts_with_scales_by_row_and_by_group_are_multiplied_as_one(llama: Path, tmp_path: Path) -> None:
    """v of W8A8 beside q and k in groups of 32: rows of activations are in the form that all three take."""
    groups, said = compressed("pack-quantized", num_bits=8, strategy="group", group_size=32)
    rows, of_rows = compressed("int-quantized", num_bits=8, strategy="channel")
    extra = of_rows["config_groups"]["group_0"] | {"targets": ["re:.*v_proj"], "format": "int-quantized"}
    said["config_groups"] |= {"group_1": extra}
    folder = quantize_checkpoint(llama, tmp_path, {"v_proj": rows, "_proj": groups}, said)
    model = load_model(config_of(folder))
    assert kl(logits_of(model, SEQUENCES), logits_of(load(folder / "values"), SEQUENCES)) <= 5e-3
    assert model.model.layers[0].self_attn.qkv_proj.method.activation_terms > 0


def test_gptqs_exceptions_are_those_of_each_part(llama: Path, tmp_path: Path) -> None:
    """GPTQModel's dynamic: other bits and groups where a pattern says so, plain where it says no; q, k and v differ."""
    dynamic = {r"+:.*\.k_proj": {"bits": 8}, r".*\.down_proj": {"group_size": -1}, r"-:.*layers\.1\.self_attn\.": {}}
    writers: dict[str, Writer | None] = {"layers.1.self_attn": None, "k_proj": gptq(8), "down_proj": gptq(group=-1)}
    folder = quantize_checkpoint(llama, tmp_path, writers | {"_proj": gptq()}, GPTQ | {"dynamic": dynamic})
    expected = load(folder / "values")
    for quantization, most in (("none", 0.0), (None, 5e-3)):
        ours = load_model(config_of(folder, quantization))
        assert kl(logits_of(ours, SEQUENCES), logits_of(expected, SEQUENCES)) <= most
    for wrong, said in (
        ({".*k_proj": {"bits": 3}}, r"dynamic.*bits must be 4 or 8"),
        ({"(": {}}, r"no regular expression"),
        ({}, r"has shape .*asks for"),
    ):
        with pytest.raises(ModelError, match=said):
            load_model(config_of(folder, quantization_config=GPTQ | {"dynamic": wrong}))


SKIPS: dict[str, tuple[str, str, list[str]]] = {
    "awq": ("awq in groups of 32", "modules_to_not_convert", ["self_attn"]),
    "gptq": ("gptq", "modules_to_not_convert", ["model.layers.0.self_attn", "layers.1.self_attn", "2.self_attn"]),
    "fp8": ("autofp8", "ignored_layers", [f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkvo"]),
    "compressed": ("W4A16", "ignore", ["lm_head", r"re:model\.layers\.\d\.self_attn.*"]),
    "modelopt": ("modelopt fp8", "exclude_modules", ["lm_head", "*.self_attn*"]),
    "mxfp4": ("mxfp4", "modules_to_not_convert", ["model.layers.*.self_attn"]),
}


@pytest.mark.parametrize("tool", SKIPS)
def test_modules_may_be_listed_as_plain_in_each_tools_way(tool: str, llama: Path, tmp_path: Path) -> None:
    """And a list that says so of a module that is not plain contradicts the file."""
    name, key, listed = SKIPS[tool]
    write, description = FORMATS[name]
    description = description | {key: listed}
    folder = quantize_checkpoint(llama, tmp_path / "a", {"self_attn": None, "_proj": write}, description)
    expected = load(folder / "values")
    assert (
        kl(logits_of(load_model(config_of(folder, "none")), SEQUENCES[:1]), logits_of(expected, SEQUENCES[:1])) == 0.0
    )
    whole = quantize_checkpoint(llama, tmp_path / "b", write, description)
    with pytest.raises(ModelError, match=r"self_attn.*is quantised, but"):
        load_model(config_of(whole))


def test_old_tools_describe_weights_in_files_of_their_own(llama: Path, tmp_path: Path) -> None:
    for number, (name, file, wrapped) in enumerate(
        [
            ("awq in groups of 32", "quant_config.json", lambda d: {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
            ("gptq asymmetric", "quantize_config.json", lambda d: {k: v for k, v in d.items() if k != "quant_method"}),
            ("modelopt fp8", "hf_quant_config.json", lambda d: {"producer": {}, "quantization": {"quant_algo": "FP8"}}),
        ]
    ):
        folder = quantize_checkpoint(llama, tmp_path / str(number), *FORMATS[name])
        config = json.loads((folder / "config.json").read_text())
        (folder / file).write_text(json.dumps(wrapped(config.pop("quantization_config"))))
        (folder / "config.json").write_text(json.dumps(config))
        ours, expected = load_model(config_of(folder, "none")), load(folder / "values")
        assert kl(logits_of(ours, SEQUENCES[:1]), logits_of(expected, SEQUENCES[:1])) == 0.0


def test_steps_with_act_order_are_recorded_and_change_no_bit(llama: Path, tmp_path: Path) -> None:
    folder = quantize_checkpoint(llama, tmp_path, *FORMATS["gptq with act order"])
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_gpu_blocks_override": 32}
    recorded, called = (LLM(str(folder), max_model_len=64, max_num_seqs=4, **options) for _ in range(2))
    steps = recorded.engine.executor.worker.runner.device_runner.recorded_steps  # type: ignore[attr-defined]
    called.engine.executor.worker.runner.device_runner.recorded_steps = None  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": tokens[:20]} for tokens in SEQUENCES]
    ours, theirs = (llm.generate(prompts, params, use_tqdm=False) for llm in (recorded, called))
    assert [o.outputs[0].logprobs for o in ours] == [o.outputs[0].logprobs for o in theirs]
    assert steps._step is not None


def test_scales_of_values_are_for_fp8_caches_alone_too(llama: Path, tmp_path: Path) -> None:
    """A damaged one is refused, as it would be used."""
    stored = load_file(llama / "model.safetensors")
    for number, bad in enumerate((0.0, -1.0, float("nan"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(stored | {"model.layers.1.self_attn.v_scale": torch.tensor([bad])}, folder / "model.safetensors")
        shutil.copy(llama / "config.json", folder)
        with pytest.raises(ModelError, match="v_scale"):
            load(folder)
    save_file(
        stored | {"model.layers.1.self_attn.v_proj.output_scale": torch.tensor(0.5)}, folder / "model.safetensors"
    )
    assert [layer.self_attn.attn.fp8_options.v_scale for layer in load(folder).model.layers] == [1.0, 0.5, 1.0]


NAMES = ["self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale"]


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_keys_are_for_fp8_caches_alone(name: str, llama: Path, tmp_path: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    stored |= {f"model.layers.1.{name}": torch.tensor([0.25]), "model.layers.1.self_attn.q_proj.q_scale": torch.ones(1)}
    save_file(stored, tmp_path / "model.safetensors")
    shutil.copy(llama / "config.json", tmp_path)
    model, plain = load(tmp_path), load(llama)
    scales = [layer.self_attn.attn.fp8_options.k_scale for layer in model.model.layers]
    assert scales == [1.0, 0.25, 1.0]
    assert torch.equal(logits_of(model, SEQUENCES[:1])[0], logits_of(plain, SEQUENCES[:1])[0])
    octavo_kernels.select_backend("reference")
    try:
        in_fp8 = [logits_of(m, SEQUENCES[:1], kv_dtype="float8_e4m3fn")[0] for m in (model, plain)]
    finally:
        octavo_kernels.select_backend("auto")
    assert not torch.equal(*in_fp8) and kl([in_fp8[0]], [in_fp8[1]]) < 0.02


@pytest.mark.parametrize("zeros", [False, True])
def test_a_part_of_a_weight_has_that_parts_values(zeros: bool) -> None:
    """What a rank takes of codes: any rows, columns between groups."""
    codes = torch.randint(0, 16, (24, 160), dtype=torch.uint8)
    points = torch.randint(0, 16, (24, 5), dtype=torch.uint8) if zeros else None
    weight = GroupCodes(codes, torch.rand(24, 5).half(), 32, points, None, 4)
    for rows, columns in ((slice(0, 24), slice(0, 160)), (slice(8, 16), slice(0, 160)), (slice(3, 20), slice(64, 160))):
        part = weight.take(rows, columns)
        assert torch.equal(part.dequantize(), weight.dequantize()[rows, columns])
    with pytest.raises(ModelError, match=r"groups of 32 cannot be split at 80 and 160.*divides 5"):
        weight.take(slice(0, 24), slice(80, 160))
    ordered = replace(weight, order=torch.randperm(160).int())
    assert torch.equal(ordered.take(slice(3, 20), slice(0, 160)).dequantize(), ordered.dequantize()[3:20])
    with pytest.raises(ModelError, match="act order"):
        ordered.take(slice(0, 24), slice(0, 64))
