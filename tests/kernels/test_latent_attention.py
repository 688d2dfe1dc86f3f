"""Multi-head latent attention: what it makes of latents is attention to the keys and values that they stand for, and
bit-equal in any company."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.emulated_kernels import all_parameters

from octavo_kernels import AttentionMetadata, cpu, reference
from octavo_kernels.cpu import record

EPS = 1e-6


@dataclass
class Layer:
    """Weights and the cache of one layer, and what its tokens bring: sequence 0 is decoded, sequence 1 is a prompt."""

    key_weight: torch.Tensor  # [Hq, N, L]
    value_weight: torch.Tensor  # [Hq, L, V]
    norm: torch.Tensor
    table: torch.Tensor
    q: torch.Tensor  # [length, Hq, N + R] of each position
    latent: torch.Tensor
    scale: float

    def run(self, backend, parts: list[tuple[int, int]], block_size: int, kv_dtype: torch.dtype, dtype: torch.dtype):
        """Positions ``computed ... computed + new`` of each part, all on the same sequence, after those before."""
        blocks = -(-len(self.q) // block_size)
        cache = torch.full((1, 1 + blocks * len(parts), 1, block_size, self.latent.shape[1]), float("nan"))
        cache = cache.to(kv_dtype)
        tables = torch.arange(1, 1 + blocks * len(parts), dtype=torch.int32).view(len(parts), -1).flip(0)
        weights = [w.to(dtype) for w in (self.key_weight, self.norm)]
        out = []
        for kind in ("before", "now"):
            rows = [range(c) if kind == "before" else range(c, c + n) for c, n in parts]
            positions = torch.tensor([p for row in rows for p in row], dtype=torch.int64)
            of = torch.tensor([r for r, row in enumerate(rows) for _ in row], dtype=torch.int64)
            slots = tables[of, positions // block_size].long() * block_size + positions % block_size
            x = [t.to(dtype)[positions] for t in (self.q, self.latent)]
            queries = backend.latent_queries(*x, positions, self.table, cache, slots, *weights, EPS)
            if kind == "now":
                starts = torch.tensor([0] + [n for _, n in parts]).cumsum(0).to(torch.int32)
                lengths = torch.tensor([c + n for c, n in parts], dtype=torch.int32)
                metadata = AttentionMetadata(starts, lengths, tables, slots, max(n for _, n in parts),
                                             int(lengths.max()), len(positions))  # fmt: skip
                out = backend.latent_attention(queries, cache, metadata, self.scale, self.value_weight.to(dtype))
        return out

    def with_keys_and_values(self, parts: list[tuple[int, int]]) -> torch.Tensor:
        """The same in float64 with the keys and values of each head, without any paging."""
        q, latent = self.q.double(), self.latent.double()
        size, turned = self.norm.numel(), self.table.shape[1]
        kept = reference.rms_norm(latent[:, :size], self.norm.double(), EPS)
        angles = self.table.double()[: len(q)]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            cos, sin = angles[:, None].chunk(2, dim=-1)
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        keys = torch.einsum("hnl,tl->thn", self.key_weight.double(), kept)
        keys = torch.cat([keys, rotate(latent[:, None, size:]).expand(-1, q.shape[1], -1)], dim=-1)
        values = torch.einsum("hlv,tl->thv", self.value_weight.double(), kept)
        q = torch.cat([q[..., :-turned], rotate(q[..., -turned:])], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        out = torch.einsum("hqk,khv->qhv", scores.softmax(-1), values)
        return torch.cat([out[c : c + n] for c, n in parts])


def make_layer(length: int, heads: int, nope: int, turned: int, latent: int, value: int) -> Layer:
    g = torch.Generator().manual_seed(length)
    angles = torch.arange(length)[:, None] / 10 ** (torch.arange(turned // 2) / turned * 8)
    return Layer(
        torch.randn(heads, nope, latent, generator=g) / latent**0.5,
        torch.randn(heads, latent, value, generator=g) / latent**0.5,
        torch.rand(latent, generator=g) + 0.5,
        torch.cat([angles.cos(), angles.sin()], dim=-1).float(),
        torch.randn(length, heads, nope + turned, generator=g),
        torch.randn(length, latent + turned, generator=g),
        (nope + turned) ** -0.5,
    )


PARTS = [(299, 1), (0, 40), (63, 66), (250, 50)]
SIZES = [(3, 8, 4, 20, 12), (16, 128, 64, 512, 128), (130, 16, 8, 32, 40)]


@pytest.mark.parametrize("isa", all_parameters(), indirect=True)
@pytest.mark.parametrize("dtype, kv_dtype", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("sizes", SIZES)
def test_absorbed_weights_give_attention_to_keys_and_values(isa, assert_close, sizes, dtype, kv_dtype) -> None:
    layer = make_layer(300, *sizes)
    dtype, kv_dtype = getattr(torch, dtype), getattr(torch, kv_dtype)
    exact = layer.with_keys_and_values(PARTS)
    plain = layer.run(reference, PARTS, 16, kv_dtype, dtype)
    out = layer.run(cpu, PARTS, 16, kv_dtype, dtype)
    assert out.dtype == dtype
    # Where pairs of bfloat16 are multiplied, queries are rounded once more.
    assert_close(out, exact, plain, factor=8.0 if kv_dtype != dtype else 2.0, slack=1e-6)
    if kv_dtype == torch.float32:
        assert (out.double() - exact).abs().max() < 1e-4


@pytest.mark.parametrize("isa", all_parameters(), indirect=True)
def test_a_row_has_the_same_bits_in_any_company(isa, threads) -> None:
    for sizes in SIZES[:2]:
        layer = make_layer(300, *sizes)
        together = layer.run(cpu, PARTS, 16, torch.float32, torch.float32)
        at = 0
        for computed, new in PARTS:
            for number, block_size in ((1, 7), (2, 16)):
                threads(number)
                alone = layer.run(cpu, [(computed, new)], block_size, torch.float32, torch.float32)
                assert torch.equal(together[at : at + new], alone)
            at += new


def test_a_step_is_recorded() -> None:
    layer = make_layer(40, 4, 16, 8, 32, 16)
    cache = torch.zeros(1, 4, 1, 16, 40)
    rows = torch.arange(40)
    metadata = AttentionMetadata(
        torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40], dtype=torch.int32),
        torch.tensor([[1, 2, 3]], dtype=torch.int32), rows + 16, 40, 40, 40,
    )  # fmt: skip

    def step() -> torch.Tensor:
        queries = cpu.latent_queries(
            layer.q, layer.latent, rows, layer.table, cache, metadata.slot_mapping, layer.key_weight, layer.norm, EPS
        )
        return cpu.latent_attention(queries, cache, metadata, layer.scale, layer.value_weight)

    program = record(step)
    program.replay(40)
    assert torch.equal(program.outputs, step())
