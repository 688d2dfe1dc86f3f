"""gpt-oss."""

from __future__ import annotations

from typing import Any

from octavo.interface.config_checks import MAX_FACTOR
from octavo.interface.model_config.declarations import choice, number, table
from octavo.interface.model_config.experts import ExpertsConfig


class GptOssConfig(ExpertsConfig):
    """A window in every other layer, where ``layer_types`` is not there."""

    num_experts: int = 128
    num_experts_per_tok: int = 4
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    swiglu_limit: float = number(0.0, MAX_FACTOR, 7.0, above=True)
    swiglu_alpha: float = choice((1.702,), 1.702, "must be 1.702, what gpt-oss' activation has")
    rope_theta: float = 150000.0
    rope_parameters: dict[str, Any] | None = table(
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    )

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return layer % 2 == 0
