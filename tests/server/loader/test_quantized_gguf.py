"""GGUF's quantised types on a CPU: in memory in the file's own bits, embeddings and heads too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import write_gguf
from support.paged import logits_of
from support.tiny_models import FAMILIES, make_model

from octavo.engine.args import EngineArgs
from octavo.interface.engine_config import ModelConfig
from octavo.loader.checkpoint import stored_weights
from octavo.loader.load_model import load_model
from octavo.loader.weight_bytes import model_without_memory, weight_size
from octavo_kernels.quant import Kind, dequantize

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80]]
# Kind in memory, where a block has its own scales, and a size of them that gives weights of a model's size
TYPES: dict[str, tuple[Kind, list[int], float]] = {
    "Q2_K": (Kind(2, affine=True, halves=True), [80, 82], 2e-3),
    "Q3_K": (Kind(4, halves=True), [108], 2e-3),
    "Q4_K": (Kind(4, affine=True), [0, 2], 3e-4),
    "Q5_0": (Kind(5), [0], 1e-2),
    "Q5_1": (Kind(5, affine=True), [], 0),
    "Q5_K": (Kind(5, affine=True), [0, 2], 2e-4),
    "Q6_K": (Kind(6, halves=True), [208], 5e-5),
    "IQ4_NL": (Kind(4, table=True), [0], 2e-3),
    "IQ4_XS": (Kind(4, table=True), [0], 1e-4),
    "MXFP4": (Kind(4, table=True), [], 0),
    "IQ3_XXS": (Kind(4, table=True), [0], 1e-4),
    "IQ2_S": (Kind(4, halves=True, table=True), [0], 2e-4),
    "IQ1_S": (Kind(2, affine=True), [0], 4e-3),
}


def config_of(path: Path, **options: Any) -> ModelConfig:
    args = EngineArgs(model=str(path), skip_tokenizer_init=True, **options)
    return args.create_engine_config(progress=False).model


def random_blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A tensor of the shape of ``values``: gguf cannot round to all types, but read any bytes."""
    width, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.shape[0], values.shape[1] // width, size), dtype=np.uint8)
    _, at, scale = TYPES[kind.name]
    for byte in at:
        scales = (scale * random.random((*blocks.shape[:2], 1))).astype(np.float16)
        blocks[:, :, byte : byte + 2] = scales.view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


@pytest.mark.parametrize(
    "qtype, tied", [*((qtype, True) for qtype in TYPES), ("Q6_K", False)], ids=lambda x: {False: "untied"}.get(x)
)
def test_every_tensor_keeps_its_bits(qtype: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    kind, scales, _ = TYPES[qtype]
    rounds = gguf.quants.quantize
    if scales:
        monkeypatch.setattr(
            gguf.quants, "quantize", lambda x, t: random_blocks(x, t) if t.name == qtype else rounds(x, t)
        )
    sizes = {"hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": tied}
    llama = make_model("LlamaConfig", FAMILIES["llama"][1] | sizes)
    values = write_gguf(tmp_path / "m.gguf", llama, arch="llama", qtype=qtype, vocabulary=False)
    config = config_of(tmp_path / "m.gguf")
    model = load_model(config)
    for layer in model.linear_layers():
        assert {part.kind for part in layer.method.packed.parts} == {kind}
    table = torch.from_numpy(values["model.embed_tokens.weight"])
    embedding = model.model.embed_tokens
    assert embedding.weight is None, "no table of floats beside the packed one"
    largest = table.abs().max().item()
    torch.testing.assert_close(embedding(torch.arange(len(table))).float(), table, rtol=0, atol=1e-3 * largest)
    down = values["model.layers.1.mlp.down_proj.weight"]
    packed = dequantize(model.model.layers[1].mlp.down_proj.method.packed)
    torch.testing.assert_close(packed, torch.from_numpy(down), rtol=0, atol=1e-3 * np.abs(down).max())
    told = weight_size(model_without_memory(config, "cpu"), stored_weights(config)).nbytes
    assert told == model.num_weight_bytes()
    exact = load_model(replace(config, dtype="float32", quantization="none"))
    ours, theirs = (torch.cat(logits_of(m, TOKENS)).log_softmax(-1) for m in (model, exact))
    assert (theirs.exp() * (theirs - ours)).sum(-1).mean() <= 5e-3


def test_nothing_of_the_file_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages would count as the server's beside the packed weights."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    llama = make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128})
    write_gguf(tmp_path / "m.gguf", llama, arch="llama", qtype="Q4_0", vocabulary=False)
    config, maps = config_of(tmp_path / "m.gguf"), Path("/proc/self/maps")
    unread = stored_weights(config)
    assert str(tmp_path) in maps.read_text()
    del unread
    model = load_model(config)
    assert model.num_weight_bytes() and str(tmp_path) not in maps.read_text()
