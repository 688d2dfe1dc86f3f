"""A layer of latent attention for kernel tests: its weights, what its tokens bring, and what it should give."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo_kernels import AttentionMetadata, reference

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

    def run(
        self,
        backend,
        parts: list[tuple[int, int]],
        block_size: int,
        kv_dtype: torch.dtype,
        dtype: torch.dtype,
        padding: int = 0,
        before=None,
    ):
        """Positions ``computed ... computed + new`` of each part, each a sequence of its own, after those before; then
        ``padding`` rows. ``before``: the backend of those before, if it is another one."""
        blocks, device = -(-len(self.q) // block_size), self.q.device
        cache = torch.full((1, 1 + blocks * len(parts), 1, block_size, self.latent.shape[1]), float("nan"))
        cache = cache.to(device, kv_dtype)
        tables = torch.arange(1, 1 + blocks * len(parts), dtype=torch.int32).view(len(parts), -1).flip(0)
        weights = [w.to(dtype) for w in (self.key_weight, self.norm)]
        for kind in ("before", "now"):
            rows = [range(c) if kind == "before" else range(c, c + n) for c, n in parts]
            positions = torch.tensor([p for row in rows for p in row], dtype=torch.int64)
            of = torch.tensor([r for r, row in enumerate(rows) for _ in row], dtype=torch.int64)
            slots = tables[of, positions // block_size].long() * block_size + positions % block_size
            count = len(positions)
            positions = torch.cat([positions, torch.zeros(padding, dtype=torch.int64)]).to(device)
            slots = torch.cat([slots, torch.full((padding,), -1)]).to(device)
            x = [t.to(dtype)[positions] for t in (self.q, self.latent)]
            by = before or backend if kind == "before" else backend
            queries = by.latent_queries(*x, positions, self.table, cache, slots, *weights, EPS)
        starts = torch.tensor([0] + [n for _, n in parts]).cumsum(0).to(device, torch.int32)
        lengths = torch.tensor([c + n for c, n in parts], dtype=torch.int32, device=device)
        longest = max(n for _, n in parts), max(c + n for c, n in parts)
        metadata = AttentionMetadata(starts, lengths, tables.to(device), slots, *longest, count)
        return backend.latent_attention(queries, cache, metadata, self.scale, self.value_weight.to(dtype))

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
