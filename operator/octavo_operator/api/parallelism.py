"""parallelism: the processes that compute one replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.schema import Rule, spec_field

MAX_RANKS = 48  # of the engine


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """`spec.parallelism`: how a replica is dealt out over processes, its ranks."""

    RULES: ClassVar = (
        Rule(
            f"self.tensor * self.pipeline <= {MAX_RANKS}",
            f"parallelism.tensor x pipeline must be at most {MAX_RANKS}, the ranks of an engine; lower one of them",
        ),
    )
    tensor: int = spec_field(
        "Ranks that share the model, each with a part of every layer. It must divide the number of attention heads. "
        "Ranks share the CPUs of the container; each has a part of its memory.",
        default=1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    pipeline: int = spec_field(
        "Stages that share the model, each with some of its layers and `tensor` ranks.",
        default=1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    data: int = spec_field(
        "Engines in a pod, each with the whole model and as many ranks as tensor says, which share the pod's requests. "
        "Each has a part of the container's CPUs and memory.",
        default=1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    expert: bool = spec_field(
        (
            "Expert parallelism: distribute whole experts of a mixture-of-experts model over the ranks, "
            "instead of splitting each expert."
        ),
        default=False,
    )
    nodes: int = spec_field(
        "Pods of a replica, which have as many of its ranks each. Above 1 a replica is a group of pods, by "
        "LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), which the cluster must have; resources and accelerator.count "
        "are those of each pod.",
        default=1,
        minimum=1,
        maximum=MAX_RANKS,
    )

    @property
    def ranks(self) -> int:
        """Processes of a replica."""
        return self.tensor * self.pipeline * self.data
