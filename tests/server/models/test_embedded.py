"""The embedded model, dequantised from its GGUF file, against transformers reading the same file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.paged import logits_of, model_config
from torch import Tensor

from octavo.gguf.dequantize import dequantize
from octavo.interface.engine_config import ModelConfig
from octavo.layers.quantization import LinearMethod, QuantizationConfig
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.weights import WeightSlot
from octavo.loader.load_model import load_model
from octavo.text.tokenizer import Tokenizer
from octavo_kernels import dense_linear
from octavo_kernels.packing import pack_dense

pytestmark = pytest.mark.model
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius at sea level. " * 12,
)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return model_config(None)


@pytest.fixture(scope="module")
def prompts(config: ModelConfig) -> list[list[int]]:
    tokenizer = Tokenizer.from_files(config.files)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def logits(config: ModelConfig, prompts: list[list[int]]) -> list[Tensor]:
    return logits_of(load_model(config), prompts)


@pytest.mark.slow
def test_logits_are_those_of_transformers(config: ModelConfig, prompts: list[list[int]], logits: list[Tensor]) -> None:
    from support.embedded import transformers_model

    reference = transformers_model(config.files.weights[0])
    for tokens, ours in zip(prompts, logits, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


class StoredBlocks(LinearMethod):
    """Keeps the file's own blocks and turns them into floats at every use: the simplest method that takes raw rows."""

    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        self.parts: dict[int, tuple[Any, str]] = {}

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        def take(source: Any) -> None:
            self.parts[part] = (source.raw().copy(), source.qtype)

        yield WeightSlot(part, "weight", shard.shape, take)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = torch.cat([dequantize(*self.parts[part], x.dtype) for part in range(len(layer.shards))])
        return dense_linear(x, pack_dense(weight), bias)


class StoredBlocksConfig(QuantizationConfig):
    name = "stored-blocks"

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        return StoredBlocks()


def test_a_method_may_compute_on_the_stored_blocks(
    config: ModelConfig, prompts: list[list[int]], logits: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the tied head: it is filled from the embedding's tensor, in the method's own form."""
    monkeypatch.setattr("octavo.loader.load_model.quantization_config", lambda *_: StoredBlocksConfig())
    model = load_model(config)
    assert len(list(model.parameters())) == 2 * config.num_layers + 2  # the norms and the embedding
    assert torch.equal(logits_of(model, prompts[:1])[0], logits[0])
