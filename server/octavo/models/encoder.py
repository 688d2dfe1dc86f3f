"""The interface of encoders to the engine: hidden states of whole texts, and the answers of a classification head."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from octavo.interface.engine_config import ModelConfig
from octavo.layers.encoder import EncoderInputs
from octavo.layers.parallel import TensorParallel
from octavo.models.base import Model


class Encoder(Model):
    """A model that reads whole texts, to both sides, and keeps nothing of them: no KV cache, no tokens drawn.

    A family builds its layers, and with ``classifies`` set a head for `classify`.
    """

    classifies: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        tp.divide(config.num_heads, "num_attention_heads")

    @abstractmethod
    def forward(self, inputs: EncoderInputs) -> Tensor:
        """Hidden states ``[T, H]`` of all tokens."""

    def classify(self, pooled: Tensor) -> Tensor:
        """Float32 logits ``[S, num_labels]`` of ``pooled [S, H]``, what pooling made of each sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no classification head")
