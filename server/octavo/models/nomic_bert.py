"""Nomic BERT: BERT with rotary positions instead of learned ones, gated MLPs and no biases."""

from __future__ import annotations

from typing import ClassVar

from octavo.layers.encoder import EncoderAttention, PostNormEncoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.bert import BertForSequenceClassification, BertModel, Names

_NAMES: Names = [
    (r"^nomic_bert\.", ""),
    (r"^emb_ln\.", "embed_norm."),
    (r"^encoder\.layers\.", "layers."),
    (r"\.attn\.Wqkv\.", ".attention.qkv_proj."),
    (r"\.attn\.out_proj\.", ".attention.o_proj."),
    (r"\.mlp\.fc11\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"\.norm1\.", ".attention_norm."),
    (r"\.norm2\.", ".output_norm."),
]


class RotaryBertModel(BertModel):
    """BERT with rotary positions."""

    def create_positions(self) -> None:
        """None."""

    def create_rotary(self) -> RotaryEmbedding:
        """See `BertModel`."""
        return RotaryEmbedding(self.config)


class NomicBertModel(RotaryBertModel):
    """See the module."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["qkv_proj"] * 3,
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    checkpoint_names: ClassVar[Names] = [*_NAMES, *BertModel.checkpoint_names]

    def create_layer(self, rotary: RotaryEmbedding | None) -> PostNormEncoderLayer:
        """See `BertModel`."""
        text, hidden = self.text, self.config.hidden_size
        attention = EncoderAttention(self.config, self.tp, False, rotary, rows=QKVRows(fused=True))
        mlp = GatedMLP(hidden, text.intermediate_size, False, text.hidden_act, self.tp)
        return PostNormEncoderLayer(attention, LayerNorm(hidden, self.eps), mlp, LayerNorm(hidden, self.eps))


class NomicBertForMaskedLM(NomicBertModel):
    """Saved with its head of pre-training, which is left out."""


class NomicBertForSequenceClassification(BertForSequenceClassification, NomicBertModel):
    """Nomic BERT with BERT's classification head."""

    checkpoint_names: ClassVar[Names] = [*_NAMES, *BertForSequenceClassification.checkpoint_names]
