"""Nomic BERT: BERT with rotary positions instead of learned ones, gated MLPs and no biases."""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.layers.encoder import EncoderAttention, PostNormEncoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
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
    """BERT with rotary positions. ``built``: what the released config.json may say, and says; the authors' code has
    more than is built here."""

    built: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        for field, built in self.built.items():
            if (stated := config.hf_config.get(field, built)) != built:
                raise ModelError(
                    f"{config.model}: {field} is {stated!r}; {config.architecture} runs with {built!r} alone"
                )
        super().__init__(config, tp)

    def create_positions(self) -> None:
        """None."""

    def create_rotary(self) -> RotaryEmbedding:
        """See `BertModel`."""
        return RotaryEmbedding(self.config)


class NomicBertModel(RotaryBertModel):
    """See the module."""

    built: ClassVar[dict[str, Any]] = {
        "activation_function": "swiglu", "prenorm": False, "parallel_block": False, "causal": False,
        "use_rms_norm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_scaling_factor": None,
        "moe_every_n_layers": 0,
    }  # fmt: skip
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["qkv_proj"] * 3, "gate_up_proj": ["gate_proj", "up_proj"],
    }  # fmt: skip
    checkpoint_names: ClassVar[Names] = [*_NAMES, *BertModel.checkpoint_names]

    def create_layer(self, rotary: RotaryEmbedding | None) -> PostNormEncoderLayer:
        """See `BertModel`."""
        hf, hidden = self.config.hf_config, self.config.hidden_size
        attention = EncoderAttention(self.config, self.tp, False, rotary, rows=QKVRows(fused=True))
        mlp = GatedMLP(hidden, hf["intermediate_size"], False, hf.get("hidden_act", "silu"), self.tp)
        return PostNormEncoderLayer(attention, LayerNorm(hidden, self.eps), mlp, LayerNorm(hidden, self.eps))


class NomicBertForMaskedLM(NomicBertModel):
    """Saved with its head of pre-training, which is left out."""


class NomicBertForSequenceClassification(BertForSequenceClassification, NomicBertModel):
    """With BERT's head."""

    checkpoint_names: ClassVar[Names] = [*_NAMES, *BertForSequenceClassification.checkpoint_names]
