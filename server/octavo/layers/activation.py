"""Activation functions, by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

import octavo_kernels
from octavo.errors import ModelError

_GELU_TANH = partial(F.gelu, approximate="tanh")
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _FUNCTIONS:
        raise ModelError(f"config.json asks for activation {name!r}; known are {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[name]


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """``f(gate) * up`` of a ``[T, 2I]`` that holds gate and up side by side."""
    function = activation(name)
    if function is F.silu:
        return octavo_kernels.silu_and_mul

    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return apply
