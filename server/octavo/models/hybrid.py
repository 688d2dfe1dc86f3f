"""Models in which some layers are recurrent and others have attention."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import nn

from octavo.interface.model_config.hybrid import HybridConfig
from octavo.interface.state_spec import StateSpec
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.recurrent import RecurrentDecoderLayer
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM


class HybridForCausalLM(LlamaForCausalLM):
    """Llama whose layers are recurrent where the configuration says so. Layers of each kind are numbered apart, as what
    they keep is."""

    text: HybridConfig
    mixer_name: ClassVar[str] = "linear_attn"  # in checkpoints

    @abstractmethod
    def create_mixer(self, number: int) -> nn.Module:
        """The mixer of recurrent layer number ``number`` of those."""

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        before = sum(self.text.is_recurrent(other) for other in range(layer))
        norms, mlp, scale = (self.create_norm(), self.create_norm()), self.create_mlp_of(layer), self.residual_scale
        if self.text.is_recurrent(layer):
            mixer = self.create_mixer(before)
            return RecurrentDecoderLayer(norms[0], mixer, norms[1], mlp, name=self.mixer_name, residual_scale=scale)
        attention = self.create_attention(layer - before, rotary)
        return PreNormDecoderLayer(norms[0], attention, norms[1], mlp, residual_scale=scale)

    def create_mlp_of(self, layer: int) -> nn.Module:
        """The MLP of layer number ``layer``."""
        return self.create_mlp()

    @property
    def residual_scale(self) -> float:
        """The factor of what is added to the residual."""
        return 1.0

    def state_spec(self) -> StateSpec | None:
        """See `Model`."""
        return self.text.state_of(self.tp.size) if self.text.num_recurrent_layers else None
