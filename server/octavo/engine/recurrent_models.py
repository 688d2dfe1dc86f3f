"""Refuse what does not go with recurrent layers yet."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig


def check_recurrent(config: EngineConfig) -> None:
    """Raise ConfigError for a flag that a model with recurrent layers has no use for yet."""
    draft = config.speculative.draft
    if draft is not None and draft.is_recurrent:
        raise ConfigError(
            f"speculative_config: model {draft.model} has recurrent layers, which cannot guess yet; give another"
        )
    if not config.model.is_recurrent:
        return
    name = f"{config.model.model}, which has recurrent layers"
    if config.lora is not None:
        raise ConfigError(f"enable_lora is not supported yet for {name}; leave it out")
    stages = config.parallel.pipeline_parallel_size
    if stages > 1:
        raise ConfigError(f"pipeline_parallel_size {stages} is not supported yet for {name}; give 1")
