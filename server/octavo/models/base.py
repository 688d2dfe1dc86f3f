"""What the engine asks of a model."""

from __future__ import annotations

from abc import abstractmethod
from itertools import chain
from typing import ClassVar

from torch import Tensor, nn

from octavo.interface.engine_config import ModelConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.layers.attention import Attention, ForwardContext
from octavo.layers.embedding import ParallelLMHead
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase


class CausalLM(nn.Module):
    """A decoder with a head. Subclasses build their layers, named as the checkpoint names its modules."""

    # Module -> the checkpoint's modules that it holds one after the other.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    lm_head: ParallelLMHead

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.config = config

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states ``[T, H]`` of the tokens ``input_ids [T]`` at ``positions [T]`` (both int64)."""
        return self.finish(*self.begin(input_ids, positions, ctx))

    @abstractmethod
    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """What `finish` needs of each token, ``[T, ...]``: all that reads or writes the KV cache has been done.

        Most tokens of a prompt are there for their keys and values alone, so that a step ends the last layer for those
        whose hidden states are wanted.
        """

    @abstractmethod
    def finish(self, *states: Tensor) -> Tensor:
        """Hidden states ``[R, H]`` from rows of what `begin` returned, each from its own alone."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[R, vocab_size]`` of ``hidden [R, H]``: float32 on the CPU, in the model's dtype elsewhere."""
        return self.lm_head(hidden)

    def linear_layers(self) -> list[LinearBase]:
        return [module for module in self.modules() if isinstance(module, LinearBase)]

    @property
    def row_multiple(self) -> int:
        """Pad a step's rows to a multiple of this, and on a CPU each row's result depends on that row alone."""
        return max(layer.method.row_multiple for layer in self.linear_layers())

    @property
    def is_quantized(self) -> bool:
        return any(layer.method.quantized for layer in self.linear_layers())

    def num_weight_bytes(self) -> int:
        """Bytes of weights and of tables that follow from the configuration."""
        tensors = sum(t.numel() * t.element_size() for t in chain(self.parameters(), self.buffers()))
        return tensors + sum(layer.method.num_bytes() for layer in self.linear_layers())

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """What each layer keeps of a token, in the order of ``ForwardContext.kv_caches``; this rank's heads."""
        layers = sorted((m for m in self.modules() if isinstance(m, Attention)), key=lambda attention: attention.layer)
        return [attention.kv_cache_spec(self.config.dtype) for attention in layers]
