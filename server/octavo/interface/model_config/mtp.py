"""Layers of multi-token prediction, as models of these alone."""

from __future__ import annotations

from octavo.interface.model_config.deepseek import DeepseekV3Config
from octavo.interface.model_config.glm4_moe import Glm4MoeConfig


class DeepSeekMTPConfig(DeepseekV3Config):
    """DeepSeek V3's."""


class Glm4MoeMTPConfig(Glm4MoeConfig):
    """GLM-4.5's."""
