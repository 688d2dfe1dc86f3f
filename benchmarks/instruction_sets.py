"""Products of the CPU kernels by instruction set, side by side: what matrix units gain, by rows and format.

    python -m benchmarks instruction_sets [--isas amx,avx512bf16] [--width 2048] [--threads 1] [--json FILE]

A weight is [width, width]. Every figure is the least of many calls, taken in turns of the instruction sets; several
weights of each format take turns too, so that they come from the last-level cache or from memory as in a model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from octavo_kernels import cpu, packing, quant
from octavo_kernels.cpu import compiler, library

ROWS = [1, 2, 4, 8, 12, 16, 20, 32, 64, 192, 512]
WEIGHTS = 4  # of each format, multiplied in turns


def formats(width: int) -> dict[str, Callable[[], object]]:
    """How a weight [width, width] of random numbers is made, by the name of its format."""
    shape = (width, width // quant.GROUP)

    def groups(bits: int, affine: bool) -> object:
        codes = torch.randint(1, 1 << bits, (*shape, quant.GROUP), dtype=torch.uint8)
        zeros = torch.rand(shape).half() if affine else None
        return packing.pack_codes(codes, torch.rand(shape).half(), zeros, bits=bits, activation_terms=1)

    def by_row() -> object:
        return packing.pack_row_scaled(torch.randint(1, 256, (width, width), dtype=torch.uint8), torch.rand(width))

    return {
        "bfloat16": lambda: packing.pack_dense(torch.randn(width, width).bfloat16()),
        "int8, a scale a row": by_row,
        "8 bits, groups (Q8_0)": lambda: groups(8, False),
        "4 bits, groups (Q4_1)": lambda: groups(4, True),
    }


def product(weight: object, rows: int, width: int) -> Callable[[], object]:
    x = torch.randn(rows, width)
    if isinstance(weight, quant.PackedLinear):
        return lambda: cpu.quantized_linear(x, weight)
    x = x.bfloat16()
    return lambda: cpu.dense_linear(x, weight)


def milliseconds(make: Callable[[], object], rows: int, width: int, isas: list[str]) -> dict[str, float]:
    calls: dict[str, list[Callable[[], object]]] = {}
    for isa in isas:
        library.use_library(library.load(isa))
        calls[isa] = [product(weight, rows, width) for weight in [make() for _ in range(WEIGHTS)]]
    least = dict.fromkeys(isas, float("inf"))
    for _ in range(5):
        for isa in isas:
            library.use_library(library.load(isa))
            ends = time.perf_counter() + 0.1
            while time.perf_counter() < ends:
                for call in calls[isa]:
                    started = time.perf_counter()
                    call()
                    least[isa] = min(least[isa], time.perf_counter() - started)
    return {isa: 1e3 * seconds for isa, seconds in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--isas", default=",".join(compiler.supported_isas()[:2]), help="to compare")
    parser.add_argument("--width", type=int, default=2048, help="channels and columns of a weight")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    isas, figures = args.isas.split(","), []
    print(f"{args.threads} threads, [{args.width}, {args.width}], milliseconds")
    for name, make in formats(args.width).items():
        print(f"\n{name:24s}" + "".join(f"{isa:>12s}" for isa in isas) + "       gain")
        for rows in ROWS:
            found = milliseconds(make, rows, args.width, isas)
            gain = found[isas[-1]] / found[isas[0]]
            print(f"{rows:19d} rows" + "".join(f"{found[isa]:12.3f}" for isa in isas) + f"{gain:10.2f}x", flush=True)
            figures.append({"format": name, "rows": rows, "ms": found})
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
