"""The vision transformer of Pixtral (Agrawal et al., 2024): images of any size, whose patches are turned by their row
and their column."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from octavo.interface.vision_config import VisionConfig, axial_theta
from octavo.layers.decoder import Elsewhere
from octavo.layers.vision import PatchEmbedding, TowerAttention, TowerGatedMLP, TowerRMSNorm, equal_starts

PIXTRAL_NAMES: list[tuple[str, str | None]] = [
    (r"^(model\.)?vision_tower\.(.*)\.attention\.o_proj\.", r"model.vision.tower.\2.attention.out_proj.")
]
_EPS = 1e-5  # whatever config.json says


class _Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.attention_norm = TowerRMSNorm(config.hidden_size, _EPS)
        self.attention = TowerAttention(config.hidden_size, config.num_heads, bias=False)
        self.ffn_norm = TowerRMSNorm(config.hidden_size, _EPS)
        self.feed_forward = TowerGatedMLP(config.hidden_size, config.intermediate_size, config.act)

    def forward(self, x: Tensor, starts: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [T, width]``, sequences from ``starts`` on; ``cos`` and ``sin [T, 1, head size]``."""
        x = x + self.attention(self.attention_norm(x), starts, partial(_turned, cos=cos, sin=sin))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class _Layers(nn.Module):
    def __init__(self, config: VisionConfig, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _Layer(config) if number < count else Elsewhere() for number in range(config.num_layers)
        )


class PixtralVisionTransformer(nn.Module):
    """``features``: the states that are wanted, counted as transformers counts them (-1: behind the last layer)."""

    def __init__(self, config: VisionConfig, source: str, features: list[int]) -> None:
        super().__init__()
        self.config, self.theta = config, axial_theta(config, source)
        self.features = [number % (config.num_layers + 1) for number in features]
        self.patch_conv = PatchEmbedding(config.channels, config.hidden_size, config.patch_size, bias=False)
        self.ln_pre = TowerRMSNorm(config.hidden_size, _EPS)
        self.transformer = _Layers(config, max(self.features))

    def forward(self, pixels: Tensor) -> Tensor:
        """``pixels [1, C, H, W]``, whole patches; returns ``[patches, width]`` row by row, of several features side by
        side."""
        rows, columns = (length // self.config.patch_size for length in pixels.shape[2:])
        x = self.ln_pre(self.patch_conv(pixels)[0])
        starts = equal_starts(1, len(x), x.device)
        cos, sin = self._rotation(rows, columns, x.device)
        kept = {0: x}
        for number, layer in enumerate(self.transformer.layers[: max(self.features)], start=1):
            x = layer(x, starts, cos, sin)
            if number in self.features:
                kept[number] = x
        return torch.cat([kept[feature] for feature in self.features], dim=-1)

    def _rotation(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each patch, float32 ``[patches, 1, head size]``: even frequencies turn by the row, odd
        ones by the column."""
        size = self.config.hidden_size // self.config.num_heads
        powers = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        frequencies = 1.0 / self.theta**powers
        by_row = torch.arange(rows, device=device)[:, None] * frequencies[0::2]
        by_column = torch.arange(columns, device=device)[:, None] * frequencies[1::2]
        angles = torch.cat((by_row.repeat_interleave(columns, 0), by_column.repeat(rows, 1)), dim=-1)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first, second), dim=-1) * cos + torch.cat((-second, first), dim=-1) * sin
    return turned.to(x.dtype)
