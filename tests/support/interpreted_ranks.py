"""Ranks as processes that exchange as GPUs do: by their kernels in Triton's interpreter, through memory that all have
mapped; and by torch's backend for CPUs. Ends with status 0 where every rank has the bits of plain torch.

    python -m support.interpreted_ranks FOLDER RANKS ...
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
import triton.language as tl
from support import triton_interpreter
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from octavo.executor import device_groups
from octavo.executor.device_groups import MappedGroup
from octavo.layers.parallel import Group, TorchGroup, best_in_order, sum_in_order
from octavo_kernels.triton import exchange
from octavo_kernels.triton.exchange import Exchange

SECONDS = 900
CPU_SECONDS = 120  # who waits for ever does so with the processor
DTYPES = (torch.float32, torch.bfloat16)
# In pieces, in two shots, in one; not a multiple of anything, and one number.
SHAPES = ((9, 576), (3, 333), (1, 1))


def parts_of(case: int, ranks: int, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Of numbers so unlike each other that their order matters."""
    generator = torch.Generator().manual_seed(case)
    parts = torch.randn(ranks, *shape, generator=generator) * 10 ** torch.randint(-3, 4, (ranks, *shape)).float()
    return list(parts.to(dtype))


def check(group: Group, rank: int, ranks: int) -> None:
    """Sums, gathered columns and the best of all, in an order that is the same on every rank."""
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    random.Random(0).shuffle(cases)
    for number, (shape, dtype) in enumerate(cases):
        torch.manual_seed(number)
        parts = parts_of(number, ranks, shape, dtype)
        x = parts[rank].clone()
        group.all_reduce(x)
        assert torch.equal(x, sum_in_order(parts)), f"sum of {shape} {dtype}"
        width = 1 + shape[1] // 3
        total = ranks * width - number % min(width, ranks)
        expected = torch.cat([part[:, :width] for part in parts], dim=1)[:, :total]
        assert torch.equal(group.all_gather(parts[rank][:, : width + 1], total), expected), f"{total} of {shape}"
        values = torch.stack(parts)[:, :, 0].float().round()
        values[values == 2] = float("nan")
        index = torch.randint(0, 100, values.shape)
        last = ranks - 1 if number % 2 else ranks  # whether the last rank has columns
        pairs = torch.stack([torch.where(torch.arange(ranks)[:, None] < last, index, -1), values], dim=-1).double()
        own = (index[rank] - 5, values[rank]) if rank < last else (None, None)
        best, value = group.best(*own, 5, shape[0])
        expected_best, expected_value = best_in_order(pairs)
        assert torch.equal(best, expected_best), f"best of {shape}"
        assert torch.equal(value.float().nan_to_num(7.5), expected_value.nan_to_num(7.5))
    assert group.smallest([5 + rank, 9 - rank]) == [5, 9 - ranks + 1]
    group.check()


def check_stop(group: MappedGroup, rank: int, ranks: int, region: Tensor) -> None:
    """The last rank does not come: the others stop waiting when they are asked to, and say for whom they waited.
    ``region`` int32: the flags of the first program come first, and then its counter."""
    if rank == ranks - 1:
        return
    found: list[int] = []

    def ask() -> None:
        while not (region[: ranks - 1] > region[exchange._COUNTS.value // 4]).all():  # till the others are there
            time.sleep(0.05)
        found.extend(group.late)

    thread = threading.Thread(target=ask)
    thread.start()
    group.all_reduce(torch.ones(3, 64))
    thread.join()
    assert found == [ranks - 1], found
    try:
        group.check()
    except RuntimeError as error:
        assert f"rank {ranks - 1} did not take part in an exchange, rank {rank} waited" in str(error)
    else:
        raise AssertionError("nothing was noticed")


def be_rank(rank: int, ranks: int, memory: mmap.mmap, folder: Path) -> None:
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    host = torch.zeros(1 + ranks, dtype=torch.int32)
    addresses = [base + other * exchange.region_bytes() for other in range(ranks)]
    store = dist.FileStore(str(folder / f"mapped-{ranks}"), ranks)
    mapped = MappedGroup(Exchange(torch.tensor([*addresses, host.data_ptr()]), rank, ranks), host, store)
    check(mapped, rank, ranks)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / f"gloo-{ranks}"), ranks), rank=rank, world_size=ranks
    )
    assert dist.group.WORLD is not None
    check(TorchGroup(dist.group.WORLD, one_shot_bytes=1000), rank, ranks)
    dist.barrier()
    own = torch.frombuffer(memory, dtype=torch.int32, count=exchange.DATA_AT // 4, offset=addresses[rank] - base)
    check_stop(mapped, rank, ranks, own)


def _let_others_run() -> None:
    """Who waits gives its processor away: there may be fewer than ranks."""
    plain = InterpreterBuilder.create_atomic_rmw

    def polite(*arguments: Any) -> Any:
        os.sched_yield()
        return plain(*arguments)

    InterpreterBuilder.create_atomic_rmw = polite


def main(folder: Path, sizes: list[int]) -> int:
    torch.set_num_threads(1)
    triton_interpreter.repair()
    _let_others_run()
    region = exchange.region_bytes()
    exchange.ONE_SHOT_BYTES, exchange.REGION_BYTES, exchange.PROGRAMS = 3000, 8 << 10, 2
    exchange._POLLS, device_groups._REPORT_SECONDS = tl.constexpr(64), SECONDS
    failed = 0
    for ranks in sizes:
        exchange.region_bytes = lambda: region
        memory, forks = mmap.mmap(-1, ranks * region), []
        for rank in range(ranks):
            if (fork := os.fork()) == 0:
                signal.alarm(SECONDS)
                resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
                status = 1
                try:
                    be_rank(rank, ranks, memory, folder)
                    status = 0
                except BaseException:
                    import traceback

                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(status)
            forks.append(fork)
        failed += sum(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) != 0 for fork in forks)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [*map(int, sys.argv[2:])]))
