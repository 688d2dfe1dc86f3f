"""Mamba 2 and Codestral Mamba: no layer has attention."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.model_config.mamba2 import Mamba2Config
from octavo.layers.decoder import DecoderLayer
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.mamba2_hybrid import Mamba2HybridForCausalLM
from octavo.models.nemotron_h import MixerDecoderLayer, NemotronHForCausalLM


class Mamba2ForCausalLM(Mamba2HybridForCausalLM):
    """Layers of one mixer each, all alike."""

    text: Mamba2Config

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^model\.(backbone|lm_head)\.", r"\1."),
        *NemotronHForCausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding | None:
        """There are no positions."""
        return None

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        return MixerDecoderLayer(self.create_norm(), self.create_mixer(layer))
