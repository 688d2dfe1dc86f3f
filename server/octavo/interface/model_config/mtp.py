"""Layers of multi-token prediction, as models of these alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_LAYERS
from octavo.interface.model_config.declarations import choice, integer
from octavo.interface.model_config.deepseek import DeepseekV3Config
from octavo.interface.model_config.glm4_moe import Glm4MoeConfig
from octavo.interface.model_config.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from octavo.interface.model_config.text import TextConfig


class PredictionConfig(TextConfig):
    """The last base of a family's class, whose defaults count. ``prediction_layer``: the number that the first of the
    layers has, or would have, behind the model's own."""

    counted_by: ClassVar[str] = "num_nextn_predict_layers"  # the model's field that says how many there are
    most_layers: ClassVar[int] = 64  # as many tokens are guessed at most
    has_tables: ClassVar[bool] = True  # an embedding and heads besides the model's
    is_in_gguf: ClassVar[bool] = False  # read from such files
    changes: ClassVar[Mapping[str, Any]] = {}  # to the model's fields

    prediction_layer: int = integer(0, MAX_LAYERS)


class DeepSeekMTPConfig(DeepseekV3Config, PredictionConfig):
    """DeepSeek V3's."""

    changes: ClassVar[Mapping[str, Any]] = {"first_k_dense_replace": 0}


class Glm4MoeMTPConfig(Glm4MoeConfig, PredictionConfig):
    """GLM-4.5's."""

    changes: ClassVar[Mapping[str, Any]] = {"first_k_dense_replace": 0}


class Qwen3_5MTPConfig(Qwen3_5Config, PredictionConfig):  # noqa: N801
    """Qwen3.5's: one layer, with attention."""

    counted_by: ClassVar[str] = "mtp_num_hidden_layers"
    most_layers: ClassVar[int] = 1
    has_tables: ClassVar[bool] = False
    is_in_gguf: ClassVar[bool] = True
    changes: ClassVar[Mapping[str, Any]] = {"layer_types": ["full_attention"]}

    mtp_use_dedicated_embeddings: bool = choice((False,), False)


class Qwen3_5MoeMTPConfig(Qwen3_5MoeConfig, Qwen3_5MTPConfig):  # noqa: N801
    """The same with experts."""
