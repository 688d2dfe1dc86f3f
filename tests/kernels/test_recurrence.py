"""The gated delta rule against transformers' formula, and its bits under every cut of a sequence into steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated, torch_recurrent_gated_delta_rule

from octavo_kernels import LayerState, StateMetadata, cpu
from octavo_kernels.reference import recurrence

# key heads, value heads, key size, value size, taps; the last one as models have it
SHAPES = [
    (1, 1, 8, 8, 2),
    (2, 2, 16, 48, 4),
    (1, 3, 32, 16, 3),
    (3, 6, 24, 64, 5),
    (2, 4, 8, 96, 8),
    (1, 2, 128, 128, 4),
]
MOST = 3  # pending rows


@dataclass
class Inputs:
    """Of a sequence: what a layer computes with, by row."""

    x: Tensor  # [L, channels]
    a: Tensor  # [L, value heads]
    b: Tensor


class Layer:
    """One of two layers with states in a pool full of NaN, and weights whose decays go from next to 0 to next to 1."""

    def __init__(self, shape: tuple[int, int, int, int, int], sequences: int = 2, seed: int = 0) -> None:
        self.seed, self.shape = seed, shape
        key_heads, heads, key_size, size, taps = shape
        g = torch.Generator().manual_seed(seed)
        self.channels = 2 * key_heads * key_size + heads * size
        columns, per_block = (32 if size % 32 == 0 else 16), 1 + seed % 5
        numbers = key_size * columns
        piece = numbers // (taps - 1)
        piece -= piece % (64 if piece >= 64 else 8)
        matrices, windows = heads * -(-size // columns), -(-self.channels // piece)
        count = -(-2 * (matrices + windows) // per_block)
        block_bytes = -(-per_block * numbers * 4 // 64) * 64 + 64
        blocks = 3 * sequences * count + 1
        pool = torch.full((blocks, block_bytes // 4), torch.nan).view(torch.uint8)
        self.pages = (torch.randperm(blocks - 1, generator=g) + 1).int().view(3, sequences, count)
        self.state = LayerState(
            pool,
            per_block,
            matrices,  # those of the layer before come first
            2 * matrices + windows,
            columns,
            piece,
            torch.full((sequences, MOST, self.channels), torch.nan),
            torch.full((sequences, MOST, key_heads, key_size), torch.nan),
            torch.full((sequences, MOST, heads, size), torch.nan),
            torch.full((sequences, MOST, heads), torch.nan),
        )
        self.weight = torch.randn(taps, self.channels, generator=g) * 0.5
        self.rate = -torch.linspace(1e-3, 8, heads)
        self.bias = torch.linspace(-6, 3, heads)

    def inputs(self, length: int, seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
        g, heads = torch.Generator().manual_seed(seed), self.shape[1]
        x = torch.randn(length, self.channels, generator=g).to(dtype)
        return Inputs(x, *(torch.randn(length, heads, generator=g) * 2 for _ in range(2)))

    def metadata(self, **lists: list[int]) -> StateMetadata:
        rows = torch.tensor(lists.pop("rows"))
        found: dict[str, Any] = {name: torch.tensor(values, dtype=torch.int32) for name, values in lists.items()}
        found.setdefault("num_before", torch.zeros(len(rows), dtype=torch.int32))
        pages = {"read_pages": self.pages[0][rows], "write_pages": self.pages[0][rows]}
        return StateMetadata(batch_rows=rows.int(), snapshot_pages=self.pages[2][rows], **pages, **found)

    def step(self, backend: Any, parts: list[tuple[Inputs, int, int]], metadata: StateMetadata) -> list[Tensor]:
        """Results of rows [start, end) of each sequence."""
        joined = [torch.cat([getattr(one, name)[i:j] for one, i, j in parts]) for name in ("x", "a", "b")]
        padding = 1
        x, a, b = (functional.pad(t, (0, 0, 0, padding), value=7.0) for t in joined)
        wide = functional.pad(x, (3, 5), value=torch.nan)[:, 3 : 3 + self.channels]
        mixed = backend.causal_conv(wide, self.weight, self.state, metadata)
        out = backend.gated_delta_rule(mixed, a, b, self.rate, self.bias, self.state, metadata)
        assert not out[len(out) - padding :].any()
        return list(out[: len(out) - padding].split([j - i for _, i, j in parts]))


def whole(backend: Any, layer: Layer, inputs: Inputs, row: int = 0, kept: int = 0) -> Tensor:
    length = len(inputs.x)
    metadata = layer.metadata(query_start_loc=[0, length], num_tokens=[0], num_pending=[0], num_kept=[kept], rows=[row])
    return layer.step(backend, [(inputs, 0, length)], metadata)[0]


def formula(layer: Layer, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Results and the state, as transformers computes them in float32."""
    key_heads, heads, key_size, size, taps = layer.shape
    x = functional.pad(inputs.x.float().T[None], (taps - 1, 0))
    mixed = functional.silu(functional.conv1d(x, layer.weight.T[:, None], groups=layer.channels))[0].T
    width = key_heads * key_size
    q, k, v = mixed.split([width, width, heads * size], dim=1)
    decay = layer.rate * functional.softplus(inputs.a + layer.bias)
    out, state = torch_recurrent_gated_delta_rule(
        q.view(1, -1, key_heads, key_size),
        k.view(1, -1, key_heads, key_size),
        v.view(1, -1, heads, size),
        decay[None],
        inputs.b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0].flatten(1), state[0]


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("length", [1, 2, 5, 60])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_the_state_are_those_of_transformers(isa, shape, length):
    layer = Layer(shape)
    inputs = layer.inputs(length, 1)
    expected, state = formula(layer, inputs)
    torch.testing.assert_close(whole(cpu, layer, inputs), expected, rtol=1e-4, atol=1e-5)
    found = recurrence.read_matrices(layer.state, layer.pages[0][0])
    torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-5)
    taps = shape[-1]
    window = functional.pad(inputs.x, (0, 0, taps - 1, 0))[length:]
    assert torch.equal(recurrence.read_window(layer.state, layer.pages[0][0], taps), window)


def check_snapshot(layer: Layer, inputs: Inputs, row: int, position: int) -> None:
    """What lies in its pages is the state before that row."""
    other = Layer(layer.shape, seed=layer.seed)
    whole(cpu, other, Inputs(inputs.x[:position], inputs.a[:position], inputs.b[:position]))
    for read in (recurrence.read_matrices, lambda state, pages: recurrence.read_window(state, pages, layer.shape[-1])):
        assert torch.equal(read(layer.state, layer.pages[2][row]), read(other.state, other.pages[0][0]))


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_how_a_sequence_is_cut(isa, threads, seed, dtype):
    """In shares of any size, with rows that are pending and of which some turn out wrong, in other company, in place or
    to other blocks, with snapshots on the way, on any number of threads: results, state and window of one pass over the
    right rows."""
    rng = random.Random(seed)
    layer = Layer(SHAPES[seed % len(SHAPES)], seed=seed)
    lengths = [rng.randint(3, 40) for _ in range(2)]
    inputs = [layer.inputs(length, 10 + i, dtype) for i, length in enumerate(lengths)]
    wrong = layer.inputs(max(lengths) + MOST, 99, dtype)
    expected = [whole(cpu, Layer(layer.shape, seed=seed), one) for one in inputs]
    done, pending, results = [0, 0], [0, 0], [[], []]  # rows that are known to be right; of these: pending ones
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        rows = [i for i in (0, 1) if done[i] < lengths[i] and rng.random() < 0.8] or [int(done[0] >= lengths[0])]
        rng.shuffle(rows)
        counts = [rng.randint(1, min(lengths[i] - done[i], 7)) for i in rows]
        guesses = [rng.randint(0, min(MOST - 1, n - 1)) if rng.random() < 0.5 else -1 for n in counts]
        kept = [1 + n for n in guesses]  # -1: part of a prompt, all of which is certain
        right = [rng.randint(0, n) if n > 0 else 0 for n in guesses]
        starts = [0]
        parts = []
        for i, count, guess, good in zip(rows, counts, guesses, right, strict=True):
            one, end = inputs[i], done[i] + count
            first_wrong = end if guess < 0 else end - guess + good
            some = {n: getattr(one, n).clone() for n in ("x", "a", "b")}
            for name, tensor in some.items():
                tensor[first_wrong:end] = getattr(wrong, name)[first_wrong:end]
            parts.append((Inputs(**some), done[i], end))
            starts.append(starts[-1] + count)
        metadata = layer.metadata(
            query_start_loc=starts,
            num_tokens=[done[i] - pending[i] for i in rows],
            num_pending=[pending[i] for i in rows],
            num_kept=kept,
            rows=rows,
        )
        for at, i in enumerate(rows):
            if rng.random() < 0.3 and pending[i] + counts[at] > kept[at]:  # another one may hold the state
                layer.pages[:2, i] = layer.pages[[1, 0], i]
                metadata = replace(metadata, write_pages=metadata.write_pages.clone())
                metadata.write_pages[at] = layer.pages[0, i]
        for at, i in enumerate(rows):
            committed = pending[i] + counts[at] - kept[at]
            if committed > pending[i] + 1 and rng.random() < 0.5:
                metadata.num_before[at] = rng.randint(pending[i] + 1, committed - 1)
        threads(rng.choice([1, 2, 5]))
        found = layer.step(cpu, parts, metadata)
        for at, i in enumerate(rows):
            if before := int(metadata.num_before[at]):
                check_snapshot(layer, inputs[i], i, done[i] - pending[i] + before)
        for i, count, guess, good, out in zip(rows, counts, guesses, right, found, strict=True):
            correct = count if guess < 0 else count - guess + good
            results[i].append(out[:correct])
            done[i] += correct
            pending[i] = 0 if guess < 0 else 1 + good
    for i, one in enumerate(expected):
        assert torch.equal(torch.cat(results[i]), one)


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 48, 128])
def test_the_norm_is_that_of_transformers(isa, assert_close, width, dtype):
    torch.manual_seed(width)
    x, wide, weight = torch.randn(5, 3 * width), torch.randn(5, 4 * width).to(dtype), torch.rand(width) + 0.5
    gate = wide[:, 5 : 5 + 3 * width]
    norm = Qwen3_5RMSNormGated(width, 1e-6)
    norm.weight.data = weight
    with torch.no_grad():
        exact = norm.double()(x.double().view(-1, width), gate.double().reshape(-1, width)).view(5, -1)
    found = cpu.gated_norm(x, gate, weight, 1e-6)
    assert found.dtype == dtype
    assert_close(found, exact, exact.to(dtype), slack=1e-5 if dtype == torch.bfloat16 else 1e-6)


def test_a_sigmoid_gates(isa, assert_close):
    x, up = torch.linspace(-100, 100, 999)[None], torch.randn(1, 999)
    exact = torch.sigmoid(x.double()) * up.double()
    assert_close(cpu.activate(x, "sigmoid", up=up), exact, torch.sigmoid(x) * up, slack=5e-7)
