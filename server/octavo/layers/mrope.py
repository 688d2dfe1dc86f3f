"""M-RoPE (Qwen2-VL, Wang et al., 2024): queries and keys turned by three positions, in time, height and width.

A text token has one position three times, so that M-RoPE is the usual rotary embedding of it. An image's tokens have
three that begin after the text before it, and text goes on after the largest of these: behind an image, positions are
smaller than places in the sequence by a constant.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.layers.rotary import RotaryEmbedding


class MRotaryEmbedding(RotaryEmbedding):
    """``mrope_section`` of config.json says how many pairs of a head follow the position in time, height and width:
    one after the other, or taking turns as long as there are some (``interleaved``)."""

    axes: Tensor  # int64 [size]: which of the three positions each column of the table follows

    def __init__(
        self, config: ModelConfig, interleaved: bool, default: tuple[int, int, int], size: int | None = None
    ) -> None:
        """``default``: what config.json means by not saying mrope_section. ``size``: see `RotaryEmbedding`."""
        super().__init__(config, size)
        pairs = self.cos_sin_cache.shape[1] // 2
        sections = _sections(config, pairs, list(default))
        if interleaved:
            axes = [axis if index < 3 * sections[axis := index % 3] else 0 for index in range(pairs)]
        else:
            axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        self.register_buffer("axes", torch.tensor(axes * 2), persistent=False)

    def of_images(self, positions: Tensor) -> Tensor:
        """Rows as `cos_sin_cache` has them, float32 ``[M, size]``, of tokens at ``positions`` int64 ``[3, M]``."""
        columns = torch.arange(len(self.axes), device=self.axes.device)
        return self.cos_sin_cache[positions[self.axes].T, columns]


def _sections(config: ModelConfig, pairs: int, default: list[int]) -> list[int]:
    stated: Any = config.text.rope().get("mrope_section", default)
    fits = isinstance(stated, list) and len(stated) == 3 and all(type(one) is int and one >= 0 for one in stated)
    if not fits or sum(stated) != pairs:
        raise ModelError(
            f"{config.model}: mrope_section must be three numbers of pairs that sum to {pairs}, half of what is turned "
            f"of a head, got {stated!r}; correct config.json or fetch the model again"
        )
    return cast("list[int]", stated)
