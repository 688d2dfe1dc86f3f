"""Division of a model among ranks: layers among the stages of a pipeline, sizes of a layer among the ranks of a
stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError

_SHOWN = 8


def divide(total: int, ranks: int, what: str) -> int:
    """``total / ranks``; ConfigError, which names the numbers of ranks that fit, when it does not divide."""
    if total % ranks:
        fitting = [str(size) for size in range(1, min(total, 4096) + 1) if total % size == 0]
        shown = fitting if len(fitting) <= _SHOWN else [*fitting[:_SHOWN], "..."]
        raise ConfigError(
            f"{what} ({total}) cannot be split over {ranks} ranks; choose a tensor parallel size that divides it: "
            f"{', '.join(shown)}"
        )
    return total // ranks


@dataclass(frozen=True)
class Stage:
    """One of ``size`` parts of a model's layers, which compute one after the other."""

    number: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """True if it has the embeddings."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True if it has the head, and samples."""
        return self.number == self.size - 1


ONE_STAGE = Stage()


def split_layers(num_layers: int, stages: int, whole: Sequence[range] = (), head: int = 0) -> list[range]:
    """The layers of each stage, as evenly as can be; none of the ranges ``whole`` of layers is cut. ``head``: what the
    last stage has besides, in layers. Raises ConfigError where there are fewer layers, or places to cut, than that
    takes."""
    if stages > num_layers:
        raise ConfigError(f"{num_layers} layers cannot be dealt to {stages} pipeline stages; give fewer")
    cuts = [cut for cut in range(1, num_layers) if not any(one.start < cut < one.stop for one in whole)]
    if len(cuts) < stages - 1:
        raise ConfigError(
            f"{num_layers} layers cannot be dealt to {stages} pipeline stages: layers read the keys and values of "
            f"earlier ones, or are given parts of images, which leaves {len(cuts)} places to "
            f"cut; give at most {len(cuts) + 1} stages"
        )
    ends, last = [0], max(1, (num_layers + head) // stages - head)
    for number in range(1, stages):
        even, most = -(-number * (num_layers - last) // (stages - 1)), len(cuts) - (stages - 1 - number)
        at = min(range(most), key=lambda i: abs(cuts[i] - even))
        ends.append(cuts[at])
        cuts = cuts[at + 1 :]
    return [range(first, end) for first, end in zip(ends, [*ends[1:], num_layers], strict=True)]


def deal(experts: int, rank: int, ranks: int) -> range:
    """The numbers of the experts of ``rank``: neighbours, and one more on the first ranks where ``ranks`` do not divide
    them. ConfigError when there are not enough."""
    if experts < ranks:
        raise ConfigError(
            f"enable_expert_parallel: {experts} experts cannot be dealt to {ranks} ranks; give at most {experts}"
        )
    each, more = divmod(experts, ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
