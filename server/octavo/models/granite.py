"""Granite 3 (dense), and Granite 4's models without state-space layers and experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.granite import GraniteConfig, GraniteMoeHybridConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.mlp import GatedMLP
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama with multipliers of embeddings, scores, what blocks add to the residual, and logits."""

    text: GraniteConfig

    def scales(self) -> tuple[float, float]:
        """The factors of embeddings and of logits."""
        text = self.text
        return text.embedding_multiplier, 1.0 / text.logits_scaling

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention, mlp = self.create_attention(layer, rotary), self.create_mlp()
        scale = self.text.residual_multiplier
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp, residual_scale=scale)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        bias, scale = text.attention_bias, text.attention_multiplier
        return SelfAttention(
            self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, options=AttentionOptions(scale)
        )


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4 where all layers have attention and no experts: another name for the MLP, whose gate and up are one."""

    text: GraniteMoeHybridConfig

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **GraniteForCausalLM.packed_modules_mapping,
        "gate_up_proj": ["gate_up_proj"] * 2,
    }
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
        *CausalLM.checkpoint_names,
    ]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        text = config.text_of(GraniteMoeHybridConfig)
        others = sorted(set(text.layer_types or ["mamba"]) - {"attention", "full_attention"})
        if others or text.num_local_experts:
            what = f"layers of type {', '.join(others)}" if others else "experts"
            raise ModelError(
                f"{config.model}: Granite 4 with {what} is not supported; use a dense one (granite-4.0-1b)"
            )
        super().__init__(config, tp)

    def create_rotary(self) -> RotaryEmbedding | None:
        """The rotary embedding that layers share; some models have none."""
        return super().create_rotary() if self.text.position_embedding_type == "rope" else None

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        inner, act = text.shared_intermediate_size, text.hidden_act
        return GatedMLP(self.config.hidden_size, inner, False, act, self.tp, fused_weights=True)
