"""BERT and encoders of its shape: RoBERTa, XLM-R, DistilBERT."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.bert import BertConfig
from octavo.interface.model_config.encoder import EncoderConfig
from octavo.layers.embedding import VocabParallelEmbedding
from octavo.layers.encoder import EncoderAttention, EncoderInputs, HeadLinear, PostNormEncoderLayer
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.encoder import Encoder

Names = list[tuple[str, str | None]]
# Heads of pre-training and tables that follow from the configuration.
_LEFT_OUT: Names = [(r"^(cls|lm_head|vocab_\w+)\.|position_ids$|(^|\.)rotary_emb\.", None)]
_BERT: Names = [
    *_LEFT_OUT,
    (r"^(bert|roberta|new|nomic_bert|gte|model)\.", ""),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "embed_types."),
    (r"^embeddings\.LayerNorm\.", "embed_norm."),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.query\.", ".attention.q_proj."),
    (r"\.attention\.self\.key\.", ".attention.k_proj."),
    (r"\.attention\.self\.value\.", ".attention.v_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.output\.LayerNorm\.", ".output_norm."),
]


class BertModel(Encoder):
    """BERT: learned embeddings of positions and token types, layers with a norm behind each block."""

    text: EncoderConfig

    checkpoint_names: ClassVar[Names] = [*_BERT, (r"^pooler\.", None)]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        text, hidden = self.text, config.hidden_size
        self.eps = text.layer_norm_eps
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, tp)
        # Small, so every rank holds all of them.
        self.embed_positions = self.create_positions()
        num_types = text.type_vocab_size
        self.embed_types = VocabParallelEmbedding(num_types, hidden, TensorParallel()) if num_types else None
        self.embed_norm = LayerNorm(hidden, self.eps)
        rotary = self.create_rotary()
        self.layers = nn.ModuleList(self.create_layer(rotary) for _ in range(config.num_layers))

    def create_positions(self) -> VocabParallelEmbedding | None:
        """The table of learned positions."""
        assert isinstance(self.text, BertConfig)
        return VocabParallelEmbedding(self.text.max_position_embeddings, self.text.hidden_size, TensorParallel())

    def create_rotary(self) -> RotaryEmbedding | None:
        """The rotary embedding that layers share."""
        return None

    def create_layer(self, rotary: RotaryEmbedding | None) -> PostNormEncoderLayer:
        """One layer."""
        text, hidden = self.text, self.config.hidden_size
        attention = EncoderAttention(self.config, self.tp, bias=True)
        mlp = MLP(hidden, text.intermediate_size, True, text.hidden_act, self.tp)
        return PostNormEncoderLayer(attention, LayerNorm(hidden, self.eps), mlp, LayerNorm(hidden, self.eps))

    def forward(self, inputs: EncoderInputs) -> Tensor:
        """See `Encoder`."""
        x: Tensor = self.embed_tokens(inputs.input_ids)
        if self.embed_positions is not None and isinstance(self.text, BertConfig):
            x = octavo_kernels.add(x, self.embed_positions(inputs.positions, skip=self.text.first_position))
        types = None if self.embed_types is None else self.embed_types(inputs.token_types)
        x, _ = self.embed_norm(x, types)
        for layer in self.layers:
            x = layer(x, inputs)
        return x


class BertForMaskedLM(BertModel):
    """Saved with its head of pre-training, which is left out."""


class BertForSequenceClassification(BertModel):
    """The first token's state through the pooler of pre-training, where the file has it, and a classifier."""

    classifies: ClassVar[bool] = True
    checkpoint_names: ClassVar[Names] = [*_BERT, (r"^pooler\.dense\.", "pooler.")]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.pooler = HeadLinear(config.hidden_size, config.hidden_size) if self.text.has_pooler else None
        self.classifier = HeadLinear(config.hidden_size, config.num_labels)

    def classify(self, pooled: Tensor) -> Tensor:
        """See `Encoder`."""
        logits: Tensor = self.classifier(pooled if self.pooler is None else torch.tanh(self.pooler(pooled)))
        return logits


class RobertaModel(BertModel):
    """BERT whose positions are counted from behind the padding token's."""


class RobertaForMaskedLM(RobertaModel):
    """Saved with its head of pre-training, which is left out."""


class RobertaForSequenceClassification(RobertaModel):
    """The first token's state through two layers of a head."""

    classifies: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.classifier = _RobertaHead(config.hidden_size, config.num_labels)

    def classify(self, pooled: Tensor) -> Tensor:
        """See `Encoder`."""
        logits: Tensor = self.classifier(pooled)
        return logits


class _RobertaHead(nn.Module):
    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.dense, self.out_proj = HeadLinear(hidden_size, hidden_size), HeadLinear(hidden_size, num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self.out_proj(torch.tanh(self.dense(pooled)))
        return logits


# The same models under the names of their multilingual sizes.
class XLMRobertaModel(RobertaModel):
    """See `RobertaModel`."""


class XLMRobertaForMaskedLM(RobertaForMaskedLM):
    """See `RobertaForMaskedLM`."""


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """See `RobertaForSequenceClassification`."""


_DISTIL_BERT: Names = [
    (r"^distilbert\.", ""),
    (r"^transformer\.layer\.", "layers."),
    (r"\.attention\.([qkv])_lin\.", r".attention.\1_proj."),
    (r"\.attention\.out_lin\.", ".attention.o_proj."),
    (r"\.sa_layer_norm\.", ".attention_norm."),
    (r"\.ffn\.lin([12])\.", r".mlp.fc\1."),
    (r"\.output_layer_norm\.", ".output_norm."),
    *_BERT,
]


class DistilBertModel(BertModel):
    """BERT of fewer layers, without kinds of text."""

    checkpoint_names: ClassVar[Names] = _DISTIL_BERT


class DistilBertForMaskedLM(DistilBertModel):
    """Saved with its head of pre-training, which is left out."""


class DistilBertForSequenceClassification(DistilBertModel):
    """The first token's state through two layers of a head."""

    classifies: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.pre_classifier = HeadLinear(config.hidden_size, config.hidden_size)
        self.classifier = HeadLinear(config.hidden_size, config.num_labels)

    def classify(self, pooled: Tensor) -> Tensor:
        """See `Encoder`."""
        logits: Tensor = self.classifier(torch.relu(self.pre_classifier(pooled)))
        return logits
