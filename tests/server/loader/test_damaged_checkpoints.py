"""Checkpoints that are damaged or contradict themselves: one line, with the tensor, before memory is taken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import write_gguf
from support.paged import model_config
from support.quantized_files import (
    awq,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    compressed,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    quantize_checkpoint,
)
from support.tiny_models import FAMILIES, make_model

from octavo.engine.args import EngineArgs
from octavo.errors import ModelError
from octavo.loader.load_model import load_model
from octavo.text.tokenizer import Tokenizer

Q = "model.layers.1.self_attn.q_proj."
DOWN = "model.layers.2.mlp.down_proj."
Tensors = dict[str, torch.Tensor]
TWO_BITS = {"targets": ["Linear"], "weights": {"num_bits": 2, "strategy": "channel"}}
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": (gptq(act_order=True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "packed": compressed("pack-quantized", **GROUP),
    "fp8": (fp8(), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "blocks": (fp8("block", (64, 64), "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "mxfp4": (mxfp4(), {"quant_method": "mxfp4"}),
    "nvfp4": (nvfp4(), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": (bitsandbytes_4bit(nested=True), {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}),
    "int8": (bitsandbytes_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound checkpoint in each format."""
    folder = tmp_path_factory.mktemp("whole")
    make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128}).save_pretrained(folder / "plain")
    return {name: quantize_checkpoint(folder / "plain", folder / name, *one) for name, one in FORMATS.items()} | {
        "plain": folder / "plain"
    }


def damaged(whole: Path, folder: Path, change: Callable[[Tensors], Any], description: dict[str, Any]) -> Path:
    tensors = {name: tensor.clone() for name, tensor in load_file(whole / "model.safetensors").items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    config.get("quantization_config", {}).update(description)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Any, at: Any = 0) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        if tensors[name].dtype == torch.float8_e4m3fn:
            tensors[name].view(torch.uint8).flatten()[at] = value
        else:
            tensors[name].view(-1)[at] = value

    return change


def turn(name: str, into: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: into(tensors[name])})


def nothing(tensors: Tensors) -> None:
    return None


NAN = float("nan")
# format, what is done to its tensors, to its description, what is said
DAMAGES: dict[str, tuple[str, Callable[[Tensors], Any], dict[str, Any], str]] = {
    "codes missing": ("awq", without(Q + "qweight"), {}, "lacks tensor '.*q_proj.qweight'"),
    "scales missing": ("awq", without(DOWN + "scales"), {}, "lacks tensor '.*down_proj.scales'"),
    "zeros missing": ("gptq", without(Q + "qzeros"), {}, "lacks tensor '.*q_proj.qzeros'"),
    "one scale for all": ("blocks", without(Q + "weight_scale_inv"), {}, "lacks tensor '.*weight_scale_inv'"),
    "zeros of another shape": ("awq", turn(Q + "qzeros", lambda t: t[:1]), {}, r"qzeros' has shape \[1, 8\].*\[2, 8\]"),
    "scales of another shape": (
        "fp8",
        turn(Q + "weight_scale", lambda t: torch.ones(7)),
        {},
        r"has shape \[7\]",
    ),
    "codes of another type": ("gptq", turn(Q + "qweight", lambda t: t.long()), {}, "qweight' is stored as I64.*I32"),
    "values for codes": ("mxfp4", turn(Q + "weight_scales", lambda t: t.half()), {}, "weight_scales' is stored as F16"),
    "scale NaN": ("awq", put(Q + "scales", NAN), {}, "q_proj.scales' holds NaN"),
    "scale infinite": ("packed", put(DOWN + "weight_scale", float("inf")), {}, "weight_scale' holds NaN or inf"),
    "e4m3 NaN": ("fp8", put(DOWN + "weight", 0xFF, 5), {}, "down_proj.weight' holds NaN"),
    "e8m0 NaN": ("mxfp4", put(Q + "weight_scales", 255), {}, "weight_scales' holds NaN"),
    "tensor's scale 0": ("nvfp4", put(Q + "weight_scale_2", 0.0), {}, "weight_scale_2' must be above 0"),
    "group out of range": ("gptq", put(Q + "g_idx", 2), {}, "g_idx' names groups from 0 to 2, the weight has 2"),
    "group below 0": ("gptq", put(Q + "g_idx", -1), {}, "g_idx' names groups from -1"),
    "groups of unlike size": ("gptq", put(Q + "g_idx", 1, slice(0, 40)), {}, "g_idx' does not give each group 32"),
    "another shape inside": ("packed", put(Q + "weight_shape", 63), {}, r"weight_shape' says \[63, 64\]"),
    "zeros out of range": (
        "packed",
        turn(Q + "weight_zero_point", lambda t: torch.full((64, 2), 9, dtype=torch.int8)),
        {},
        "weight_zero_point' holds zero points from 9 to 9",
    ),
    "groups that do not divide": ("awq", nothing, {"group_size": 48}, "layers.0.*groups of 48 columns"),
    "bits that are not read": ("gptq", nothing, {"bits": 3}, "quantization_config.bits must be 4 or 8"),
    "another version": ("awq", nothing, {"version": "gemv"}, "quantization_config.version must be gemm"),
    "a tool that is not known": ("awq", nothing, {"quant_method": "hqq"}, "quantised with 'hqq'.*known: awq"),
    "an algorithm that is not read": ("nvfp4", nothing, {"quant_algo": "W4A8_AWQ"}, "quant_algo must be one of FP8"),
    "sparse": ("packed", nothing, {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config must be absent"),
    "rotated": ("packed", nothing, {"transform_config": {"config_groups": {}}}, "transform_config must be absent"),
    "codes of another width": ("packed", nothing, {"config_groups": {"group_0": TWO_BITS}}, "2 bits .*not supported"),
    "blocks that are none": ("blocks", nothing, {"weight_block_size": [64]}, "weight_block_size must be two"),
    "scales of 8 bits without their table": (
        "nf4",
        without(Q + "weight.nested_quant_map"),
        {},
        "q_proj.weight.absmax' is quantised.*lacks nested_quant_map",
    ),
    "scales of another number": ("nf4", turn(Q + "weight.absmax", lambda t: t[:-1]), {}, "absmax' has 127 scales"),
    "no JSON": ("nf4", put(Q + "weight.quant_state.bitsandbytes__nf4", 0), {}, "is not bitsandbytes' JSON"),
    "scale of 8 bits NaN": ("int8", put(Q + "SCB", NAN, 3), {}, "q_proj.SCB' holds NaN"),
    "no groups": ("packed", nothing, {"config_groups": {}}, "config_groups must hold"),
    "listed as plain": ("packed", nothing, {"ignore": ["re:.*q_proj"]}, "q_proj.* is quantised, but"),
    "listed as plain in part": ("awq", nothing, {"modules_to_not_convert": ["mlp"]}, "mlp.* is quantised, but"),
    "no regular expression": ("packed", nothing, {"ignore": ["re:("]}, "ignore: 're:.' is no regular expression"),
    "codes beside a weight": (
        "awq",
        lambda tensors: tensors.update({Q + "weight": torch.zeros(64, 64)}),
        {},
        "no place for tensor '.*q_proj.weight'",
    ),
    "a bias that is none": (
        "gptq",
        lambda tensors: tensors.update({Q + "bias": torch.ones(64)}),
        {},
        "q_proj.bias' is a bias, and",
    ),
    "plain NaN": ("plain", put(DOWN + "weight", NAN, 77), {}, "down_proj.weight' holds NaN"),
    "plain infinite": ("plain", put("model.norm.weight", float("inf"), 3), {}, "norm.weight' holds NaN or inf"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_in_one_line(damage: str, whole: dict[str, Path], tmp_path: Path) -> None:
    name, change, description, said = DAMAGES[damage]
    config = model_config(damaged(whole[name], tmp_path, change, description))
    for quantization in (None, "none"):
        with pytest.raises(ModelError, match=said) as caught:
            load_model(replace(config, quantization=quantization))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        way_out = ("fetch", "use", "correct", "not of one model")
        assert any(words in str(caught.value) for words in way_out), caught.value


def test_act_orders_that_differ_within_a_merged_layer_are_refused_or_dequantised(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    config = model_config(damaged(whole["gptq"], tmp_path, turn(Q + "g_idx", lambda t: t.flip(0)), {}))
    with pytest.raises(ModelError, match=r"q_proj, .*k_proj.*act orders.*use --quantization none"):
        load_model(replace(config, quantization=None))
    assert load_model(replace(config, quantization="none"))


def test_a_bias_of_zeros_is_what_tools_write_for_none(whole: dict[str, Path], tmp_path: Path) -> None:
    changed = damaged(whole["gptq"], tmp_path, lambda tensors: tensors.update({Q + "bias": torch.zeros(64)}), {})
    assert load_model(model_config(changed))


FIELDS = {
    "embedding_length": 128,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
}


@pytest.mark.parametrize(("field", "value"), FIELDS.items())
def test_a_gguf_file_whose_metadata_and_tensors_disagree(
    field: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    model = make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128})
    write_gguf(
        tmp_path / "m.gguf",
        model,
        arch="llama",
        qtype="Q8_0",
        more=lambda writer: writer.add_uint32(f"llama.{field}", value),
    )
    with pytest.raises(
        ModelError, match=r"tensor '.*' has shape .* asks for .*not of one model|no place for"
    ) as caught:
        load_model(model_config(tmp_path / "m.gguf"))
    assert "not of one model" in str(caught.value) and "\n" not in str(caught.value)


def entries(key: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[gguf.GGUFWriter], None]:
    def of(writer: gguf.GGUFWriter) -> None:
        (values,) = (kv[key] for kv in writer.kv_data if key in kv)
        values.value = change(list(values.value))

    return of


HEADERS: dict[str, tuple[Callable[[gguf.GGUFWriter], Any], str]] = {
    "size of the vocabulary": (lambda w: w.add_uint32("llama.vocab_size", 31), "320 rows, but llama.vocab_size is 31"),
    "tokens": (entries("tokenizer.ggml.tokens", lambda old: [*old, "x1", "x2"]), "320 rows, but its voc.* 322 tokens"),
    "end of text": (lambda w: w.add_uint32("tokenizer.ggml.eos_token_id", 320), r"rows, but .*\.eos_token_id is 320"),
    "end of turn": (lambda w: w.add_uint32("tokenizer.ggml.eot_token_id", 999), r"rows, but .*\.eot_token_id is 999"),
    "values of a head": (
        lambda w: w.add_uint32("llama.attention.value_length", 8),
        r"value_length must be the size of a head \(16\)",
    ),
    "types of tokens": (entries("tokenizer.ggml.token_type", lambda old: [*old, 1]), "token_type has 321 entries"),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_gguf_file_whose_header_contradicts_itself(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    more, said = HEADERS[change]
    model = make_model("LlamaConfig", FAMILIES["llama"][1])
    write_gguf(tmp_path / "m.gguf", model, arch="llama", more=more)
    with pytest.raises(ModelError, match=said) as caught:
        Tokenizer.from_files(model_config(tmp_path / "m.gguf").files)
    assert "\n" not in str(caught.value) and re.search("fetch|converted wrongly", str(caught.value))


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("quantization", [None, "none"])
def test_a_gguf_file_with_a_scale_that_is_no_number(
    qtype: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    model = make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128})
    write_gguf(tmp_path / "m.gguf", model, arch="llama", qtype=qtype, vocabulary=False)
    infos = {info.name: info for info in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with open(tmp_path / "m.gguf", "r+b") as file:  # NaN in each of these types
        file.seek(int(infos["blk.1.ffn_down.weight"].data_offset))
        file.write(b"\xff\xff\xff\x7f")
    args = EngineArgs(model=str(tmp_path / "m.gguf"), skip_tokenizer_init=True, quantization=quantization)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight' holds NaN or inf.*fetch") as caught:
        load_model(args.create_engine_config(progress=False).model)
    assert "\n" not in str(caught.value)


REFUSED = """
import resource, sys, time
from octavo.errors import OctavoError
from support.paged import model_config
from dataclasses import replace
from octavo.loader.load_model import load_model
from octavo.text.tokenizer import Tokenizer
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config, before, start = replace(model_config(sys.argv[1]), quantization=None), peak(), time.process_time()
try:
    load_model(config)
except OctavoError as error:
    print(time.process_time() - start, peak() - before, str(error).count(chr(10)))
"""


def test_a_large_one_is_refused_within_a_second_and_before_memory_is_taken(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    """3 GiB of codes, in a file of holes; only the last tensor has another shape."""
    layers, width, inner = 12, 4096, 16384
    config = json.loads((whole["awq"] / "config.json").read_text())
    config |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 128}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    linear = {f"self_attn.{p}_proj": (width, width) for p in "qkvo"}
    linear |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    shapes = {"model.embed_tokens.weight": ("F16", [320, width]), "model.norm.weight": ("F16", [width])}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = ("F16", [width])
        for module, (rows, columns) in linear.items():
            shapes[f"{at}{module}.qweight"] = ("I32", [columns, rows // 8])
            shapes[f"{at}{module}.qzeros"] = ("I32", [columns // 32, rows // 8])
            shapes[f"{at}{module}.scales"] = ("F16", [columns // 32, rows])
    shapes[f"model.layers.{layers - 1}.mlp.down_proj.scales"] = ("F16", [128, width])
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + int(torch.tensor(shape).prod()) * (4 if dtype == "I32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    assert end > 1 << 30
    raw = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    run = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    seconds, kilobytes, line_breaks = map(float, run.stdout.split())
    assert seconds < 1 and kilobytes < 100 << 10 and line_breaks == 0
