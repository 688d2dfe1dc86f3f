"""The map of blocks: what is drawn is what the cells say, whatever their number."""

from __future__ import annotations

import io
import random
from base64 import b64encode

import pytest

from octavo.dashboard.block_map import (
    _COLOURS,
    CACHED_PART,
    CACHED_WHOLE,
    FREE,
    PICKED,
    PICKED_SHARED,
    SHARED_2,
    SHARED_4,
    USED,
    USED_PART,
    CacheView,
    counters_html,
    kinds_of,
    ledger_html,
    map_html,
    num_columns,
    png,
)
from octavo.interface.block_map import CACHED, PARTIAL, count_blocks


def view_of(cells: bytes, **fields: object) -> CacheView:
    counts = count_blocks(cells)
    answer = {
        "block_size": 16,
        "free": counts.free,
        "used": counts.used,
        "shared": counts.shared,
        "cached": counts.cached,
        "unfilled": 0,
        "cells": b64encode(cells).decode(),
        "running": [],
        **fields,
    }
    return CacheView.of(answer)


@pytest.mark.parametrize("num_blocks", [1, 63, 64, 1000, 30_000])
def test_a_pixel_a_block(num_blocks: int) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = random.Random(num_blocks)
    cells = bytes(rng.choices([0, 1, 2, 5, CACHED, CACHED | PARTIAL, CACHED | 1, CACHED | 2, 63], k=num_blocks))
    picked = rng.sample(range(1, num_blocks + 1), k=max(1, num_blocks // 10))
    kinds = kinds_of(cells, picked)
    drawn = image.open(io.BytesIO(png(kinds, num_columns(num_blocks)))).convert("RGBA")
    pixels = [tuple(drawn.tobytes()[4 * i : 4 * i + 4]) for i in range(drawn.width * drawn.height)]
    assert [pixel[:3] for pixel in pixels[:num_blocks]] == [tuple(bytes.fromhex(_COLOURS[kind][1:])) for kind in kinds]
    assert not any(alpha for *_, alpha in pixels[num_blocks:]), "what is no block cannot be seen"
    shown = map_html(view_of(cells, block_ids=[picked], request_id="x"))
    assert shown.count("<img") == 1 and len(shown) < 64_000, "quick to send and to draw"


def test_every_state_has_its_colour() -> None:
    cells = bytes([0, CACHED | PARTIAL, CACHED, 1, CACHED | 1, 2, CACHED | 2, CACHED | PARTIAL | 1, 4, 63, 3, 1])
    assert [*kinds_of(cells, [11, 12])] == [
        FREE,
        CACHED_PART,
        CACHED_WHOLE,
        USED_PART,
        USED,
        SHARED_2,
        SHARED_2,
        USED_PART,
        SHARED_4,
        SHARED_4,
        PICKED_SHARED,
        PICKED,
    ]


def test_counters() -> None:
    """Two sequences that share 32 blocks, of a cache that could hold four of the longest."""
    cells = bytes([CACHED | 2] * 32 + [1, 1] + [0] * 66)
    view = view_of(
        cells,
        unfilled=20,
        running=[{"request_id": "a<b", "num_tokens": [520]}, {"request_id": "c", "num_tokens": [524]}],
    )
    assert (view.sharing, view.saved, view.num_sequences) == ({2: 32}, 32, 2)
    assert view.waste == 20 / (34 * 16)
    shown = counters_html(view, blocks_of_longest=25, block_bytes=2**20)
    for said in ("34 blocks", "32 blocks", "3.7%", "50 blocks", "1.5 times", "so 4 would fit"):
        assert said in shown
    assert "shared ×2 32" in map_html(view)
    idle = counters_html(view_of(bytes(100)), 25, 2**20)
    assert "0.0%" in idle and "times as much" not in idle


def test_the_ledger_is_one_bar() -> None:
    shown = ledger_html({"weights": 3 * 2**30, "graphs": 0, "KV cache": 2**30})
    assert "width:75.000%" in shown and "weights 3.00 GiB (75.0%)" in shown and "graphs" not in shown
