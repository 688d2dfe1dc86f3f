"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: patches of an image in its own aspect ratio,
turned by row and column, in squares that become an embedding each.

Patches come square by square, the squares row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.qwen_vision_config import QwenVisionConfig, qwen_vision_config
from octavo.layers.vision import (
    Table,
    TowerLinear,
    TowerMLP,
    TowerNorm,
    TowerRMSNorm,
    Weights,
    attend,
    equal_starts,
    parameter,
    tower_activation,
)
from octavo.models.image_reader import Vision

EPS = 1e-6


class QwenPatches(Weights):
    """Products of all numbers of a patch."""

    def __init__(self, config: QwenVisionConfig, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(config.width, config.channels, config.temporal, config.patch, config.patch)
        self.bias = parameter(config.width) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """``patches [T, numbers of one]``; returns ``[T, width]``."""
        return octavo_kernels.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class QwenAttention(nn.Module):
    """Attention to both sides within each of several sequences."""

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__()
        self.heads, self.size = config.num_heads, config.width // config.num_heads
        self.qkv = TowerLinear(config.width, 3 * config.width)
        self.proj = TowerLinear(config.width, config.width)

    def forward(self, x: Tensor, starts: Tensor, cos_sin: Tensor) -> Tensor:
        """``x [T, width]``, sequences from ``starts`` int32 ``[S + 1]`` on, turned by ``cos_sin`` float32 ``[T,
        size]``."""
        qkv = self.qkv(x)
        rows = torch.arange(len(x), device=x.device)
        octavo_kernels.rope_(qkv, rows, cos_sin, 2 * self.heads, self.size)
        out: Tensor = self.proj(attend(qkv, starts, self.heads))
        return out


class QwenGatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = TowerLinear(width, inner), TowerLinear(width, inner)
        self.down_proj, self.act = TowerLinear(inner, width), tower_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, width]``."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class QwenVisionLayer(nn.Module):
    """Norms before attention and before the MLP."""

    def __init__(self, config: QwenVisionConfig, norm: type[TowerNorm | TowerRMSNorm], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(config.width, EPS), norm(config.width, EPS)
        self.attn, self.mlp = QwenAttention(config), mlp

    def forward(self, x: Tensor, starts: Tensor, cos_sin: Tensor) -> Tensor:
        """See `QwenAttention`."""
        x = x + self.attn(self.norm1(x), starts, cos_sin)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class QwenMerger(nn.Module):
    """Merge the patches of a square into an embedding. ``norm``: of each patch, unless its size is that of a square."""

    def __init__(self, norm: TowerNorm | TowerRMSNorm, square: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.square = norm, square
        self.fc1, self.fc2 = TowerLinear(square, square), TowerLinear(square, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, width]``; returns ``[T / patches of a square, hidden]``."""
        normed = self.norm(x.reshape(-1, len(self.norm.weight))).view(-1, self.square)
        out: Tensor = self.fc2(functional.gelu(self.fc1(normed)))
        return out


class QwenVision(Vision):
    """The vision tower that the families share."""

    kind = "qwen2_vl"
    norm: type[TowerNorm | TowerRMSNorm] = TowerNorm

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = tower = qwen_vision_config(config.hf_config, config.model, self.kind)
        self.patch_embed = QwenPatches(tower, bias=tower.side > 0)
        self.blocks = nn.ModuleList(
            QwenVisionLayer(tower, self.norm, self.create_mlp()) for _ in range(tower.num_layers)
        )
        self.square = tower.width * tower.merge**2
        self.merger = QwenMerger(self.norm(tower.width, EPS), self.square, config.hidden_size)
        exponents = torch.arange(0, tower.width // tower.num_heads // 2, 2, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / tower.rope_theta ** (exponents / (tower.width // tower.num_heads // 2))
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies.to(torch.get_default_device()), persistent=False)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        return TowerMLP(self.config.width, self.config.inner, self.config.act)

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [patches, numbers of one]``, ``image_grid_thw`` int64 ``[1, 3]`` on the host."""
        _, rows, columns = tensors["image_grid_thw"][0].tolist()
        return self.see(self.patch_embed(tensors["pixel_values"]), rows, columns)

    def see(self, x: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        """Encode ``rows * columns`` embedded patches ``x [T, width]``; see `encode` for the result."""
        cos_sin, starts = self._cos_sin(rows, columns), equal_starts(1, len(x), x.device)
        for layer in self.blocks:
            x = layer(x, starts, cos_sin)
        return (self.merger(x),)

    def places(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """The row and the column of each patch, int64 ``[T]``."""
        merge, device = self.config.merge, self.frequencies.device
        shape = rows // merge, columns // merge, merge, merge
        row = torch.arange(rows, device=device).view(-1, 1, merge, 1).expand(shape)
        column = torch.arange(columns, device=device).view(1, -1, 1, merge).expand(shape)
        return row.flatten(), column.flatten()

    def _cos_sin(self, rows: int, columns: int) -> Tensor:
        """float32 ``[T, size]``: half of a head's pairs follow the row, half the column."""
        row, column = (place[:, None] * self.frequencies for place in self.places(rows, columns))
        return torch.cat((row.cos(), column.cos(), row.sin(), column.sin()), dim=-1)


class Qwen25Vision(QwenVision):
    """Most layers attend within windows, whose squares are put beside each other."""

    kind = "qwen2_5_vl"
    norm = TowerRMSNorm

    def create_mlp(self) -> nn.Module:
        """See `QwenVision`."""
        return QwenGatedMLP(self.config.width, self.config.inner, self.config.act)

    def see(self, x: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        """See `QwenVision`."""
        merge, window = self.config.merge, cast(int, self.config.window)
        order, windows = _windows(rows // merge, columns // merge, window, x.device)
        size = merge**2
        cos_sin = self._cos_sin(rows, columns).view(-1, size, x.shape[1] // self.config.num_heads)[order].flatten(0, 1)
        x = x.view(-1, size, x.shape[1])[order].flatten(0, 1)
        whole, parts = equal_starts(1, len(x), x.device), windows * size
        for number, layer in enumerate(self.blocks):
            x = layer(x, whole if number in self.config.whole_layers else parts, cos_sin)
        merged = self.merger(x)
        return (torch.empty_like(merged).index_copy_(0, order, merged),)


class Qwen3Vision(QwenVision):
    """Learned positions of a square, stretched to the image; states of some layers for the language model's first
    ones (DeepStack, Meng et al., 2024)."""

    kind = "qwen3_vl"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        tower = self.config
        self.pos_embed = Table(tower.side**2, tower.width)
        self.deepstack_merger_list = nn.ModuleList(
            QwenMerger(TowerNorm(self.square, EPS), self.square, config.hidden_size) for _ in tower.deep_layers
        )

    def see(self, x: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        """See `QwenVision`."""
        x = x + self._stretched(rows, columns).to(x.dtype)
        cos_sin, starts = self._cos_sin(rows, columns), equal_starts(1, len(x), x.device)
        deep = dict[int, Tensor]()
        for number, layer in enumerate(self.blocks):
            x = layer(x, starts, cos_sin)
            if number in self.config.deep_layers:
                at = self.config.deep_layers.index(number)
                deep[number] = self.deepstack_merger_list[at](x)
        return (self.merger(x), *deep.values())

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """Interpolate learned positions: the mean of each patch's four nearest, weighted by distance; corners lie on
        corners: ``[T, width]``."""
        side = self.config.side
        row, column = self.places(rows, columns)
        total: Tensor | None = None  # summed one after the other: four of them are larger than anything else
        for y, down in _taps(row, rows, side):
            for x, across in _taps(column, columns, side):
                part = self.pos_embed(y * side + x) * (down * across)[:, None]
                total = part if total is None else total.add_(part)
        assert total is not None
        return total


class Qwen35Vision(Qwen3Vision):
    """The same without DeepStack."""

    kind = "qwen3_5"


def _taps(places: Tensor, length: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Two neighbours of each of ``places`` int64 ``[T]`` of ``length`` on a line of ``side`` points, and their weights
    float32 ``[T]``."""
    at = places.float() * (side - 1) / max(length - 1, 1)
    low = at.floor()
    part = at - low
    first = low.long()
    return [(first, 1 - part), ((first + 1).clamp(max=side - 1), part)]


def _windows(rows: int, columns: int, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The squares of ``rows * columns``, window by window, int64 ``[rows * columns]``; and where each window begins
    among them, int32 ``[W + 1]``."""
    row, column = (torch.arange(length, device=device) // window for length in (rows, columns))
    across = -(-columns // window)
    order = torch.argsort((row[:, None] * across + column).flatten(), stable=True)
    heights, widths = (
        (length - torch.arange(0, length, window, device=device)).clamp(max=window) for length in (rows, columns)
    )
    counts = (heights[:, None] * widths).flatten()
    return order, functional.pad(counts.cumsum(0), (1, 0)).int()
