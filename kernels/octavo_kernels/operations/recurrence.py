"""Recurrent layers: convolutions, the gated delta rule, state spaces and the norm behind them.

In float32 a row's result is a function of the inputs of its sequence up to it, in an order that their positions fix:
not of how steps are cut, of neighbours, threads, granules or what was pending.
"""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.dispatch import backend_for
from octavo_kernels.recurrence import LayerState, StateMetadata


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, metadata: StateMetadata) -> Tensor:
    """``silu`` of each channel's sum over the last ``taps`` inputs of its sequence, float32 ``[T, channels]``.

    ``x [T, channels]`` may be some columns of a wider tensor; ``weight`` float32 ``[taps, channels]``, the oldest input
    first; ``bias`` float32 ``[channels]``, if there is one. Rows of padding are undefined. Commits and keeps inputs as
    `StateMetadata` says.
    """
    return backend_for(x).causal_conv(x, weight, bias, state, metadata)


def gated_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, metadata: StateMetadata) -> Tensor:
    """Short convolution as in LFM2: ``[T, channels]`` in the dtype of ``x``, rounded once.

    ``x [T, 3 channels]`` holds factors of the inputs, factors of the results, and inputs: of b, c and x the result is c
    times the sum over the last ``taps`` of b x, plus ``bias``. ``weight`` and ``bias`` are those of `causal_conv`. Rows
    of padding give zeros. Commits and keeps b x as `StateMetadata` says.
    """
    return backend_for(x).gated_conv(x, weight, bias, state, metadata)


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, state: LayerState, metadata: StateMetadata
) -> Tensor:
    """Gated delta rule (Yang et al., 2024) over the rows of each sequence, float32 ``[T, value_heads * value_size]``.

    ``qkv`` float32 ``[T, channels]``, contiguous and overwritten, holds queries and keys ``[key_heads, key_size]`` and
    values ``[value_heads, value_size]``. Queries and keys are divided by their lengths, queries by ``sqrt(key_size)``
    too. ``a`` and ``b`` float32 ``[T, value_heads]``; ``rate`` (-exp(A_log)) and ``dt_bias`` float32 ``[value_heads]``.
    With decay = exp(rate * softplus(a + dt_bias)) and beta = sigmoid(b), a row's update is
    beta * (value - decay * state . key); its result is decay * state . query + (query . key) * update, and the state
    becomes decay * state + key * update. Value head h has key head ``h // (value_heads / key_heads)``. Rows of padding
    give zeros. Commits and keeps rows as `StateMetadata` says.
    """
    return backend_for(qkv).gated_delta_rule(qkv, a, b, rate, dt_bias, state, metadata)


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    limits: tuple[float, float],
    state: LayerState,
    metadata: StateMetadata,
) -> Tensor:
    """State-space duality as in Mamba 2 (Dao and Gu, 2024), float32 ``[T, value_heads * value_size]``.

    ``x`` float32 ``[T, channels]`` holds values ``[value_heads, value_size]``, then keys and queries ``[key_heads,
    key_size]``, known as x, B and C. ``dt [T, value_heads]`` may be some columns of a wider tensor in another dtype;
    ``rate`` (-exp(A_log)), ``dt_bias`` and ``skip`` (D) are float32 ``[value_heads]``. With step = softplus(dt +
    dt_bias), held within ``limits``, the state becomes exp(rate * step) * state + key * step * value; a row's result is
    the new state . query + skip * value. Value head h has key head ``h // (value_heads / key_heads)``. Rows of padding
    give zeros. Commits and keeps rows as `StateMetadata` says.
    """
    return backend_for(x).state_space_scan(x, dt, rate, dt_bias, skip, limits, state, metadata)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, width: int, gates_first: bool = False
) -> Tensor:
    """RMS norm of each ``width`` columns of ``x`` float32 ``[T, n width]`` times ``weight`` and ``silu(gate)``.

    ``weight`` is float32 ``[width]``, for all of them, or ``[n width]``; None: there is no norm. ``gates_first``: what
    is normed is x times ``silu(gate)``. ``gate [T, n width]`` may be some columns of a wider tensor. Rounded once, to
    its dtype.
    """
    return backend_for(x).gated_norm(x, gate, weight, eps, width, gates_first)
