"""The vision transformers of CLIP and SigLIP, which most families look through."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.interface.vision_config import MOST_PATCHES, VisionConfig
from octavo.layers.decoder import Elsewhere
from octavo.layers.vision import (
    PatchEmbedding,
    Table,
    TowerAttention,
    TowerMLP,
    TowerNorm,
    Weights,
    equal_starts,
    parameter,
)


class VisionLayer(nn.Module):
    """Norms before attention and before the MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = TowerNorm(config.hidden_size, config.eps)
        self.self_attn = TowerAttention(config.hidden_size, config.num_heads)
        self.layer_norm2 = TowerNorm(config.hidden_size, config.eps)
        self.mlp = TowerMLP(config.hidden_size, config.intermediate_size, config.act)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        """``x [T, width]``, sequences from ``starts`` on."""
        normed, x = self.layer_norm2.add(self.self_attn(self.layer_norm1(x), starts), x)
        return octavo_kernels.add(x, self.mlp(normed))


class _Embeddings(Weights):
    def __init__(self, config: VisionConfig, has_class: bool) -> None:
        super().__init__()
        self.class_embedding = parameter(config.hidden_size) if has_class else None
        self.patch_embedding = PatchEmbedding(config.channels, config.hidden_size, config.patch_size, not has_class)
        self.position_embedding = Table(config.side**2 + has_class, config.hidden_size)


class _Layers(nn.Module):
    def __init__(self, config: VisionConfig, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            VisionLayer(config) if number < count else Elsewhere() for number in range(config.num_layers)
        )


class VisionTransformer(nn.Module):
    """``is_clip``: with a token for the image's class and a norm before the layers. ``features``: the states that are
    wanted, counted as transformers counts them (-2: without the last layer); None: the last, normed."""

    def __init__(self, config: VisionConfig, is_clip: bool, features: list[int] | None) -> None:
        super().__init__()
        self.config, self.is_clip = config, is_clip
        states = config.num_layers + 1
        self.features = None if features is None else [number % states for number in features]
        self.embeddings = _Embeddings(config, is_clip)
        if is_clip:
            self.pre_layrnorm = TowerNorm(config.hidden_size, config.eps)
        self.encoder = _Layers(config, config.num_layers if self.features is None else max(self.features))
        normed = self.features is None
        self.post_layernorm: nn.Module = TowerNorm(config.hidden_size, config.eps) if normed else Elsewhere()
        self.head = Elsewhere()  # of SigLIP: it pools

    def positions(self, height: int, width: int) -> Tensor:
        """The row of the table for each of so many patches: int64 ``[height * width]``."""
        device = self.embeddings.position_embedding.weight.device
        return torch.arange(height * width, device=device)

    def forward(self, pixels: Tensor) -> Tensor:
        """``pixels [N, C, H, W]``; returns ``[N, positions, width]``, of several features side by side."""
        patches = pixels[0, 0].numel() // self.config.patch_size**2
        return torch.cat([self._states(part) for part in pixels.split(max(1, MOST_PATCHES // max(patches, 1)))])

    def _states(self, pixels: Tensor) -> Tensor:
        x = self.embeddings.patch_embedding(pixels)
        number, patch = len(pixels), self.config.patch_size
        index = self.positions(pixels.shape[2] // patch, pixels.shape[3] // patch)
        if self.embeddings.class_embedding is not None:
            first = self.embeddings.class_embedding.expand(number, 1, -1)
            x, index = torch.cat((first, x), dim=1), torch.arange(len(index) + 1, device=index.device)
        x = x + self.embeddings.position_embedding(index)
        length = x.shape[1]
        x = x.reshape(number * length, -1)
        if self.is_clip:
            x = self.pre_layrnorm(x)
        starts, wanted = equal_starts(number, length, x.device), self.features or ()
        kept = {0: x} if 0 in wanted else {}
        for layer_number, layer in enumerate(self.encoder.layers, start=1):
            if isinstance(layer, Elsewhere):
                break
            x = layer(x, starts)
            if layer_number in wanted:
                kept[layer_number] = x
        if self.features is None:
            x = self.post_layernorm(x)
        else:
            x = torch.cat([kept[feature] for feature in self.features], dim=-1)
        out: Tensor = x.view(number, length, -1)
        return out


class AnySizeVisionTransformer(VisionTransformer):
    """SigLIP of Idefics 3, whose positions are the nearest of the trained ones (NaViT, Dehghani et al., 2023)."""

    def positions(self, height: int, width: int) -> Tensor:
        """See `VisionTransformer`."""
        side, device = self.config.side, self.embeddings.position_embedding.weight.device  # nothing is copied to a GPU
        one = torch.ones((), device=device)
        bounds = torch.arange(1 / side, 1.0, 1 / side, device=device)
        rows, columns = (
            torch.bucketize((torch.arange(n, device=device) * (one / n)).clamp(max=1 - 1e-6), bounds, right=True)
            for n in (height, width)
        )
        return (rows[:, None] * side + columns).flatten()
