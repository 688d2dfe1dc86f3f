"""Sampling on a GPU: microseconds a step, beside torch's own ways. The goal is 128 x 151,936 in 60 us.

python -m benchmarks gpu/sampling [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.measure import DEVICE, DRY, copies_for, microseconds, microseconds_of_other
from benchmarks.gpu.report import Report
from octavo_kernels import Constraints, SamplingRows, SamplingTable
from octavo_kernels import triton as backend

VOCAB = 300 if DRY else 151_936
ROWS = (2,) if DRY else (128, 32, 1)
# What the rows ask for; "flat" logits (normal, sigma 1) have their nucleus all over the vocabulary, "peaked" ones
# (sigma 4) are like a language model's.
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


def table(rows: int, **given: float) -> SamplingTable:
    usual = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0} | given
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
    columns = {name: torch.full((rows,), usual[name], dtype=dtypes[name], device=DEVICE) for name in dtypes}
    return SamplingTable(**columns, streams=torch.randint(-(2**62), 2**62, (rows,), device=DEVICE))


def constraints(rows: int) -> Constraints:
    """Every row has a mask that allows half of the tokens, and penalties on 500 tokens it has seen."""
    words = -(-VOCAB // 32)
    every = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    seen = torch.zeros(rows, words, dtype=torch.int32, device=DEVICE)
    seen[:, :: max(1, words // 500)] = 1
    one = torch.ones(rows, device=DEVICE)
    return Constraints(
        bitmask=torch.randint(-(2**31), 2**31 - 1, (rows, words), dtype=torch.int32, device=DEVICE),
        bitmask_index=every,
        edit_start=torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE),
        edit_ids=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        edit_values=torch.zeros(1, device=DEVICE),
        seen=seen,
        seen_index=every,
        counts=torch.ones(rows, VOCAB, dtype=torch.int32, device=DEVICE),
        counts_index=every,
        repetition=one * 1.1,
        frequency=one * 0.1,
        presence=one * 0.1,
    )


def by_sorting(logits: Tensor, temperature: float = 1.0, top_k: int = VOCAB, top_p: float = 1.0, min_p: float = 0.0):
    """The usual way in plain torch: sort, cut, and the race of exponentials."""
    logits = logits.float() / temperature
    if top_k < VOCAB:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1)
        cut = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        cut[:, -1] = False
        logits = logits.scatter(1, order, ordered.masked_fill(cut, -torch.inf))
    probs = logits.softmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def in_torch(name: str, logits: Tensor) -> Tensor:
    case = CASES[name]
    return logits.argmax(-1) if name == "greedy" else by_sorting(logits, **case)  # type: ignore[arg-type]


def plain_logprobs(logits: Tensor) -> object:
    return logits.float().log_softmax(-1).topk(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 rows of bfloat16 alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report("sampling", arguments.json)
    shapes = [(torch.bfloat16, ROWS[0])] if arguments.quick else product((torch.bfloat16, torch.float32), ROWS)
    for dtype, rows in shapes:
        size = rows * VOCAB * dtype.itemsize
        for kind, sigma in (("flat", 1.0), ("peaked", 4.0)):
            logits = [(torch.randn(rows, VOCAB, device=DEVICE) * sigma).to(dtype) for _ in range(copies_for(size))]
            index, positions = (torch.arange(rows, device=DEVICE) for _ in range(2))
            label = f"{rows} x {VOCAB} {str(dtype).removeprefix('torch.')} {kind}"
            for name, case in CASES.items():
                step = SamplingRows(table(rows, **case), index, positions, truncated="temperature" not in case)
                us = microseconds([partial(backend.sample, x, step) for x in logits])
                plain = microseconds_of_other([partial(in_torch, name, x) for x in logits[:2]], launches=4)
                report.add(f"{label}, {name}", us, size, torch=plain)
            step = SamplingRows(table(rows), index, positions, False, constraints(rows))
            us = microseconds([partial(backend.sample, x, step) for x in logits])
            report.add(f"{label}, mask and penalties", us, size)
            us = microseconds([partial(backend.top_logprobs, x, index, positions, 5) for x in logits])
            plain = microseconds_of_other([partial(plain_logprobs, x) for x in logits[:2]], launches=4)
            report.add(f"{label}, 5 logprobs", us, size, torch=plain)
            del logits


if __name__ == "__main__":
    main()
