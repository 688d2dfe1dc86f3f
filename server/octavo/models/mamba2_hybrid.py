"""Models in which some layers are Mamba 2's."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.model_config.state_space import StateSpaceConfig
from octavo.layers.mamba2 import Mamba2Mixer, MixerSettings
from octavo.models.hybrid import HybridForCausalLM


class Mamba2HybridForCausalLM(HybridForCausalLM):
    """A hybrid with Mamba 2's mixers."""

    text: StateSpaceConfig
    mixer_name: ClassVar[str] = "mamba"

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **HybridForCausalLM.packed_modules_mapping,
        "in_proj": ["in_proj"] * 5,
    }

    def mixer_settings(self) -> MixerSettings:
        """The family's kind of mixer."""
        text, bias, is_gguf = self.text, self.text.mamba_proj_bias, self.config.files.format == "gguf"
        return MixerSettings(text.rms_norm_eps, text.step_limits, text.mamba_conv_bias, bias, bias, is_gguf=is_gguf)

    def create_mixer(self, number: int) -> Mamba2Mixer:
        """The mixer of recurrent layer number ``number`` of those."""
        return Mamba2Mixer(self.text.hidden_size, number, self.text.state_of(1), self.mixer_settings(), self.tp)
