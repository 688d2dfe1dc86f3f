"""Streams of hidden states, and gates of which only the largest count (Gemma 3n)."""

from __future__ import annotations

import torch
from torch import Tensor


def concat(*parts: Tensor) -> Tensor:
    """See `octavo_kernels.concat`."""
    return torch.cat(parts, dim=-1)


def mix_streams(
    x: Tensor, constants: Tensor, y: Tensor | None = None, matrix: Tensor | None = None, given: Tensor | None = None
) -> Tensor:
    """See `octavo_kernels.mix_streams`."""
    made, streams = constants.shape
    width = (x.shape[1] + (0 if y is None else y.shape[1])) // streams
    together = x if y is None else torch.cat([x, y], dim=1)
    wide = together if x.dtype == torch.float64 else together.float()
    factors = constants.to(wide.dtype)
    if matrix is not None and given is not None:
        factors = factors + torch.einsum("msd,td->tms", matrix.to(wide.dtype), given.to(wide.dtype))
    out = factors.expand(len(x), made, streams) @ wide.view(len(x), streams, width)
    return out.to(x.dtype).flatten(1)


def match_rms_(x: Tensor, like: Tensor, floor: float) -> None:
    """See `octavo_kernels.match_rms_`."""
    heads = x.unflatten(1, (-1, like.shape[1]))
    wide, wanted = (t if t.dtype == torch.float64 else t.float() for t in (heads, like))
    found = wide.pow(2).mean(-1, keepdim=True).clamp(min=floor)
    heads.copy_(wide * (wanted.pow(2).mean(-1).sqrt()[:, None, None] / found.sqrt()))


def sparsify_(x: Tensor, factor: float) -> None:
    """See `octavo_kernels.sparsify_`."""
    wide = x if x.dtype == torch.float64 else x.float()
    cutoff = wide.mean(-1, keepdim=True) + wide.std(-1, keepdim=True, unbiased=False) * factor
    x.copy_(torch.relu(wide - cutoff))
