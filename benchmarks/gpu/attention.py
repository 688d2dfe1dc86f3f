"""Paged attention on a GPU: decode as a fraction of the copy bandwidth, prompts as a fraction of the matrix rate.

torch's SDPA runs beside it on the same numbers laid out without pages. Every case is checked against plain torch
before it is timed.

    python -m benchmarks gpu/attention [decode] [prefill] [mixed] [--json FILE]
    python -m benchmarks gpu/attention --tune {decode,prefill} [--json FILE]     try other launch shapes
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu import measure
from benchmarks.gpu.measure import DEVICE, DRY, copies_for, limits, microseconds, microseconds_of_other
from octavo_kernels import AttentionMetadata, AttentionOptions, reference
from octavo_kernels.triton import attention
from octavo_kernels.triton import attention_configs as configs

BLOCK_SIZE = 16
GRAPH_LENGTH = 8192  # max_model_len of an engine
FLOAT8 = torch.float8_e4m3fn
HALF = torch.float16 if DRY else torch.bfloat16  # the interpreter cannot multiply bfloat16
MODELS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128), "d64": (32, 8, 64), "MHA": (32, 32, 128)}  # heads, kv heads, size
if DRY:
    MODELS = dict.fromkeys(MODELS, (2, 1, 32))


@dataclass
class Step:
    """A step's sequences: (keys computed before, new tokens) each, over random pages."""

    model: str
    shapes: list[tuple[int, int]]
    dtype: torch.dtype = HALF
    kv_dtype: torch.dtype = HALF

    @property
    def key_bytes(self) -> int:
        """Bytes of keys and values that a step reads at the least."""
        _, kv_heads, head_size = MODELS[self.model]
        return 2 * sum(a + b for a, b in self.shapes) * kv_heads * head_size * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        heads, _, head_size = MODELS[self.model]
        pairs = sum(b * a + b * (b + 1) // 2 for a, b in self.shapes)
        return 4 * heads * head_size * pairs


@dataclass
class Result:
    section: str
    case: str
    us: float
    rate: float  # TB/s or TFLOP/s
    fraction: float  # of the copy bandwidth or of the matrix rate; of both for steps that need both
    sdpa_us: float | None


def build(step: Step) -> tuple[torch.Tensor, list[tuple[torch.Tensor, AttentionMetadata]]]:
    """Queries, and as many caches with their metadata as the L2 cache cannot hold."""
    heads, kv_heads, head_size = MODELS[step.model]
    counts = [-(-(a + b) // BLOCK_SIZE) for a, b in step.shapes]
    rows = sum(b for _, b in step.shapes)
    q = torch.randn(rows, heads, head_size, device=DEVICE).to(step.dtype)
    longest = max(a + b for a, b in step.shapes)
    captured = all(b == 1 for _, b in step.shapes)  # in the engine, where a graph serves any length
    batches = []
    for _ in range(copies_for(step.key_bytes)):
        cache = torch.randn(2, sum(counts), kv_heads, BLOCK_SIZE, head_size, device=DEVICE, dtype=step.dtype)
        cache = cache.to(step.kv_dtype)
        pages = torch.randperm(sum(counts), dtype=torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, mine in zip(table, pages.split(counts), strict=True):
            row[: len(mine)] = mine
        starts = torch.tensor([0, *(b for _, b in step.shapes)]).cumsum(0).to(torch.int32)
        metadata = AttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            seq_lens=torch.tensor([a + b for a, b in step.shapes], dtype=torch.int32, device=DEVICE),
            block_table=table.to(DEVICE),
            slot_mapping=torch.full((rows,), -1, device=DEVICE),
            max_query_len=max(b for _, b in step.shapes),
            max_seq_len=max(longest, GRAPH_LENGTH) if captured else longest,
            num_actual_tokens=rows,
            query_start_loc_cpu=None if captured else starts.numpy(),
        )
        batches.append((cache, metadata))
    return q, batches


def ours(q: torch.Tensor, batches: list[tuple[torch.Tensor, AttentionMetadata]]) -> list[Callable[[], object]]:
    scale = q.shape[-1] ** -0.5
    return [partial(attention.paged_attention, q, cache, metadata, scale) for cache, metadata in batches]


def check(step: Step, q: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    """The first and the last sequence agree with plain torch in float32."""
    scale = q.shape[-1] ** -0.5
    out = attention.paged_attention(q, cache, metadata, AttentionOptions(scale))
    assert out.isfinite().all(), "not finite"
    starts = metadata.query_start_loc.tolist()
    for r in {0, len(step.shapes) - 1}:
        a, b = step.shapes[r]
        last = min(b, 128)  # of a prompt the last rows are enough
        alone = replace(
            metadata,
            query_start_loc=torch.tensor([0, last], dtype=torch.int32, device=DEVICE),
            seq_lens=metadata.seq_lens[r : r + 1],
            block_table=metadata.block_table[r : r + 1],
            num_actual_tokens=last,
            query_start_loc_cpu=None,
        )
        rows = slice(starts[r + 1] - last, starts[r + 1])
        pages = metadata.block_table[r, : -(-(a + b) // BLOCK_SIZE)].long()
        # As plain bytes: not every build of torch can pick pages of fp8.
        wide = cache.view(torch.uint8)[:, pages].view(cache.dtype).float()
        alone.block_table = torch.arange(wide.shape[1], dtype=torch.int32, device=DEVICE)[None]
        exact = reference.paged_attention(q[rows].float(), wide, alone, AttentionOptions(scale))
        error = (out[rows].float() - exact).abs().max().item() / exact.abs().max().item()
        assert error < 0.02, f"sequence {r} of {step} is off by {error:.3g}"


def sdpa(step: Step) -> float | None:
    """torch's time for the same work on contiguous tensors, None where it has no such call."""
    lengths = set(step.shapes)
    if len(lengths) > 1 or step.kv_dtype == FLOAT8:
        return None
    ((computed, new),) = lengths
    if computed and new > 1:
        return None
    heads, kv_heads, head_size = MODELS[step.model]
    count, length = len(step.shapes), computed + new
    q = torch.randn(count, heads, new, head_size, device=DEVICE, dtype=step.dtype)
    calls = []
    for _ in range(copies_for(step.key_bytes)):
        k, v = torch.randn(2, count, kv_heads, length, head_size, device=DEVICE, dtype=step.dtype)
        calls.append(partial(F.scaled_dot_product_attention, q, k, v, is_causal=new > 1, enable_gqa=heads != kv_heads))
    return microseconds_of_other(calls)


def run(section: str, name: str, step: Step, work: int, floor: float) -> Result:
    """``floor``: seconds that the device's limits ask for."""
    q, batches = build(step)
    check(step, q, *batches[0])
    us = microseconds(ours(q, batches))
    del q, batches
    result = Result(section, f"{step.model} {name}", us, work / us / 1e6, floor * 1e6 / us, sdpa(step))
    unit = "TFLOP/s" if section == "prefill" else "TB/s"
    beside = f"   torch SDPA {result.sdpa_us:9.1f} us" if result.sdpa_us else ""
    print(f"{result.case:34} {us:9.1f} us {result.rate:7.2f} {unit:8} {result.fraction:6.1%}{beside}", flush=True)
    return result


def small(shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """On the CPU: the kind of step, not its size."""
    return [(min(a, 40), min(b, 20)) for a, b in shapes[:2]] if DRY else shapes


def decode(copy: float, rate: float) -> list[Result]:
    print(f"\ndecode: bytes of keys and values, against the copy bandwidth\n{'-' * 60}")
    cases = [
        ("8B", "1 x 1024", [(1023, 1)], {}),
        ("8B", "1 x 8192", [(8191, 1)], {}),
        ("8B", "1 x 65536", [(65535, 1)], {}),
        ("8B", "16 x 2048", [(2047, 1)] * 16, {}),
        ("8B", "64 x 1024", [(1023, 1)] * 64, {}),
        ("8B", "128 x 1056", [(1055, 1)] * 128, {}),
        ("8B", "64 x 8192", [(8191, 1)] * 64, {}),
        ("8B", "64 x 100 to 8000", [(length, 1) for length in random.Random(0).choices(range(100, 8000), k=64)], {}),
        ("0.6B", "256 x 850", [(849, 1)] * 256, {}),
        ("MHA", "16 x 2048", [(2047, 1)] * 16, {}),
        ("d64", "64 x 4096", [(4095, 1)] * 64, {}),
        ("8B", "5 drafts, 64 x 2048", [(2043, 5)] * 64, {}),
        ("8B", "fp8 KV 64 x 8192", [(8191, 1)] * 64, {"kv_dtype": FLOAT8}),
        ("8B", "fp8 KV 1 x 65536", [(65535, 1)], {"kv_dtype": FLOAT8}),
    ]
    results = []
    for model, name, shapes, options in cases[:: 7 if DRY else 1]:
        step = Step(model, small(shapes), **options)
        results.append(run("decode", name, step, step.key_bytes, step.key_bytes / copy))
    return results


def prefill(copy: float, rate: float) -> list[Result]:
    print(f"\nprompts: FLOP of the pairs that are seen, against the matrix rate\n{'-' * 60}")
    cases = [
        ("8B", "8 x 512", [(0, 512)] * 8, {}),
        ("8B", "4 x 2048", [(0, 2048)] * 4, {}),
        ("8B", "2 x 4096", [(0, 4096)] * 2, {}),
        ("8B", "1 x 16384", [(0, 16384)], {}),
        ("8B", "2048 after 14336", [(14336, 2048)], {}),
        ("0.6B", "8 x 1024", [(0, 1024)] * 8, {}),
        ("d64", "4 x 4096", [(0, 4096)] * 4, {}),
        ("8B", "fp8 KV 2 x 4096", [(0, 4096)] * 2, {"kv_dtype": FLOAT8}),
    ]
    results = []
    for model, name, shapes, options in cases[:: 4 if DRY else 1]:
        step = Step(model, small(shapes), **options)
        results.append(run("prefill", name, step, step.flops, step.flops / rate))
    return results


def mixed(copy: float, rate: float) -> list[Result]:
    """A chunk of a prompt beside decode rows, against the two alone: what the mixture costs."""
    print(f"\nmixed: decode rows beside a chunk, and each alone\n{'-' * 60}")
    parts = {"chunk alone": small([(2048, 1024)]), "64 rows alone": small([(2047, 1)] * 64)}
    parts["both"] = parts["64 rows alone"] + parts["chunk alone"]
    results = []
    for name, shapes in parts.items():
        step = Step("8B", shapes)
        # Decode rows read their keys, the chunk multiplies: neither can hide the other's limit.
        read = Step("8B", [shape for shape in shapes if shape[1] == 1]).key_bytes
        multiplied = Step("8B", [shape for shape in shapes if shape[1] > 1]).flops
        results.append(run("mixed", name, step, step.key_bytes, read / copy + multiplied / rate))
    chunk, rows, both = (result.us for result in results)
    print(f"both take {both / (chunk + rows):.2f} of the time of one after the other", flush=True)
    return results


def tune(what: str, path: Path | None) -> None:
    """Try some hundred launch shapes for the commonest heads, then name the best; `now` is what the tables say."""
    limits()
    if what == "decode":
        table, head = configs.DECODE, configs.DECODE[128]
        steps = [Step("8B", small(shapes)) for shapes in ([(8191, 1)], [(1055, 1)] * 128, [(8191, 1)] * 64)]
        shapes = product((32, 64, 128), (4, 8), (4, 5, 7))
        variants = [({16: s}, p, c) for s, p, c in product(shapes, (3, 4, 6, 8, 12), (64, 128, 256, 512))]
    else:
        table, head = configs.PREFILL, configs.PREFILL[128]
        steps = [Step("8B", small(shapes)) for shapes in ([(0, 2048)] * 4, [(0, 16384)])]
        variants = [
            (configs.Config(m, n, w, s, r), 6, 256)
            for m, n, w, s, r in product((64, 128), (32, 64, 128), (4, 8), (3, 4, 5), (None, 128, 168))
        ]
    random.Random(0).shuffle(variants)  # a run that is cut off has tried some of every kind
    built = [build(step) for step in steps]
    now = (head, configs.PROGRAMS_PER_SM, configs.MIN_CHUNK)
    found: dict[str, list[float]] = {}
    for i, (value, programs, min_chunk) in enumerate([now, *variants[:: 100 if DRY else 1]]):
        table[128] = head | value if isinstance(value, dict) else value
        configs.PROGRAMS_PER_SM, configs.MIN_CHUNK = programs, min_chunk
        label = "now" if i == 0 else f"{value} programs {programs} chunk {min_chunk}"
        try:
            found[label] = [microseconds(ours(*b), launches=8, rounds=3) for b in built]
        except Exception as error:  # does not fit
            print(f"{label}: {str(error).splitlines()[0]}", flush=True)
            continue
        say_tuned(label, found[label])
        measure.save(path, {"device": measure.device_name(), "tuned": what, "us": found})
    for i, step in enumerate(steps):
        print(f"\n{len(step.shapes)} sequences of {step.shapes[0]}")
        for label in [*sorted(found, key=lambda label: found[label][i])[:5], "now"]:
            say_tuned(label, found[label])


def say_tuned(label: str, times: list[float]) -> None:
    print("  " + "  ".join(f"{us:9.1f} us" for us in times) + f"  {label}", flush=True)


def main() -> None:
    sections = {"decode": decode, "prefill": prefill, "mixed": mixed}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", choices=[*sections, []], help="all of them when none is named")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--tune", choices=["decode", "prefill"])
    arguments = parser.parse_args()
    measure.require_gpu()
    if arguments.tune:
        tune(arguments.tune, arguments.json)
        return
    copy, rate = limits()
    results: list[Result] = []
    for name in arguments.section or sections:
        results += sections[name](copy, rate)
        figures = {"device": measure.device_name(), "copy_bandwidth": copy, "matrix_rate": rate}
        measure.save(arguments.json, figures | {"results": [asdict(r) for r in results]})


if __name__ == "__main__":
    main()
