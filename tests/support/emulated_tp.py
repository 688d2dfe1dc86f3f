"""All ranks of a tensor-parallel model in one process, with sums in the order of ranks in plain torch; and the same in
processes, which have to give the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo.layers.parallel import TensorParallel
from octavo_kernels.cpu import create_shared_memory

T = TypeVar("T")


class EmulatedRank:
    """See `octavo.layers.parallel.Group`: the ranks are threads that meet at a barrier."""

    device_bytes = 0

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._parts, self._barrier = rank, parts, barrier

    def _exchange(self, mine: Any) -> list[Any]:
        self._parts[self.rank] = mine
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def all_reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        total, *others = (part.float() for part in self._exchange(x.clone()))
        for other in others:
            total = total + other
        return total.to(dtype or x.dtype)

    def all_gather(self, x: Tensor, total: int, wants: Tensor | None = None) -> Tensor:
        most = -(-total // len(self._parts))
        return torch.cat([part[:, :most] for part in self._exchange(x)], dim=1)[:, :total].contiguous()

    def best(self, index: Tensor | None, value: Tensor | None, offset: int, rows: int) -> tuple[Tensor, Tensor]:
        mine = None if index is None or value is None else (index + offset, value.double())
        found = [pair for pair in self._exchange(mine) if pair is not None]
        best = [max((v[i].item(), -n[i].item()) for n, v in found) for i in range(rows)]
        return torch.tensor([-n for _, n in best]), torch.tensor([v for v, _ in best], dtype=torch.float64)

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        return [min(column) for column in zip(*self._exchange(numbers), strict=True)]

    @property
    def late(self) -> list[int]:
        return []

    def check(self) -> None: ...

    def stop(self) -> None:
        self._barrier.abort()


class EmulatedTP:
    """``size`` ranks, of which ``build`` makes one each, one after the other; `run` has all of them do something."""

    def __init__(self, size: int, build: Callable[[TensorParallel], T], expert_parallel: bool = False) -> None:
        barrier, parts = threading.Barrier(size), [None] * size
        groups = [EmulatedRank(rank, parts, barrier) for rank in range(size)]
        tps = [TensorParallel(rank, size, group, expert_parallel=expert_parallel) for rank, group in enumerate(groups)]
        self._barrier, self.ranks = barrier, [build(tp) for tp in tps]

    def run(self, work: Callable[[Any], T]) -> list[T]:
        found: dict[int, T] = {}
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                found[rank] = work(self.ranks[rank])
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [found[rank] for rank in range(len(self.ranks))]


_RANK = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import save_file
from support.encoders import answers_of
from support.paged import load, logits_of
from octavo.layers.parallel import SharedMemoryGroup, TensorParallel, TorchGroup
from octavo.models.encoder import Encoder
rank, ranks, descriptor, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
groups = {"shared memory": SharedMemoryGroup(descriptor, rank, ranks)}
cases = json.loads(sys.argv[5])
if any(case["transport"] == "gloo" for case in cases):
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks)
    groups["gloo"] = TorchGroup(dist.group.WORLD)
for number, case in enumerate(cases):
    tp = TensorParallel(rank, ranks, groups[case["transport"]], expert_parallel=case["expert_parallel"])
    model = load(case["model"], case["dtype"], tp, case["quantization"])
    run = answers_of if isinstance(model, Encoder) else logits_of
    logits = run(model, case["tokens"])
    tp.group.check()
    size = sum(n for kind, n in model.weight_bytes_by_kind().items() if kind != "tables")
    found = {str(i): t.contiguous() for i, t in enumerate(logits)} | {"size": torch.tensor(size)}
    save_file(found, out / f"{number}-{rank}.out")
if "gloo" in groups:
    dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may not outlive the interpreter: "terminate called without an active exception"
"""


def case_of(
    model: Path | None,
    tokens: list[list[int]],
    dtype: str = "float32",
    transport: str = "shared memory",
    quantization: str | None = "none",
    expert_parallel: bool = False,
) -> dict[str, Any]:
    return {
        "model": None if model is None else str(model),
        "tokens": tokens,
        "dtype": dtype,
        "transport": transport,
        "quantization": quantization,
        "expert_parallel": expert_parallel,
    }


def logits_of_processes(ranks: int, cases: list[dict[str, Any]], out: Path) -> list[list[tuple[list[Tensor], int]]]:
    """For each case and each rank, what a process that is this rank computes, and the bytes of weights it holds."""
    out.mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    descriptor = create_shared_memory(ranks, 120, has_cores=cores >= ranks)
    try:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(rank), str(ranks), str(descriptor), str(out), json.dumps(cases)],
                env=env,
                pass_fds=(descriptor,),
            )
            for rank in range(ranks)
        ]
        assert [process.wait(timeout=300) for process in started] == [0] * ranks
    finally:
        os.close(descriptor)

    def read(number: int, rank: int) -> tuple[list[Tensor], int]:
        found = load_file(out / f"{number}-{rank}.out")
        size = int(found.pop("size"))
        return [found[str(i)] for i in range(len(found))], size

    return [[read(number, rank) for rank in range(ranks)] for number in range(len(cases))]
