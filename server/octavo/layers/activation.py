"""Activation functions, by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

import octavo_kernels
from octavo.errors import ModelError

_GELU_TANH = partial(functional.gelu, approximate="tanh")
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that config.json calls ``name``, elementwise. Raises ModelError for an unknown one."""
    if name not in _FUNCTIONS:
        raise ModelError(f"config.json asks for activation {name!r}; known are {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[name]


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """``f(gate) * up``, ``[T, I]``, of a ``[T, 2 I]`` that holds gate and up side by side. Raises as `activation`."""
    function = activation(name)
    if function is functional.silu:
        return octavo_kernels.silu_and_mul

    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return apply
