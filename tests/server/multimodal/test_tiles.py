"""What memory is reserved for images by: no image has more patches than the largest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.interface.tiles import tiling
from octavo.interface.vision_config import LLAVA_TOWERS, vision_config

SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIDES = st.integers(1, 4000)


@pytest.mark.parametrize(
    "hf",
    [
        {"vision_config": SIGLIP},
        {"vision_config": SIGLIP, "vision_aspect_ratio": "anyres_max_4"},
        {"vision_config": CLIP, "vision_aspect_ratio": None},
    ],
    ids=["onevision", "fewer tiles", "next"],
)
@given(height=SIDES, width=SIDES)
@example(height=1391, width=1152)  # its padding leaves a little more than nine tiles, which are not scaled down
@example(height=1848, width=384)
def test_no_image_has_more_patches_than_the_largest(hf: dict[str, Any], height: int, width: int) -> None:
    tiles = tiling(hf, "test", vision_config(hf, "test", LLAVA_TOWERS), hf["vision_config"] is SIGLIP)
    assert tiles.count(height, width) <= tiles.count(*tiles.largest_image())
    kept = tiles.patches(height, width)
    rows, columns = (count * tiles.side for count in tiles.grid(height, width))
    assert kept.rows == rows - 2 * kept.top and kept.columns == columns - 2 * kept.left
