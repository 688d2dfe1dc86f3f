"""The layers' kernels on a GPU beside torch's: norms, activation, rotary and cache write, linears of few rows, what
adapters add to them; and what prepares a decode step for them.

Where cuBLAS is faster than the linear of few rows, name the shape in `octavo_kernels.triton.small_linear.MEASURED`.

    python -m benchmarks gpu/layers [--json FILE]
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu.measure import DEVICE, DRY, copies_for, microseconds, microseconds_of_other
from benchmarks.gpu.report import Report
from octavo_kernels import SlotMemory, reference
from octavo_kernels import triton as backend
from octavo_kernels.triton.small_linear import small_config, small_linear, split_config

DTYPE = torch.float16 if DRY else torch.bfloat16  # the interpreter cannot multiply bfloat16
# Hidden, feed-forward, query heads, key heads, head size, norms of heads, vocabulary.
MODELS = {
    "8B": (4096, 14336, 32, 8, 128, False, 128_256),
    "0.6B": (1024, 3072, 16, 8, 128, True, 151_936),
}
LAYERS, BLOCKS, ROWS = 32, 512, (1, 64, 2048)
if DRY:
    MODELS = {"tiny": (128, 128, 2, 1, 64, True, 130)}
    LAYERS, BLOCKS, ROWS = 2, 4, (3,)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def elementwise(report: Report, name: str, rows: int) -> None:
    hidden, ffn, heads, kv_heads, size, norm, _ = MODELS[name]
    label, weight = f"{name} {rows} rows", randn(hidden)
    count = copies_for(rows * hidden * 2)
    xs, residuals = ([randn(rows, hidden) for _ in range(count)] for _ in range(2))
    pairs = list(zip(xs, residuals, strict=True))
    report.add(
        f"{label} fused_add_rms_norm",
        microseconds([partial(backend.fused_add_rms_norm, x, r, weight, 1e-6) for x, r in pairs]),
        4 * rows * hidden * 2,
        torch=microseconds_of_other([lambda x=x, r=r: F.rms_norm(x + r, (hidden,), weight) for x, r in pairs]),
    )
    gates = [randn(rows, 2 * ffn) for _ in range(copies_for(rows * ffn * 4))]
    report.add(
        f"{label} silu_and_mul",
        microseconds([partial(backend.silu_and_mul, x) for x in gates]),
        3 * rows * ffn * 2,
        torch=microseconds_of_other([partial(reference.silu_and_mul, x) for x in gates]),
    )
    width = (heads + 2 * kv_heads) * size
    qkvs = [randn(rows, width) for _ in range(copies_for(rows * width * 2))]
    table = torch.randn(4096, size, device=DEVICE)
    positions = torch.randint(0, 4096, (rows,), device=DEVICE)
    blocks = rows + 16
    cache = torch.zeros(2, blocks, kv_heads, 16, size, dtype=DTYPE, device=DEVICE)
    slots = torch.randperm(blocks * 16, device=DEVICE)[:rows]
    norms = (randn(size), randn(size)) if norm else (None, None)
    arguments = (positions, table, cache, slots, heads, kv_heads, size, *norms, 1e-6)
    report.add(
        f"{label} rope_and_cache",
        microseconds([partial(backend.rope_and_cache, x, *arguments) for x in qkvs]),
        2 * rows * width * 2,
    )


def linears(report: Report, name: str) -> None:
    hidden, ffn, heads, kv_heads, size, _, vocab = MODELS[name]
    shapes = {
        "qkv": ((heads + 2 * kv_heads) * size, hidden),
        "o": (hidden, heads * size),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
        "head": (vocab, hidden),
    }
    for part, (n, k) in shapes.items():
        weights = [randn(n, k) * k**-0.5 for _ in range(copies_for(n * k * 2))]
        config, chosen = split_config(n, k), "ours" if small_config(n, k) else "cuBLAS"
        for rows in (1, 4, 16):
            x = randn(rows, k)
            blas = microseconds([partial(F.linear, x, w) for w in weights])
            if config is None:
                report.add(f"{name} {part} {rows} x {n} x {k}: cuBLAS", blas, n * k * 2)
                continue
            ours = microseconds([partial(small_linear, x, w, None, config) for w in weights])
            label = f"{name} {part} {rows} x {n} x {k}, {config.splits} splits (the engine takes {chosen})"
            report.add(label, ours, n * k * 2, cuBLAS=blas)


def adapters(report: Report, name: str) -> None:
    """What 4 adapters of rank 16 add to a product: rows alone, and sorted."""
    hidden, ffn, heads, kv_heads, size, _, _ = MODELS[name]
    kv, rank, slots = kv_heads * size, 16, 4
    for part, (sizes, k) in {"qkv": ([heads * size, kv, kv], hidden), "down": ([hidden], ffn)}.items():
        count, n = copies_for(slots * rank * (len(sizes) * k + sum(sizes)) * 2), sum(sizes)
        tables = []
        for _ in range(count):
            memory = SlotMemory(slots, rank, DTYPE)
            tables.append(memory.add(sizes, k))
            memory.allocate(DEVICE)
            image = memory.image([(torch.randn(len(sizes) * rank, k) * k**-0.5, torch.randn(rank, n))])
            for slot in range(slots):
                memory.fill(slot, image)
        for rows in ROWS:
            x, y = randn(rows, k), randn(rows, n)
            which = torch.arange(rows, dtype=torch.int32, device=DEVICE) % slots
            tiles = backend.lora_tiles(which, slots)

            def add(table, x=x, y=y, which=which, tiles=tiles):
                backend.lora_expand_(y, backend.lora_shrink(x, table, which, tiles), table, which, tiles)

            used = min(rows, slots)
            moved = 2 * (rows * (k + 2 * n) + used * rank * (len(sizes) * k + n))
            us = microseconds([partial(add, table) for table in tables])
            report.add(f"{name} {part} {rows} rows of {used} adapters", us, moved)


def block_copies(report: Report) -> None:
    blocks = torch.randn(BLOCKS, LAYERS, 2, 8, 16, 128, device=DEVICE).to(DTYPE)
    for count in (1, BLOCKS // 32, BLOCKS // 4):
        if not count:
            continue
        moved = 2 * count * blocks[0].nbytes
        # Other blocks each time: the same few would come from the L2 cache.
        turns = min(copies_for(moved), BLOCKS // (2 * count))
        pairs = torch.randperm(BLOCKS, device=DEVICE)[: 2 * count * turns].view(turns, count, 2)
        us = microseconds([partial(backend.copy_blocks, blocks, some) for some in pairs])
        plain = microseconds_of_other([partial(reference.copy_blocks, blocks, some) for some in pairs])
        report.add(f"copy {count} blocks of {LAYERS} layers", us, moved, torch=plain)


def step_inputs(report: Report) -> None:
    """Of sequences of 4,096 tokens, in tables for as many and for 131,072."""
    length = 40 if DRY else 4096
    for rows, width in product((1, 64, 256), (length // 16 + 64, 8192)):
        # Each call counts a token of every row: there is room for more than are measured.
        table = torch.randint(0, BLOCKS, (1, rows + 1, width), dtype=torch.int32, device=DEVICE)
        numbers = [torch.full((rows + 1,), value, device=DEVICE) for value in (7, length, 0)]
        order = torch.randperm(rows, device=DEVICE)
        us, plain = (
            timed([partial(way.decode_inputs, order, *(x.clone() for x in numbers), table, 16)])
            for timed, way in ((microseconds, backend), (microseconds_of_other, reference))
        )
        moved = rows * (2 * 4 * length // 16 + 80)
        report.add(f"decode_inputs {rows} rows, tables of {width}", us, moved, torch=plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report("layers", arguments.json)
    for name in MODELS:
        for rows in ROWS:
            elementwise(report, name, rows)
        linears(report, name)
        adapters(report, name)
    block_copies(report)
    step_inputs(report)


if __name__ == "__main__":
    main()
