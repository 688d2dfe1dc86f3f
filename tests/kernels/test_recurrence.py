"""Recurrent layers against transformers' formulas, and their bits under every cut of a sequence into steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
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
KINDS = ["delta rule", "state space", "convolution"]  # the last one alone, with gates
LIMITS = (0.01, 2.0)  # of a state space's steps


@dataclass
class Inputs:
    """Of a sequence: what a layer computes with, by row."""

    x: Tensor  # [L, channels], of a convolution alone three times as many
    a: Tensor  # [L, value heads]
    b: Tensor


class Layer:
    """One of two layers with states in a pool full of NaN, and weights whose decays go from next to 0 to next to 1."""

    def __init__(self, shape: tuple[int, int, int, int, int], kind: str, sequences: int = 2, seed: int = 0) -> None:
        self.seed, self.shape, self.kind = seed, shape, kind
        key_heads, heads, key_size, size, taps = shape
        g = torch.Generator().manual_seed(seed)
        self.channels = 2 * key_heads * key_size + heads * size
        columns, per_block = (32 if size % 32 == 0 else 16), 1 + seed % 5
        numbers = key_size * columns
        if kind == "convolution":
            key_heads = key_size = size = 0
            numbers = 64 * (taps - 1)
        piece = numbers // (taps - 1)
        piece -= piece % (64 if piece >= 64 else 8)
        matrices, windows = heads * -(-size // columns), -(-self.channels // piece)
        self.has_matrices = matrices > 0
        count = -(-2 * (matrices + windows) // per_block)
        block_bytes = -(-per_block * numbers * 4 // 64) * 64 + 64
        blocks = 3 * sequences * count + 1
        pool = torch.full((blocks, block_bytes // 4), torch.nan).view(torch.uint8)
        self.pages = (torch.randperm(blocks - 1, generator=g) + 1).int().view(3, sequences, count)
        self.state = LayerState(
            pool,
            per_block,
            4 * numbers,
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
        self.conv_bias = None if kind == "delta rule" else torch.randn(self.channels, generator=g)
        self.skip = torch.randn(heads, generator=g)

    @property
    def width(self) -> int:
        """Columns of its input."""
        return self.channels * (3 if self.kind == "convolution" else 1)

    def inputs(self, length: int, seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
        g, heads = torch.Generator().manual_seed(seed), self.shape[1]
        x = torch.randn(length, self.width, generator=g).to(dtype)
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
        wide = functional.pad(x, (3, 5), value=torch.nan)[:, 3 : 3 + self.width]
        if self.kind == "convolution":
            out = backend.gated_conv(wide, self.weight, self.conv_bias, self.state, metadata)
        else:
            mixed = backend.causal_conv(wide, self.weight, self.conv_bias, self.state, metadata)
            out = self.scan(backend, mixed, a, b, wide.dtype, metadata)
        assert not out[len(out) - padding :].any()
        return list(out[: len(out) - padding].split([j - i for _, i, j in parts]))

    def scan(
        self, backend: Any, mixed: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, metadata: StateMetadata
    ) -> Tensor:
        if self.kind == "delta rule":
            return backend.gated_delta_rule(mixed, a, b, self.rate, self.bias, self.state, metadata)
        dt = functional.pad(a.to(dtype), (2, 1), value=torch.nan)[:, 2:-1]
        return backend.state_space_scan(mixed, dt, self.rate, self.bias, self.skip, LIMITS, self.state, metadata)

    def held(self, pages: Tensor) -> list[Tensor]:
        """Its state of a sequence."""
        matrices = [recurrence.read_matrices(self.state, pages)] if self.has_matrices else []
        return [*matrices, recurrence.read_window(self.state, pages, self.shape[-1])]


def whole(backend: Any, layer: Layer, inputs: Inputs, row: int = 0, kept: int = 0) -> Tensor:
    length = len(inputs.x)
    metadata = layer.metadata(query_start_loc=[0, length], num_tokens=[0], num_pending=[0], num_kept=[kept], rows=[row])
    return layer.step(backend, [(inputs, 0, length)], metadata)[0]


def formula(layer: Layer, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Results and the state, as transformers computes them in float32."""
    key_heads, heads, key_size, size, taps = layer.shape
    x, width, values = inputs.x.float(), key_heads * key_size, heads * size
    before, behind, x = x.chunk(3, dim=1) if layer.kind == "convolution" else (None, None, x)
    x = x if before is None else before * x
    padded = functional.pad(x.T[None], (taps - 1, 0))
    window = padded[0, :, len(inputs.x) :].T
    mixed = functional.conv1d(padded, layer.weight.T[:, None], layer.conv_bias, groups=layer.channels)[0].T
    if layer.kind == "convolution":
        return behind * mixed, [window]
    if layer.kind == "state space":
        v, k, q = functional.silu(mixed).split([values, width, width], dim=1)
    else:
        q, k, v = functional.silu(mixed).split([width, width, values], dim=1)
    q, k, v = (one.view(1, len(x), -1, n) for one, n in ((q, key_size), (k, key_size), (v, size)))
    if layer.kind == "state space":
        out, state = mamba2_chunk_scan(
            v,
            inputs.a[None],
            layer.rate,
            k,
            q,
            chunk_size=16,
            D=layer.skip,
            dt_bias=layer.bias,
            dt_softplus=True,
            dt_limit=LIMITS,
            return_final_states=True,
        )
        return out[0].flatten(1), [state[0].transpose(1, 2), window]
    decay = layer.rate * functional.softplus(inputs.a + layer.bias)
    out, state = torch_recurrent_gated_delta_rule(
        q, k, v, decay[None], inputs.b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0].flatten(1), [state[0], window]


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 5, 60])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_the_state_are_those_of_transformers(isa, shape, length, kind):
    layer = Layer(shape, kind)
    inputs = layer.inputs(length, 1)
    expected, state = formula(layer, inputs)
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(whole(cpu, layer, inputs), expected, rtol=1e-4, atol=1e-5 * largest)
    for found, one in zip(layer.held(layer.pages[0][0]), state, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)


def check_snapshot(layer: Layer, inputs: Inputs, row: int, position: int) -> None:
    """What lies in its pages is the state before that row."""
    other = Layer(layer.shape, layer.kind, seed=layer.seed)
    whole(cpu, other, Inputs(inputs.x[:position], inputs.a[:position], inputs.b[:position]))
    assert all(map(torch.equal, layer.held(layer.pages[2][row]), other.held(other.pages[0][0])))


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_how_a_sequence_is_cut(isa, threads, seed, dtype, kind):
    """In shares of any size, with rows that are pending and of which some turn out wrong, in other company, in place or
    to other blocks, with snapshots on the way, on any number of threads: results, state and window of one pass over the
    right rows."""
    rng = random.Random(seed)
    layer = Layer(SHAPES[seed % len(SHAPES)], kind, seed=seed)
    lengths = [rng.randint(3, 40) for _ in range(2)]
    inputs = [layer.inputs(length, 10 + i, dtype) for i, length in enumerate(lengths)]
    wrong = layer.inputs(max(lengths) + MOST, 99, dtype)
    expected = [whole(cpu, Layer(layer.shape, kind, seed=seed), one) for one in inputs]
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
    found = cpu.gated_norm(x, gate, weight, 1e-6, width)
    assert found.dtype == dtype
    assert_close(found, exact, exact.to(dtype), slack=1e-5 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24, 128])
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("is_normed", [False, True])
def test_the_norm_of_groups_is_that_of_transformers(isa, assert_close, width, dtype, gates_first, is_normed):
    torch.manual_seed(width)
    x, wide, weight = torch.randn(5, 3 * width), torch.randn(5, 4 * width).to(dtype), torch.rand(3 * width) + 0.5
    gate, norm = wide[:, 3 : 3 + 3 * width], FalconH1RMSNormGated(3 * width, 1e-6, 3, norm_before_gate=not gates_first)
    norm.weight.data = weight
    with torch.no_grad():
        exact = norm.double()(x.double(), gate.double()) if is_normed else x.double() * functional.silu(gate.double())
    found = cpu.gated_norm(x, gate, weight if is_normed else None, 1e-6, width, gates_first)
    assert found.dtype == dtype
    assert_close(found, exact, exact.to(dtype), slack=1e-5 if dtype == torch.bfloat16 else 1e-6)


def test_a_sigmoid_gates(isa, assert_close):
    x, up = torch.linspace(-100, 100, 999)[None], torch.randn(1, 999)
    exact = torch.sigmoid(x.double()) * up.double()
    assert_close(cpu.activate(x, "sigmoid", up=up), exact, torch.sigmoid(x) * up, slack=5e-7)
