"""Mixtral."""

from __future__ import annotations

from octavo.interface.model_config.experts import ExpertsConfig
from octavo.interface.model_config.llama import MistralConfig


class MixtralConfig(MistralConfig, ExpertsConfig):
    """Experts in every layer."""

    num_experts: int = 8
    num_experts_per_tok: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    sliding_window: int | None = None
