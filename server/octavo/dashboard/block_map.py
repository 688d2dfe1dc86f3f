"""The map of the KV cache's blocks as a picture, and its totals. Without Gradio.

One pixel a block, coloured by a palette and magnified by the browser: 30,000 blocks are 20 kB and drawn at once.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from octavo.interface.block_map import CACHED, PARTIAL, REFERENCES, count_cells
from octavo.memory.ledger import MIB, gib

CSS = """
.octavo-map { position: relative; margin: 0 0 .75rem; background: var(--background-fill-secondary); }
.octavo-map img { display: block; width: 100%; image-rendering: pixelated; }
.octavo-map .grid { position: absolute; inset: 0; pointer-events: none; background-image:
  linear-gradient(to right, var(--background-fill-primary) 1px, transparent 1px),
  linear-gradient(to bottom, var(--background-fill-primary) 1px, transparent 1px); }
.octavo-legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; margin: 0 0 .5rem; padding: 0; }
.octavo-legend i { display: inline-block; width: .9em; height: .9em; margin-right: .45em; vertical-align: -.1em; }
.octavo-cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; margin: 0; }
.octavo-cards > div { border: 1px solid var(--border-color-primary); border-radius: .5rem; padding: .6rem .8rem; }
.octavo-cards dt { color: var(--body-text-color-subdued); font-size: .85rem; }
.octavo-cards dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.octavo-cards dd small { display: block; font-size: .85rem; font-weight: 400; color: var(--body-text-color-subdued); }
.octavo-bar { display: flex; height: 1.6rem; border-radius: .3rem; overflow: hidden; margin: .25rem 0 .6rem; }
"""

# (name, colour) by the palette's entry. A block that is not offered whole is paler.
FREE, CACHED_PART, CACHED_WHOLE, USED_PART, USED, SHARED_2, SHARED_3, SHARED_4, PICKED, PICKED_SHARED = range(10)
_COLOURS = (
    "#e2e8f0",
    "#bfdbfe",
    "#60a5fa",
    "#86d9c9",
    "#0d9488",
    "#c4b5fd",
    "#8b5cf6",
    "#5b21b6",
    "#f97316",
    "#b91c1c",
)
_MOST_COLUMN_PIXELS = 14  # of the page, a block
_LEAST_COLUMNS = 64
_MOST_COLUMNS_OF_GRID = 160  # more are too narrow for lines between them
_STEP = 1024  # blocks by which the picture grows


@dataclass(frozen=True)
class CacheView:
    """One answer of /octavo/blocks."""

    block_size: int
    cells: bytes
    free: int
    used: int
    shared: int
    cached: int
    unfilled: int  # places for tokens in used blocks
    running: dict[str, list[int]]  # request id -> tokens of each sample
    picked: tuple[int, ...] = ()  # ids of the blocks of the request that is looked at, from 1
    picked_id: str | None = None

    @classmethod
    def of(cls, answer: dict[str, Any]) -> CacheView:
        """Make the view from ``answer``, the JSON object of the server's route."""
        return cls(
            **{name: answer[name] for name in ("block_size", "free", "used", "shared", "cached", "unfilled")},
            cells=b64decode(answer["cells"]),
            running={one["request_id"]: one["num_tokens"] for one in answer["running"]},
            picked=tuple(block for sample in answer.get("block_ids") or () for block in sample),
            picked_id=answer.get("request_id"),
        )

    @cached_property
    def counts(self) -> Counter[int]:
        """Count the blocks of each byte."""
        return count_cells(self.cells)

    @property
    def sharing(self) -> dict[int, int]:
        """Count the blocks by the number of sequences that hold them, above 1."""
        held: Counter[int] = Counter()
        for cell, count in self.counts.items():
            held[cell & REFERENCES] += count
        return {times: held[times] for times in sorted(held) if times > 1}

    @property
    def saved(self) -> int:
        """Blocks that would be needed as well if sequences did not share."""
        return sum((times - 1) * count for times, count in self.sharing.items())

    @property
    def num_sequences(self) -> int:
        """Sequences that are being answered."""
        return sum(map(len, self.running.values()))

    @property
    def waste(self) -> float:
        """The share of places in used blocks where no token is, 0 to 1."""
        return self.unfilled / (self.used * self.block_size) if self.used else 0.0


def _kind_of(cell: int) -> int:
    references = cell & REFERENCES
    if not references:
        return FREE if not cell & CACHED else CACHED_PART if cell & PARTIAL else CACHED_WHOLE
    if references == 1:
        return USED if cell & CACHED and not cell & PARTIAL else USED_PART
    return (SHARED_2, SHARED_3, SHARED_4)[min(references, 4) - 2]


_KINDS = bytes(map(_kind_of, range(256)))


def kinds_of(cells: bytes, picked: Iterable[int] = ()) -> bytes:
    """The palette's entry of each block. ``picked``: ids from 1."""
    kinds = bytearray(cells.translate(_KINDS))
    for block in picked:
        if block <= len(kinds):
            kinds[block - 1] = PICKED if cells[block - 1] & REFERENCES < 2 else PICKED_SHARED
    return bytes(kinds)


def num_columns(num_blocks: int) -> int:
    """Return the width of the picture: four times its height, but at least `_LEAST_COLUMNS`."""
    return max(1, min(num_blocks, max(_LEAST_COLUMNS, int((4 * num_blocks) ** 0.5))))


def png(pixels: bytes, columns: int) -> bytes:
    """A PNG file. ``pixels``: an entry of the palette each, row by row; the last row is filled with nothing."""
    rows = -(-len(pixels) // columns)
    nothing = len(_COLOURS)
    pixels = pixels.ljust(rows * columns, bytes([nothing]))
    lines = b"".join(b"\0" + pixels[at : at + columns] for at in range(0, len(pixels), columns))
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in _COLOURS) + b"\0\0\0"
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", palette),
        (b"tRNS", b"\xff" * nothing + b"\0"),
        (b"IDAT", zlib.compress(lines, 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def map_html(view: CacheView, whole: bool = True) -> str:
    """The picture and its legend. ``whole`` False: without the free blocks at its end, as far as whole thousands."""
    total = len(view.cells)
    count = total if whole else min(total, -(-max(1, len(view.cells.rstrip(b"\0"))) // _STEP) * _STEP)
    columns = num_columns(count)
    rows = -(-count // columns)
    picture = b64encode(png(kinds_of(view.cells, view.picked)[:count], columns)).decode()
    said = f"{total:,} blocks: {view.used:,} used, {view.cached:,} cached, {view.free:,} free"
    lines = ""
    if columns <= _MOST_COLUMNS_OF_GRID:
        lines = f'<div class="grid" style="background-size: calc(100% / {columns}) calc(100% / {rows})"></div>'
    shown = f"blocks 1 to {count:,}; the other {total - count:,} are free" if count < total else "all blocks"
    return (
        f'<div class="octavo-map" style="max-width: {columns * _MOST_COLUMN_PIXELS}px">'
        f'<img src="data:image/png;base64,{picture}" alt="{said}" width="{columns}" height="{rows}">{lines}</div>'
        f'{_legend(view)}<p class="octavo-figures">A cell is a block of {view.block_size} tokens: {shown}.</p>'
    )


def _legend(view: CacheView) -> str:
    kinds: Counter[int] = Counter()
    for cell, count in view.counts.items():
        kinds[_KINDS[cell]] += count
    lines = [
        (FREE, f"free {view.free:,}"),
        (CACHED_WHOLE, f"cached {kinds[CACHED_WHOLE]:,}"),
        (CACHED_PART, f"cached, partial {kinds[CACHED_PART]:,}"),
        (USED, f"used {kinds[USED]:,}"),
        (USED_PART, f"used, partial or growing {kinds[USED_PART]:,}"),
        *(
            (min(SHARED_2 + times - 2, SHARED_4), f"shared ×{times}{'+' * (times == REFERENCES)} {count:,}")
            for times, count in view.sharing.items()
        ),
    ]
    if view.picked_id is not None:
        both = sum(view.cells[block - 1] & REFERENCES > 1 for block in view.picked if block <= len(view.cells))
        name = escape(view.picked_id[:24])
        lines += [
            (PICKED, f"of {name} alone {len(view.picked) - both:,}"),
            (PICKED_SHARED, f"of {name}, shared {both:,}"),
        ]
    items = "".join(f'<li><i style="background:{_COLOURS[kind]}"></i>{text}</li>' for kind, text in lines)
    return f'<ul class="octavo-legend">{items}</ul>'


def counters_html(view: CacheView, blocks_of_longest: int, block_bytes: int) -> str:
    """Render the memory that sharing saves, the memory that is wasted, and the memory that contiguous reservations
    would take; ``blocks_of_longest`` blocks hold a sequence of max_model_len."""
    contiguous = view.num_sequences * blocks_of_longest
    times = f", {contiguous / view.used:,.1f} times as much" if view.used and contiguous else ""
    fit = f"; so {len(view.cells) // blocks_of_longest:,} would fit, whatever their length"
    cards = [
        ("Used", f"{view.used:,} blocks", f"{gib(view.used * block_bytes)} by {view.num_sequences:,} sequences"),
        ("Prompt sharing saves", f"{view.saved:,} blocks", gib(view.saved * block_bytes)),
        ("Waste", f"{view.waste:.1%}", f"{view.unfilled:,} places in used blocks without a token"),
        ("Contiguous pre-allocation would take", f"{contiguous:,} blocks", gib(contiguous * block_bytes) + times + fit),
    ]
    return (
        '<dl class="octavo-cards">'
        + "".join(f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>" for name, value, more in cards)
        + "</dl>"
    )


# Colours of the ledger's parts, in its order; others are grey.
_PART_COLOURS = {
    "weights": "#2563eb",
    "KV cache": "#0d9488",
    "activations": "#f59e0b",
    "graphs": "#8b5cf6",
    "histories": "#ec4899",
    "slack": "#94a3b8",
    "process": "#f59e0b",
    "others, context": "#64748b",
    "left free": "#cbd5e1",
    "unused": "#e2e8f0",
}


def ledger_html(shares: dict[str, int]) -> str:
    """Memory by what it is for, in bytes, as one bar with its legend."""
    total = sum(shares.values()) or 1
    parts = [(name, size, _PART_COLOURS.get(name, "#64748b")) for name, size in shares.items() if size >= MIB]
    bar = "".join(
        f'<span title="{escape(name)} {gib(size)}" style="width:{size / total:.3%};background:{colour}"></span>'
        for name, size, colour in parts
    )
    items = "".join(
        f'<li><i style="background:{colour}"></i>{escape(name)} {gib(size)} ({size / total:.1%})</li>'
        for name, size, colour in parts
    )
    return (
        f'<div class="octavo-bar" role="img" aria-label="What the bytes are for">{bar}</div>'
        f'<ul class="octavo-legend">{items}</ul>'
    )
