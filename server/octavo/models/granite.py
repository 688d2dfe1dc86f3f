"""Granite 3 (dense), and Granite 4's models without state-space layers and experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
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

    def scales(self) -> tuple[float, float]:
        """What embeddings and logits are multiplied by."""
        hf = self.config.hf_config
        return hf.get("embedding_multiplier", 1.0), 1.0 / hf.get("logits_scaling", 1.0)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention, mlp = self.create_attention(layer, rotary), self.create_mlp()
        scale = self.config.hf_config.get("residual_multiplier", 1.0)
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp, residual_scale=scale)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        hf = self.config.hf_config
        bias, scale = hf.get("attention_bias", False), hf.get("attention_multiplier", 1.0)
        return SelfAttention(self.config, layer, self.tp, rotary, AttentionOptions(scale), qkv_bias=bias, out_bias=bias)


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4 where all layers have attention and no experts: another name for the MLP, whose gate and up are one."""

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
        hf = config.hf_config
        others = sorted(set(hf.get("layer_types") or ["mamba"]) - {"attention", "full_attention"})
        if others or hf.get("num_local_experts", 8):
            what = f"layers of type {', '.join(others)}" if others else "experts"
            raise ModelError(
                f"{config.model}: Granite 4 with {what} is not supported; use a dense one (granite-4.0-1b)"
            )
        super().__init__(config, tp)

    def create_rotary(self) -> RotaryEmbedding | None:
        """The rotary embedding that layers share; some models have none."""
        return super().create_rotary() if self.config.hf_config.get("position_embedding_type") == "rope" else None

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        hf = self.config.hf_config
        inner, act = hf["shared_intermediate_size"], hf.get("hidden_act", "silu")
        return GatedMLP(self.config.hidden_size, inner, False, act, self.tp, fused_weights=True)
