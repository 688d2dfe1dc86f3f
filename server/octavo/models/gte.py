"""GTE of 2024 (v1.5 and multilingual): BERT with rotary positions and gated MLPs, on Hugging Face the family "new"."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from octavo.layers.encoder import EncoderAttention, PostNormEncoderLayer
from octavo.layers.linear import QKVRows, RowParallelLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.bert import BertForSequenceClassification, Names
from octavo.models.nomic_bert import RotaryBertModel

_NAMES: Names = [
    (r"\.mlp\.up_gate_proj\.", ".mlp.gate_up_proj."),
    (r"\.attn_ln\.", ".attention_norm."),
    (r"\.mlp_ln\.", ".output_norm."),
]


class GteModel(RotaryBertModel):
    """See the module."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["qkv_proj"] * 3,
        "gate_up_proj": ["gate_up_proj"] * 2,
    }
    checkpoint_names: ClassVar[Names] = [*_NAMES, *RotaryBertModel.checkpoint_names]

    def create_layer(self, rotary: RotaryEmbedding | None) -> PostNormEncoderLayer:
        """See `BertModel`."""
        text, hidden = self.text, self.config.hidden_size
        attention = EncoderAttention(self.config, self.tp, True, rotary, rows=QKVRows(fused=True))
        inner, act = text.intermediate_size, text.hidden_act
        mlp = GatedMLP(hidden, inner, False, act, self.tp, fused_weights=True)
        gate, up = mlp.gate_up_proj.shards  # stored the other way round
        mlp.gate_up_proj.shards = [replace(gate, rows=up.rows), replace(up, rows=gate.rows)]
        mlp.down_proj = RowParallelLinear(inner, hidden, True, self.tp)
        return PostNormEncoderLayer(attention, LayerNorm(hidden, self.eps), mlp, LayerNorm(hidden, self.eps))


class GteForMaskedLM(GteModel):
    """Saved with its head of pre-training, which is left out."""


class GteForSequenceClassification(BertForSequenceClassification, GteModel):
    """GTE with BERT's classification head."""

    checkpoint_names: ClassVar[Names] = [*_NAMES, *BertForSequenceClassification.checkpoint_names]


# The same models under their first names.
class NewModel(GteModel):
    """See `GteModel`."""


class NewForMaskedLM(GteForMaskedLM):
    """See `GteForMaskedLM`."""


class NewForSequenceClassification(GteForSequenceClassification):
    """See `GteForSequenceClassification`."""
