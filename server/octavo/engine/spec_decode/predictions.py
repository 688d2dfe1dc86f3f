"""The engines that follow predictions: where speculation is on without a model, and on a CPU also where it is off."""

from __future__ import annotations

from octavo.interface.engine_config import EngineConfig

MOST_PREDICTED = 16  # tokens guessed in one step where speculation is off


def obstacle_to_predictions(config: EngineConfig, steps_overlap: bool) -> str | None:
    """Say why predictions of requests are not followed, and the way out; None: they are. ``steps_overlap``: there are
    several steps in flight."""
    way_out = "give method ngram or suffix in speculative_config"
    if config.speculative.in_worker:
        return f"a model guesses (method {config.speculative.method}): {way_out}"
    if config.speculative.is_on:
        return None
    if config.model.is_recurrent:
        return f"recurrent layers keep no room for guesses while speculation is off: {way_out}"
    if steps_overlap:
        return f"steps overlap, and keep no room for guesses while speculation is off: {way_out}"
    return None
