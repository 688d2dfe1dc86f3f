"""Results of whole prompts beside text (vectors, classes, scores), and the requests for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The mean of all tokens' states, that of the last one, of the first; the largest number of each column; the mean with
# weights 1, 2, 3, ...; the sum divided by the square root of the number of tokens.
POOLINGS = ("mean", "last", "cls", "max", "weightedmean", "mean_sqrt_len")


def parts_of(pooling: str) -> list[str]:
    """The ones of POOLINGS in ``pooling``, whose vectors are put one behind the other: "cls+mean"."""
    return pooling.split("+")


@dataclass(frozen=True)
class DenseModule:
    """A linear layer behind pooling, ``[outputs, inputs]``, of the safetensors file ``path``, or the tensor ``tensor``
    of the GGUF file there; ``activation``: of "identity", "tanh" and "sigmoid"."""

    path: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    tensor: str | None = None


@dataclass(frozen=True)
class NormModule:
    """A LayerNorm behind pooling, of vectors of ``size`` numbers, of the safetensors file ``path``."""

    path: str
    size: int

    @property
    def inputs(self) -> int:
        """The length of the vectors that it takes."""
        return self.size

    @property
    def outputs(self) -> int:
        """The length of the vectors that it gives."""
        return self.size


@dataclass(frozen=True)
class PoolerConfig:
    """Pooling as the model's own files describe it.

    ``tasks``: of "generate", "embed" and "classify", those that the model can do. ``pooling``: one of POOLINGS, applied
    to one sequence's states, or several, see `parts_of`. Vectors go through ``dense`` and, with ``normalize``, get
    length 1. ``dimensions``: the lengths to which they may be cut (Matryoshka; empty: any; None: none).

    For a model that classifies: ``activation`` ("sigmoid", "softmax", "identity") turns logits into probabilities;
    ``labels`` are their names; ``token_ids`` are the tokens whose logits are those of the classes, for a language model
    that answers in one token; ``template``: how a query and a document become its prompt, see `pair_prompt`.

    ``prompts``: what is put before texts, by name; ``default_prompt``: the name of the one that is put before texts of
    requests that name none. ``pools_prompt`` False: its tokens are left out of pooling.

    ``lacks``: says what the files lack of the way to the model's own vectors; others are made if ``pooling`` is asked
    for.
    """

    tasks: tuple[str, ...] = ("generate", "embed")
    pooling: str = "mean"
    normalize: bool = True
    dense: tuple[DenseModule | NormModule, ...] = ()
    dimensions: tuple[int, ...] | None = None
    activation: str = "softmax"
    labels: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    template: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    lacks: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PoolerConfig:
        """The inverse of dataclasses.asdict, also after JSON."""
        dense = tuple((NormModule if "size" in module else DenseModule)(**module) for module in data["dense"])
        listed = {
            name: tuple(data[name]) for name in ("tasks", "dimensions", "labels", "token_ids") if data[name] is not None
        }
        return cls(**{**data, **listed, "dense": dense})

    def width(self, hidden_size: int) -> int:
        """The length of a whole vector."""
        return self.dense[-1].outputs if self.dense else hidden_size * len(parts_of(self.pooling))


@dataclass(frozen=True)
class Pooling:
    """The pooling of one request. ``task``: "embed" or "classify"; ``pooling`` as in `PoolerConfig`, of the tokens
    behind the first ``left_out``.

    A vector is cut to ``dimensions`` (None: whole), then, with ``activate``, brought to length 1; classes are
    probabilities with ``activate``, else logits.
    """

    task: str = "embed"
    pooling: str = "mean"
    activate: bool = True
    dimensions: int | None = None
    left_out: int = 0
