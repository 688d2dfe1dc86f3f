"""Decoders whose head gives classes instead of tokens: the last token's state decides."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.engine_config import ModelConfig
from octavo.layers.embedding import ParallelLMHead
from octavo.layers.parallel import TensorParallel
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM, MistralForCausalLM
from octavo.models.qwen2 import Qwen2ForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM


class _Classifier(CausalLM):
    """Mix-in for a classifier, to be named before a family's class."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.lm_head = ParallelLMHead(config.num_labels, config.hidden_size, tp)


_SCORE: list[tuple[str, str | None]] = [(r"^score\.", "lm_head.")]


class LlamaForSequenceClassification(_Classifier, LlamaForCausalLM):
    """See the module."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_SCORE, *LlamaForCausalLM.checkpoint_names]


class MistralForSequenceClassification(_Classifier, MistralForCausalLM):
    """See the module."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_SCORE, *MistralForCausalLM.checkpoint_names]


class Qwen2ForSequenceClassification(_Classifier, Qwen2ForCausalLM):
    """See the module."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_SCORE, *Qwen2ForCausalLM.checkpoint_names]


class Qwen3ForSequenceClassification(_Classifier, Qwen3ForCausalLM):
    """See the module."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_SCORE, *Qwen3ForCausalLM.checkpoint_names]
