"""States of recurrent layers after 200,000 tokens, beside a scan in float64."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch
from tests.kernels.test_recurrence import LIMITS, Inputs, Layer
from torch import Tensor
from torch.nn import functional

from octavo_kernels import cpu

TOKENS = 200_000
STEPS = (1, 1, 1, 2, 7, 64)  # rows of a step
SHAPE = (1, 2, 8, 16, 3)  # key heads, value heads, key size, value size, taps


def scan(layer: Layer, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Results [L, heads * size] and the state [heads, key size, size], one token after the other."""
    key_heads, heads, key_size, size, taps = layer.shape
    width, values = key_heads * key_size, heads * size
    padded = functional.pad(inputs.x.double().T[None], (taps - 1, 0))
    bias = None if layer.conv_bias is None else layer.conv_bias.double()
    mixed = functional.conv1d(padded, layer.weight.double().T[:, None], bias, groups=layer.channels)[0].T
    parts = [width, width, values] if layer.kind == "delta rule" else [values, width, width]
    first, k, last = functional.silu(mixed).split(parts, dim=1)
    q, v = (first, last) if layer.kind == "delta rule" else (last, first)
    per_key = heads // key_heads
    q, k = (one.view(-1, key_heads, key_size).repeat_interleave(per_key, 1) for one in (q, k))
    v = v.reshape(-1, heads, size)
    step = functional.softplus(inputs.a.double() + layer.bias.double())
    if layer.kind == "delta rule":
        q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (q, k))
        q, beta = q * key_size**-0.5, inputs.b.double().sigmoid()
    else:
        step = step.clamp(*LIMITS)
    decay = (step * layer.rate.double()).exp()
    state, out = torch.zeros(heads, key_size, size, dtype=torch.float64), torch.empty(len(v), heads, size).double()
    for t in range(len(v)):
        state *= decay[t][:, None, None]
        if layer.kind == "delta rule":
            new = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t][:, None]
        else:
            new = v[t] * step[t][:, None]
        state += k[t][:, :, None] * new[:, None]
        out[t] = torch.einsum("hk,hkv->hv", q[t], state)
    if layer.kind == "state space":
        out += v * layer.skip.double()[:, None]
    return out.flatten(1), state


@pytest.mark.long
@pytest.mark.parametrize("kind", ["delta rule", "state space"])
def test_a_state_stays_that_of_a_scan_in_float64(kind):
    layer, draws = Layer(SHAPE, kind), random.Random(0)
    layer.rate = -torch.tensor([0.05, 0.3])  # decays up to 0.9999: nearer to 1, float32 itself is off by more
    inputs = layer.inputs(TOKENS, 1)
    ends = [0, *accumulate(draws.choices(STEPS, k=TOKENS))]
    ends = [end for end in ends if end < TOKENS] + [TOKENS]
    found = []
    for start, end in pairwise(ends):
        cut = layer.metadata(
            query_start_loc=[0, end - start], num_tokens=[start], num_pending=[0], num_kept=[0], rows=[0]
        )
        found += layer.step(cpu, [(inputs, start, end)], cut)
    out, state = scan(layer, inputs)
    held = layer.held(layer.pages[0][0])[0].double()
    assert held.isfinite().all()
    assert (held - state).norm() <= 1e-3 * state.norm()
    off = (torch.cat(found).double() - out).norm(dim=1)
    assert (off <= 1e-3 * out.norm(dim=1).clamp(min=out.norm(dim=1).median().item())).all(), off.max()
