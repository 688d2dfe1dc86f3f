"""How the GPU benchmarks measure: the device's own limits first, kernels in replayed graphs over data the caches miss.

`python -m benchmarks gpu/measure` prints the limits. Needs torch and triton alone. With TRITON_INTERPRET=1 everything
runs on the CPU with tiny sizes: that shows that a benchmark runs, its figures mean nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[2] / room) for room in ("kernels", "server")]

DRY = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if DRY else "cuda")
FLUSH_BYTES = 256 << 20  # more than any L2 cache: what is rotated through is read from memory


def require_gpu() -> None:
    if not DRY and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; TRITON_INTERPRET=1 tries the benchmark on the CPU with tiny sizes")


def microseconds(calls: Sequence[Callable[[], object]], launches: int = 20, rounds: int = 7) -> float:
    """Median time of one call in us: at least ``launches`` of them, in turn, in a graph that is replayed.

    Without a graph a kernel of a few us would be measured by the CPU's time to launch it. The calls should differ in
    the data they read (see `copies_for`).
    """
    if DRY:
        start = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - start) * 1e6
    from octavo.worker.gpu.graphs import CudaCapture

    launches = max(launches, len(calls))

    def work() -> tuple[()]:
        for i in range(launches):
            calls[i % len(calls)]()
        return ()

    torch.cuda.empty_cache()  # what the last measurement's graph had inside is of no use to this one
    captured = CudaCapture()(work)
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def microseconds_of_other(calls: Sequence[Callable[[], object]], launches: int = 20) -> float | None:
    """The same of what runs beside ours for comparison: None where it fails, our own figure counts without it."""
    try:
        return microseconds(calls, launches)
    except RuntimeError as error:
        print(f"  the other way did not run: {str(error).splitlines()[0]}", flush=True)
        return None


def copies_for(size: int) -> int:
    """How many copies of ``size`` bytes of input make the caches useless.

    At most 512: of inputs below 100 KB they stay in the L2 cache, and there the launch is what takes the time.
    """
    return 1 if DRY else max(1, min(512, -(-FLUSH_BYTES // max(size, 1))))


def copy_bandwidth() -> float:
    """Bytes a second, read and written ones counted, that a copy of 1 GiB moves."""
    source = torch.empty((1 << 20 if DRY else 1 << 30) // 4, dtype=torch.int32, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([lambda: target.copy_(source)], launches=10) * 1e6


def matrix_rate(dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP a second of a product of random matrices of 8192 rows and columns (zeros would be faster: less power)."""
    n = 64 if DRY else 8192
    a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * n**3 / microseconds([lambda: a @ b], launches=10) * 1e6


@dataclass
class Compiles:
    """What Triton did since `watch_compiles`: kernels compiled, kernels read from its cache on disk."""

    compiled: int = 0
    loaded: int = 0

    def since(self, before: Compiles) -> Compiles:
        return Compiles(self.compiled - before.compiled, self.loaded - before.loaded)

    def now(self) -> Compiles:
        return Compiles(self.compiled, self.loaded)


def watch_compiles() -> Compiles:
    """Counts that grow with every kernel that is new to this process."""
    import triton

    counts = Compiles()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            counts.loaded += 1
        else:
            counts.compiled += 1

    triton.knobs.compilation.listener = listen
    return counts


def save(path: Path | None, figures: dict[str, Any]) -> None:
    """Write figures as JSON, if asked to. Called after every one of them: a run that is cut off leaves what it has."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(json.dumps(figures, indent=1) + "\n")
        fresh.replace(path)


def device_name() -> str:
    return "interpreter" if DRY else torch.cuda.get_device_name()


def limits() -> tuple[float, float]:
    """Measure and print what the device can do: bytes a second of a copy, FLOP a second of a product."""
    require_gpu()
    copy, rate = copy_bandwidth(), matrix_rate()
    import triton

    print(f"{device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy bandwidth {copy / 1e12:.2f} TB/s, bfloat16 8192^3 {rate / 1e12:.0f} TFLOP/s", flush=True)
    return copy, rate


if __name__ == "__main__":
    limits()
