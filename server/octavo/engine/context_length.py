"""The longest that a prompt and its answer may be together, by the arguments and the model's positions."""

from __future__ import annotations

from typing import Any

from octavo.errors import ConfigError
from octavo.interface.config_checks import MAX_POSITIONS, shown_value

FITTING_LENGTHS = (None, "auto", -1)  # as many as the model has positions and the memory has room for


def context_length(given: int | str | None, own: int, hf_config: dict[str, Any]) -> int:
    """Tokens of prompt and answer, for ``max_model_len`` as it was ``given`` and the model's ``own``. Raises
    ConfigError."""
    if given in FITTING_LENGTHS:
        return own  # lowered by the worker once it knows the memory
    asked = int(given)  # type: ignore[arg-type]
    if asked < 1:
        raise ConfigError(f"max_model_len must be at least 1, got {asked}")
    if asked > MAX_POSITIONS:
        raise ConfigError(f"max_model_len must be at most {MAX_POSITIONS}, got {shown_value(asked)}")
    if asked > own and not hf_config.get("rope_scaling") and not hf_config.get("rope_parameters"):
        raise ConfigError(
            f"max_model_len {asked} is above the model's {own} positions (max_position_embeddings); lower it"
        )
    return asked
