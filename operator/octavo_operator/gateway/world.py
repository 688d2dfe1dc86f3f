"""The input of the reconciliation of an LLMGateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo_operator.observed.world import World
from octavo_operator.render.router.served import Candidate


@dataclass(frozen=True, kw_only=True)
class GatewayWorld(World):
    """The cluster at one time, as far as an LLMGateway is concerned."""

    candidates: Sequence[Candidate]  # the LLMDeployments that it selects
    has_namesake: bool  # an LLMDeployment of the namespace has its name
