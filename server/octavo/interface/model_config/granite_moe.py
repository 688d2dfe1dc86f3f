"""Granite 3's mixtures of experts."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_WIDTH
from octavo.interface.model_config.declarations import integer
from octavo.interface.model_config.experts import ExpertsConfig
from octavo.interface.model_config.granite import GraniteConfig


class GraniteMoeConfig(GraniteConfig, ExpertsConfig):
    """Experts in every layer, in some models beside a shared MLP."""

    num_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = integer(0, MAX_WIDTH * 4, 0)


class GraniteMoeSharedConfig(GraniteMoeConfig):
    """Fields of Granite's mixtures with a shared expert."""
