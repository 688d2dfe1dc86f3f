"""Activation functions, by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

import octavo_kernels
from octavo.errors import ModelError

# config.json's names -> those of `octavo_kernels.activate`.
_KINDS = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that config.json calls ``name``, elementwise. Raises ModelError for an unknown one."""
    return partial(octavo_kernels.activate, kind=activation_kind(name))


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """``f(gate) * up``, ``[T, I]``, of a ``[T, 2 I]`` that holds gate and up side by side. Raises as `activation`."""
    kind = activation_kind(name)
    return octavo_kernels.silu_and_mul if kind == "silu" else partial(octavo_kernels.activate, kind=kind, gated=True)


def activation_kind(name: str) -> str:
    """The name that `octavo_kernels.activate` has for config.json's ``name``. Raises as `activation`."""
    if name not in _KINDS:
        raise ModelError(f"config.json asks for activation {name!r}; known are {', '.join(_KINDS)}")
    return _KINDS[name]
