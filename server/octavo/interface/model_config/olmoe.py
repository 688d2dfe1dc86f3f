"""OLMoE."""

from __future__ import annotations

from typing import Any

from octavo.interface.model_config.declarations import declare
from octavo.interface.model_config.experts import ExpertsConfig


class OlmoeConfig(ExpertsConfig):
    """Experts in every layer."""

    num_experts: int = 64
    num_experts_per_tok: int = 8
    rms_norm_eps: float = 1e-5
    clip_qkv: Any = declare(lambda fields, key: fields.config[key], None)
