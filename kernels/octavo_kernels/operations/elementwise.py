"""Norms, activations, sums and other operations on rows."""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.dispatch import backend_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each row of ``x [T, H]``: computed in float32, rounded to x.dtype, then times ``weight [H]``.

    A weight in float32 is applied before anything is rounded (as in Gemma): so it is in all operations with a norm.
    """
    return backend_for(x).rms_norm(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` (rounded to x.dtype) and its RMS norm: returns ``(normed [T, H], new_residual [T, H])``."""
    return backend_for(x).fused_add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(x[:, :I]) * x[:, I:]`` of ``x [T, 2I]``: ``[T, I]``, the gate rounded to x.dtype before the product."""
    return backend_for(x).silu_and_mul(x)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Layer norm of each row of ``residual + x [T, H]`` (of ``x`` without one), computed in float32 and rounded once.

    ``weight`` and ``bias [H]`` may be None. Returns ``(normed [T, H], new_residual [T, H])``.
    """
    return backend_for(x).layer_norm(x, weight, bias, eps, residual)


def activate(x: Tensor, kind: str, gated: bool = False, up: Tensor | None = None) -> Tensor:
    """``f(x)`` of every element of ``x [T, I]``, with ``up [T, I]`` times that; ``gated``: ``f(x[:, :I]) * x[:, I:]``
    of ``x [T, 2I]``. Returns ``[T, I]``.

    ``kind``: "relu", "silu", "gelu", "gelu_tanh", "sigmoid" or "none" (x itself). A gate is rounded to x.dtype before
    the product.
    ``x`` and ``up`` may be some columns of wider tensors, and all rows of ``up`` the same one.
    """
    return backend_for(x).activate(x, kind, gated, up)


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, of one shape and dtype."""
    return backend_for(x).add(x, y)


def scale(x: Tensor, factor: float, cap: float | None = None) -> Tensor:
    """``x * factor``, with ``cap`` then ``cap * tanh(x * factor / cap)``: computed in float32, rounded once."""
    return backend_for(x).scale(x, factor, cap)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` in place, of ``x [T, n H]`` for ``weight [H]``: of each H columns. ``x`` may be some columns of a
    wider tensor."""
    backend_for(x).rms_norm_(x, weight, eps)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Columns ``columns`` int32 [I], each below K, of ``x [T, K]``: ``[T, I]``."""
    return backend_for(x).take_columns(x, columns)


def concat(*parts: Tensor) -> Tensor:
    """``parts``, ``[T, H]`` each, side by side: ``[T, n H]``. Values that are not finite may spoil those beside."""
    return backend_for(parts[0]).concat(*parts)


def mix_streams(
    x: Tensor, constants: Tensor, y: Tensor | None = None, matrix: Tensor | None = None, given: Tensor | None = None
) -> Tensor:
    """Sums of streams of hidden states: M streams ``[T, M H]`` of the S of ``x`` and ``y``, ``[T, a H]`` and ``[T, b
    H]`` with a + b = S, in each row one behind the other.

    Stream m is the sum over s of stream s times ``constants[m, s]``, with ``matrix [M, S, D]`` times that plus
    ``matrix[m, s] . given[t]`` of ``given [T, D]``. Factors are float32; what is summed is rounded once.
    """
    return backend_for(x).mix_streams(x, constants, y, matrix, given)


def match_rms_(x: Tensor, like: Tensor, floor: float) -> None:
    """Multiply each H columns of ``x [T, n H]``, in place, by what gives them the root mean square of the row of ``like
    [T, H]``, which may be some columns of a wider tensor; their own mean square counts as ``floor`` at least."""
    backend_for(x).match_rms_(x, like, floor)


def sparsify_(x: Tensor, factor: float) -> None:
    """``max(0, x - mean - factor * deviation)`` in place, with the mean and the standard deviation of each row of ``x
    [T, I]``, which may be some columns of a wider tensor."""
    backend_for(x).sparsify_(x, factor)
