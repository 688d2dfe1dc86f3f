"""Weights of 16 and 32 bits on a CPU lie in memory in the bits of their file, unless --dtype says otherwise."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import write_gguf
from support.paged import logits_of
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.interface.engine_config import EngineConfig, ModelConfig
from octavo.layers.quantization.dense import DenseLinearMethod
from octavo.layers.quantization.int8 import Int8LinearMethod
from octavo.loader.checkpoint import stored_weights
from octavo.loader.load_model import load_model
from octavo.loader.weight_bytes import model_without_memory, weight_size
from octavo.worker.device import resolve_dtype
from octavo_kernels.dense import unpack_dense

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80]]


def config_of(path: Path, **options: Any) -> ModelConfig:
    args = EngineArgs(model=str(path), skip_tokenizer_init=True, **options)
    config: EngineConfig = args.create_engine_config(progress=False)
    return resolve_dtype(config, torch.device("cpu")).model


def held(layer: Any) -> list[torch.dtype]:
    return [part.data.dtype for part in layer.method.weight.parts]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def llama(request: pytest.FixtureRequest) -> Any:
    sizes = {"intermediate_size": 128, "tie_word_embeddings": request.param}
    return make_model("LlamaConfig", FAMILIES["llama"][1] | sizes)


@pytest.mark.parametrize("qtype", ["F16", "BF16", "F32"])
def test_a_gguf_file_of_floats_keeps_its_bits(
    qtype: str, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    values = write_gguf(tmp_path / "m.gguf", llama, arch="llama", qtype=qtype, vocabulary=False)
    stored = {"F16": F16, "BF16": BF16, "F32": F32}[qtype]
    config = config_of(tmp_path / "m.gguf")
    model = load_model(config)
    assert not model.is_quantized and model.row_multiple == 1
    for layer in model.linear_layers():
        assert held(layer) == [stored]
    down = unpack_dense(model.model.layers[1].mlp.down_proj.method.weight)
    assert torch.equal(down, torch.from_numpy(values["model.layers.1.mlp.down_proj.weight"]))
    embedding, head = model.model.embed_tokens, unpack_dense(model.lm_head.method.weight)
    table = torch.from_numpy(values["model.embed_tokens.weight"])
    assert embedding.weight is None and torch.equal(embedding(torch.arange(len(table))).float(), table)
    assert torch.equal(head, torch.from_numpy(values.get("lm_head.weight", values["model.embed_tokens.weight"])))
    told = weight_size(model_without_memory(config, "cpu"), stored_weights(config)).nbytes
    assert told == model.num_weight_bytes()
    exact = load_model(config_of(tmp_path / "m.gguf", dtype="float32", quantization="none"))
    assert {dtype for layer in exact.linear_layers() for dtype in held(layer)} == {stored}, "widened in the kernels"
    rounded = load_model(config_of(tmp_path / "m.gguf", quantization="int8"))
    assert all(isinstance(layer.method, Int8LinearMethod) for layer in rounded.linear_layers()[:-1])


def test_tensors_of_floats_beside_quantised_ones_keep_their_bits(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp's tool makes them with --token-embedding-type F16, and with one part of a merged layer so."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    quantize = gguf.quants.quantize

    path = tmp_path / "m.gguf"
    plain = {"token_embd.weight": "F16", "output.weight": "F16", "blk.1.attn_v.weight": "BF16"}
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(writer: Any, name: str, data: Any, raw_dtype: Any) -> None:
        if name in plain:
            raw_dtype = gguf.GGMLQuantizationType[plain[name]]
            data = quantize(gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q8_0), raw_dtype)
        add_tensor(writer, name, data, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    write_gguf(path, llama, arch="llama", qtype="Q8_0", vocabulary=False)
    config = config_of(path)
    assert config.dtype == "float32"
    model = load_model(config)
    assert model.is_quantized and held(model.lm_head) == [F16]
    kinds = [type(layer.self_attn.qkv_proj.method) for layer in model.model.layers]
    assert kinds == [Int8LinearMethod, DenseLinearMethod, Int8LinearMethod]
    assert held(model.model.layers[1].self_attn.qkv_proj) == [F32, BF16]
    exact = load_model(config_of(path, dtype="float32", quantization="none"))
    ours, theirs = logits_of(model, TOKENS)[0].log_softmax(-1), logits_of(exact, TOKENS)[0].log_softmax(-1)
    assert (theirs.exp() * (theirs - ours)).sum(-1).mean() < 1e-3
    told = weight_size(model_without_memory(config, "cpu"), stored_weights(config)).nbytes
    assert told == model.num_weight_bytes()


def test_dtype_rounds_weights_and_leaves_the_exact_ones_alone(tmp_path: Path) -> None:
    """A merged layer of three types, beside what --dtype makes of them."""
    model = make_model(*FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    types = {"q_proj": F16, "k_proj": BF16, "v_proj": F32}
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(next((dtype for part, dtype in types.items() if part in name), F32))
    save_file(tensors, tmp_path / "model.safetensors")

    def types_of(**options: Any) -> tuple[str, list[torch.dtype]]:
        config = config_of(tmp_path, **options)
        loaded = load_model(config)
        told = weight_size(model_without_memory(config, "cpu"), stored_weights(config)).nbytes
        assert told == loaded.num_weight_bytes()
        return config.dtype, held(loaded.model.layers[0].self_attn.qkv_proj)

    assert types_of() == ("float32", [F16, BF16, F32])
    assert types_of(dtype="float32") == ("float32", [F16, BF16, F32])
    assert types_of(dtype="float16") == ("float32", [F16, BF16, F16])
    assert types_of(dtype="bfloat16") == ("bfloat16", [BF16])
    config = config_of(tmp_path, dtype="bfloat16")
    own = load_model(replace(config, dtype_is_asked=False))  # as config.json's own dtype
    assert held(own.model.layers[0].self_attn.qkv_proj) == [F16, BF16], "never rounded unless --dtype says so"
    exact = load_model(config_of(tmp_path))
    for name, tensor in model.state_dict().items():
        tensor.copy_(tensors.get(name, tensor).float())
    with torch.inference_mode():
        expected = model(torch.tensor(TOKENS)).logits[0]
    torch.testing.assert_close(logits_of(exact, TOKENS)[0], expected, rtol=0, atol=1e-4)


def test_float16_is_computed_in_float32_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(*FAMILIES["qwen2"]).to(F16)
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with torch.inference_mode():
        expected = model.float()(torch.tensor(TOKENS)).logits[0, -1].argmax().item()
    for dtype, lines in (("auto", 0), ("half", 1)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="octavo"):
            llm = LLM(str(tmp_path), dtype=dtype, **options)
        assert sum("float16 on a CPU" in line for line in caplog.messages) == lines
        worker = llm.engine.executor.worker  # type: ignore[attr-defined]
        assert worker.config.model.dtype == "float32" and held(worker.model.lm_head) == [F16]
        (output,) = llm.generate([{"prompt_token_ids": TOKENS[0]}], params, use_tqdm=False)
        assert output.outputs[0].token_ids[0] == expected
        assert worker.runner.device_runner.recorded_steps.can_record
