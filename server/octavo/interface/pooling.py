"""What a model makes of a whole prompt beside text: vectors, classes and scores; and what a request asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POOLINGS = ("mean", "last", "cls")


@dataclass(frozen=True)
class DenseModule:
    """A linear layer behind pooling, ``[outputs, inputs]``, of the safetensors file ``path``; ``activation``: of
    "identity", "tanh" and "sigmoid"."""

    path: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class PoolerConfig:
    """What the model's own files say of pooling.

    ``tasks``: of "generate", "embed" and "classify", those that the model can do. ``pooling`` is of one sequence's
    states: one of POOLINGS. Vectors go through ``dense`` and get length 1 where ``normalize`` says so. ``dimensions``:
    the lengths to which they may be cut (Matryoshka; empty: any; None: none).

    Of a model that classifies: ``activation`` ("sigmoid", "softmax", "identity") makes probabilities of logits;
    ``labels`` are their names; ``token_ids`` are the tokens whose logits are those of the classes, for a language model
    that answers in one token; ``template``: how a query and a document become its prompt, see `pair_prompt`.
    """

    tasks: tuple[str, ...] = ("generate", "embed")
    pooling: str = "mean"
    normalize: bool = True
    dense: tuple[DenseModule, ...] = ()
    dimensions: tuple[int, ...] | None = None
    activation: str = "softmax"
    labels: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    template: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PoolerConfig:
        """The inverse of dataclasses.asdict, also after JSON."""
        dense = tuple(DenseModule(**module) for module in data["dense"])
        listed = {
            name: tuple(data[name]) for name in ("tasks", "dimensions", "labels", "token_ids") if data[name] is not None
        }
        return cls(**{**data, **listed, "dense": dense})

    def width(self, hidden_size: int) -> int:
        """The length of a whole vector."""
        return self.dense[-1].outputs if self.dense else hidden_size


@dataclass(frozen=True)
class Pooling:
    """What one request asks for. ``task``: "embed" or "classify"; ``pooling`` one of POOLINGS.

    A vector is cut to ``dimensions`` (None: whole), then, with ``activate``, brought to length 1; classes are
    probabilities with ``activate``, else logits.
    """

    task: str = "embed"
    pooling: str = "mean"
    activate: bool = True
    dimensions: int | None = None
