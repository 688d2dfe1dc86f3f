"""parallelism: the processes that compute one replica."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_operator.api.schema import spec_field

MAX_RANKS = 48  # of the engine


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """`spec.parallelism`: how a replica is dealt out over processes, its ranks."""

    tensor: int = spec_field(
        "Ranks that share the model, each with a part of every layer. It must divide the number of attention heads. "
        "Ranks share the CPUs of the container; each has a part of its memory.",
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
