"""ModernBERT: norms before its blocks, rotary positions, gated MLPs, and a window in two of three layers."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.modernbert import ModernBertConfig
from octavo.layers.activation import activation
from octavo.layers.embedding import VocabParallelEmbedding
from octavo.layers.encoder import EncoderAttention, EncoderInputs, HeadLinear
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.encoder import Encoder

Names = list[tuple[str, str | None]]
_NAMES: Names = [
    (r"(^|\.)rotary_emb\.", None),
    (r"^model\.", ""),
    (r"^embeddings\.tok_embeddings\.", "embed_tokens."),
    (r"^embeddings\.norm\.", "embed_norm."),
    (r"\.attn\.Wqkv\.", ".attention.qkv_proj."),
    (r"\.attn\.Wo\.", ".attention.o_proj."),
    (r"\.attn_norm\.", ".attention_norm."),
    (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.Wo\.", ".mlp.down_proj."),
]


class _Layer(nn.Module):
    """``attention_norm`` None: the first layer's input is normed already."""

    def __init__(
        self, attention_norm: LayerNorm | None, attention: EncoderAttention, mlp_norm: LayerNorm, mlp: GatedMLP
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def forward(self, x: Tensor, residual: Tensor | None, inputs: EncoderInputs) -> tuple[Tensor, Tensor]:
        """Hidden states are ``residual + x``, a sum that the next norm makes."""
        x, residual = (x, x) if self.attention_norm is None else self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x, inputs), residual)
        return self.mlp(x), cast(Tensor, residual)


class ModernBertModel(Encoder):
    """See the module."""

    text: ModernBertConfig

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["qkv_proj"] * 3,
        "gate_up_proj": ["gate_up_proj"] * 2,
    }
    checkpoint_names: ClassVar[Names] = [(r"^(head|decoder)\.", None), *_NAMES]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.embed_norm = self.create_norm()
        kinds = self.text.kinds
        rotary = {kind: RotaryEmbedding(config, None, self.text.rope(kind)) for kind in sorted(set(kinds))}
        self.layers = nn.ModuleList(self.create_layer(i, kind, rotary[kind]) for i, kind in enumerate(kinds))
        self.final_norm = self.create_norm()

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        text = self.text
        return LayerNorm(self.config.hidden_size, text.layer_norm_eps, bias=text.norm_bias)

    def create_layer(self, number: int, kind: str, rotary: RotaryEmbedding) -> _Layer:
        """Layer ``number``, of ``kind`` "full_attention" or "sliding_attention"."""
        config, text = self.config, self.text
        # As many tokens to both sides as half of local_attention, and the token itself.
        window = text.local_attention // 2 + 1 if kind == "sliding_attention" else None
        rows, bias = QKVRows(fused=True), text.attention_bias
        attention = EncoderAttention(config, self.tp, bias, rotary, window, rows)
        act, mlp_bias = text.hidden_act, text.mlp_bias
        mlp = GatedMLP(config.hidden_size, text.intermediate_size, mlp_bias, act, self.tp, fused_weights=True)
        return _Layer(self.create_norm() if number else None, attention, self.create_norm(), mlp)

    def forward(self, inputs: EncoderInputs) -> Tensor:
        """See `Encoder`."""
        x, residual = self.embed_norm(self.embed_tokens(inputs.input_ids))[0], None
        for layer in self.layers:
            x, residual = layer(x, residual, inputs)
        return cast(Tensor, self.final_norm(x, residual)[0])


class ModernBertForMaskedLM(ModernBertModel):
    """Saved with its head of pre-training, which is left out."""


class ModernBertForSequenceClassification(ModernBertModel):
    """The pooled state through a layer with a norm, and a classifier."""

    classifies: ClassVar[bool] = True
    checkpoint_names: ClassVar[Names] = _NAMES

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.head = _Head(config, self.create_norm().float())
        self.classifier = HeadLinear(config.hidden_size, config.num_labels)

    def classify(self, pooled: Tensor) -> Tensor:
        """See `Encoder`."""
        logits: Tensor = self.classifier(self.head(pooled))
        return logits


class _Head(nn.Module):
    def __init__(self, config: ModelConfig, norm: LayerNorm) -> None:
        super().__init__()
        text = config.text_of(ModernBertConfig)
        self.dense = HeadLinear(config.hidden_size, config.hidden_size, text.classifier_bias)
        self.act, self.norm = activation(text.classifier_activation), norm

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.norm(self.act(self.dense(pooled)))[0]
        return out
