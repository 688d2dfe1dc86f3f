"""The embedded model, dequantised from its GGUF file, against transformers reading the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import write_gguf
from support.paged import logits_of, model_config
from torch import Tensor

from octavo.engine.args import EngineArgs
from octavo.gguf.dequantize import dequantize
from octavo.interface.engine_config import ModelConfig
from octavo.layers.quantization import LinearMethod, QuantizationConfig
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.weights import WeightSlot
from octavo.loader.load_model import load_model
from octavo.text.tokenizer import Tokenizer
from octavo.worker.device import resolve_dtype
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


@pytest.mark.sampled(share=3)
@pytest.mark.slow
@pytest.mark.parametrize(("form", "max_kl"), [("float32", 1e-6), ("bfloat16", 1e-3), ("F16", 1e-6)])
def test_files_of_floats_give_the_logits_of_their_values(
    form: str, max_kl: float, config: ModelConfig, prompts: list[list[int]], tmp_path: Path
) -> None:
    """As the default computes them; bfloat16 activations, as vLLM has them, cost 7e-4 nats on 1,800 positions."""
    from support.embedded import transformers_model

    reference = transformers_model(config.files.weights[0])
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(form) or getattr(torch, form)
    with torch.device("meta"):
        copy = type(reference)(reference.config)
    copy = copy.to_empty(device="cpu").to(stored)
    copy.load_state_dict(reference.state_dict())
    if form in ("F16", "BF16"):
        path = tmp_path / "model.gguf"
        write_gguf(path, copy, arch="llama", qtype=form, vocabulary=False)
    else:
        path = tmp_path
        copy.save_pretrained(path)
    copy = copy.float()
    copy.model.rotary_emb = reference.model.rotary_emb
    args = EngineArgs(model=str(path), skip_tokenizer_init=True).create_engine_config(progress=False)
    model = load_model(resolve_dtype(args, torch.device("cpu")).model)
    kls = []
    for tokens, logits in zip(prompts, logits_of(model, prompts), strict=True):
        with torch.inference_mode():
            expected = copy(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        kls.append((expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1))
    assert torch.cat(kls).mean() <= max_kl
