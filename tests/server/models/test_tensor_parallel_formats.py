"""Ranks hold their part of quantised weights in the file's own codes, and answer as one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from support.emulated_tp import EmulatedTP, case_of, logits_of_processes
from support.gguf_files import write_gguf
from support.paged import load, logits_of, model_config
from support.quantized_files import awq, bitsandbytes_4bit, compressed, fp8, gptq, mxfp4, nvfp4, quantize_checkpoint
from support.stages import StagedModel
from support.tiny_models import FAMILIES, make_model
from torch import Tensor

from octavo.errors import ConfigError
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.quantization.int8 import Int8LinearMethod
from octavo.loader.load_model import load_model
from octavo.text.tokenizer import Tokenizer
from octavo_kernels.quant import Kind, dequantize

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [20, 0, 5]]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "group_size": 32}),
    "gptq": (gptq(), GPTQ),
    "gptq with act order": (gptq(act_order=True), GPTQ | {"desc_act": True}),
    "gptq of 8 bits": (gptq(8, symmetric=False), GPTQ | {"bits": 8, "sym": False}),
    "W4A16": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    "W8A8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8": (fp8(), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 in blocks": (
        fp8("block", (64, 64), "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
    ),
    "mxfp4": (mxfp4(), {"quant_method": "mxfp4"}),
    "nvfp4": (nvfp4(), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": (
        bitsandbytes_4bit(nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}

SAMPLE = {"awq", "gptq with act order", "W4A16", "fp8 in blocks", "nvfp4"}


def kl(expected: list[Tensor], found: list[Tensor]) -> float:
    p, q = (torch.cat(logits).double().log_softmax(-1) for logits in (expected, found))  # float32 ends at some 1e-7
    return (p.exp() * (p - q)).sum(-1).mean().item()


def weight_bytes(model: Any) -> int:
    return sum(n for kind, n in model.weight_bytes_by_kind().items() if kind.startswith("int"))


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in FORMATS]
)
def test_shards_of_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    """Their values are the file's; packed, two ranks answer as one does."""
    make_model("LlamaConfig", FAMILIES["llama"][1] | SIZES).save_pretrained(tmp_path / "plain")
    folder = quantize_checkpoint(tmp_path / "plain", tmp_path / "m", *FORMATS[name])
    exact = logits_of(load(folder / "values"), TOKENS)
    for quantization in ("none", None):
        whole = load(folder, "float32", None, quantization)
        emulated = EmulatedTP(2, lambda tp, how=quantization: load(folder, "float32", tp, how))
        found = emulated.run(lambda model: logits_of(model, TOKENS))
        if quantization == "none":
            for ours, theirs in zip(found[1], exact, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
        else:
            alone = logits_of(whole, TOKENS)
            assert kl(alone, found[1]) <= 1e-4
            assert all(weight_bytes(rank) < 0.6 * weight_bytes(whole) for rank in emulated.ranks)
            staged = StagedModel(2, lambda tp: load(folder, "float32", tp, None))
            assert all(map(torch.equal, logits_of(staged, TOKENS), alone))


def test_ranks_need_not_divide_groups_of_columns(tmp_path: Path) -> None:
    """96 columns are three groups: of two ranks each has half of the values, or of the rows."""
    make_model("LlamaConfig", FAMILIES["llama"][1] | SIZES | {"intermediate_size": 96}).save_pretrained(tmp_path / "p")
    folder = quantize_checkpoint(tmp_path / "p", tmp_path / "m", *FORMATS["awq"])
    for quantization, limit in (("none", 1e-8), (None, 1e-4)):
        emulated = EmulatedTP(2, lambda tp, how=quantization: load(folder, "float32", tp, how))
        found = emulated.run(lambda model: logits_of(model, TOKENS))
        assert kl(logits_of(load(folder, "float32", None, quantization), TOKENS), found[0]) <= limit


@pytest.mark.parametrize(
    "qtype", ["Q4_1", "Q8_0", *(pytest.param(q, marks=pytest.mark.long) for q in ("Q4_0", "Q5_0"))]
)
def test_shards_of_gguf_files(qtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales, of a tied table that is the head as well."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    llama = make_model("LlamaConfig", FAMILIES["llama"][1] | SIZES | {"tie_word_embeddings": True})
    write_gguf(tmp_path / "m.gguf", llama, arch="llama", qtype=qtype)
    whole = load(tmp_path / "m.gguf", "float32", None, None)
    emulated = EmulatedTP(2, lambda tp: load(tmp_path / "m.gguf", "float32", tp, None))
    for leaf in ("self_attn.o_proj", "mlp.down_proj"):
        path = f"model.layers.1.{leaf}"
        values = torch.cat([dequantize(rank.get_submodule(path).method.packed) for rank in emulated.ranks])
        assert torch.equal(values, dequantize(whole.get_submodule(path).method.packed))
    assert all(rank.model.embed_tokens.weight is None for rank in emulated.ranks), "the table is the head's"
    assert all(weight_bytes(rank) < 0.51 * weight_bytes(whole) for rank in emulated.ranks)
    found = emulated.run(lambda model: logits_of(model, TOKENS))
    assert kl(logits_of(whole, TOKENS), found[0]) <= 1e-4
    staged = StagedModel(2, lambda tp: load(tmp_path / "m.gguf", "float32", tp, None))
    assert all(map(torch.equal, logits_of(staged, TOKENS), logits_of(whole, TOKENS)))
    assert all(weight_bytes(stage) < 0.8 * weight_bytes(whole) for stage in staged.stages)


def test_blocks_of_a_gguf_file_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 columns are one block of Q4_K: ranks have rows of it. Columns of experts are refused, before any is read."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    rounds = quants.quantize

    def quantize(x: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        return np.zeros((len(x), x.shape[1] // 256 * 144), np.uint8) if kind.name == "Q4_K" else rounds(x, kind)

    monkeypatch.setattr(quants, "quantize", quantize)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4}
    llama = make_model("LlamaConfig", FAMILIES["llama"][1] | sizes)
    write_gguf(tmp_path / "m.gguf", llama, arch="llama", qtype="Q4_K", vocabulary=False)
    model = load_model(model_config(tmp_path / "m.gguf", "float32", None), tp=TensorParallel(0, 2))
    assert model.model.layers[0].self_attn.o_proj.method.packed.channels == 128
    columns = LinearBase([Shard((8, 256), slice(0, 8), slice(0, 128), 0)], False, TensorParallel(0, 2))
    columns.stored_types = ["Q4_K"]
    with pytest.raises(
        ConfigError, match=r"256 columns in 1 blocks of 256 \(Q4_K\) cannot be split over 2 ranks; deal experts"
    ):
        columns.create_weights(Int8LinearMethod(), torch.float32)


@pytest.mark.slow
def test_three_ranks_of_the_embedded_model(tmp_path: Path) -> None:
    """9 heads, 3 of keys and values; a third of the file's codes each."""
    ids = Tokenizer.from_files(model_config(None).files).encode(Path("LICENSE").read_text())
    texts = [ids[start : start + 128] for start in range(0, 512, 128)]
    whole = load(None, "float32", None, None)
    alone = logits_of(whole, texts)
    (found,) = logits_of_processes(3, [case_of(None, texts, "float32", "shared memory", None)], tmp_path / "out")
    total = sum(n for kind, n in whole.weight_bytes_by_kind().items() if kind != "tables")
    for logits, size in found:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits, found[0][0], strict=True))
        assert size < 0.34 * total
        assert kl(alone, logits) <= 5e-4
    kinds = {part.kind for layer in whole.model.layers for part in layer.mlp.down_proj.method.packed.parts}
    assert kinds == {Kind(4, affine=True)}
