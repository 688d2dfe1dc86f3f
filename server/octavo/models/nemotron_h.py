"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers that are each a Mamba 2, an attention, an MLP or experts."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor

from octavo.interface.model_config.nemotron_h import NemotronHConfig
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import DecoderLayer, DeferredHidden
from octavo.layers.mamba2 import Mamba2Mixer
from octavo.layers.mlp import SquaredMLP
from octavo.layers.moe import FusedMoE, LatentMoE, Routing
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.quantization.base import ExpertSettings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.mamba2_hybrid import Mamba2HybridForCausalLM

Part = Mamba2Mixer | SelfAttention | SquaredMLP | FusedMoE


class MixerDecoderLayer(DecoderLayer):
    """One mixer behind a norm."""

    def __init__(self, norm: RMSNorm | LayerNorm, mixer: Part) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        x, residual = self.norm(x, residual)
        if isinstance(self.mixer, Mamba2Mixer):
            return *self.mixer(x, ctx), cast(Tensor, residual)
        mixed = self.mixer(x, positions, ctx) if isinstance(self.mixer, SelfAttention) else x
        return mixed, cast(Tensor, residual)

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        *mixed, residual = deferred
        if isinstance(self.mixer, Mamba2Mixer):
            return self.mixer.finish(*mixed), residual
        out = self.mixer.o_proj if isinstance(self.mixer, SelfAttention) else self.mixer
        return out(mixed[0]), residual


class NemotronHForCausalLM(Mamba2HybridForCausalLM):
    """Layers as the pattern has them; MTP layers are left out."""

    text: NemotronHConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^mtp\.", None),
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"\.shared_experts\.", ".shared_expert."),
        (r"\.e_score_correction\.bias$", ".e_score_correction_bias"),
        *Mamba2HybridForCausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding | None:
        """No layer has positions."""
        return None

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        kind = self.text.kind(layer)
        number = sum(self.text.kind(other) == kind for other in range(layer))
        return MixerDecoderLayer(self.create_norm(), self._create_mixer_of(kind, number))

    def _create_mixer_of(self, kind: str, number: int) -> Part:
        text = self.text
        if kind == "mamba":
            return self.create_mixer(number)
        if kind == "attention":
            return SelfAttention(self.config, number, self.tp, None)
        if kind == "moe":
            return self._create_experts()
        return SquaredMLP(text.hidden_size, text.intermediate_size, text.mlp_bias, self.tp)

    def _create_experts(self) -> FusedMoE:
        text, hidden, tp = self.text, self.text.hidden_size, self.tp
        scale, groups = text.routed_scaling_factor, text.groups
        how = Routing(text.num_experts_per_tok, "sigmoid", text.norm_topk_prob, scale, groups, correction=True)
        latent = text.moe_latent_size
        settings = ExpertSettings(text.num_experts, latent or hidden, text.expert_size, "relu", gated=False)
        shared = SquaredMLP(hidden, text.moe_shared_expert_intermediate_size, text.mlp_bias, tp)
        if latent is None:
            return FusedMoE(settings, how, tp, shared)
        return LatentMoE(settings, how, tp, shared, hidden, text.mlp_bias)
