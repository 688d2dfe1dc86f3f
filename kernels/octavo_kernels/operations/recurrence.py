"""Recurrent layers: gated delta rule, the convolution before it and the norm behind it.

In float32 a row's result is a function of the inputs of its sequence up to it, in an order that their positions fix:
not of how steps are cut, of neighbours, threads, granules or what was pending.
"""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.dispatch import backend_for
from octavo_kernels.recurrence import LayerState, StateMetadata


def causal_conv(x: Tensor, weight: Tensor, state: LayerState, metadata: StateMetadata) -> Tensor:
    """``silu`` of each channel's sum over the last ``taps`` inputs of its sequence, float32 ``[T, channels]``.

    ``x [T, channels]`` may be some columns of a wider tensor; ``weight`` float32 ``[taps, channels]``, the oldest input
    first. Rows of padding are undefined. Commits and keeps inputs as `StateMetadata` says.
    """
    return backend_for(x).causal_conv(x, weight, state, metadata)


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


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each H columns of ``x`` float32 ``[T, n H]`` times ``weight`` float32 ``[H]`` and ``silu(gate)``.

    ``gate [T, n H]`` may be some columns of a wider tensor. Rounded once, to its dtype.
    """
    return backend_for(x).gated_norm(x, gate, weight, eps)
