"""Exchanges between GPUs give the bits of sums in the order of ranks, and end when they are told to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.examples import IS_LONG

from octavo.layers.parallel import best_in_order, sum_in_order
from octavo.memory.plan import MAPPED_BYTES
from octavo_kernels import triton as backend
from octavo_kernels.triton.exchange import Exchange, all_gather, all_reduce_, best_of_ranks, region_bytes

RANKS = (2, 3, 4)


@pytest.mark.slow
@pytest.mark.skipif(not backend.INTERPRETED, reason="for Triton's interpreter: TRITON_INTERPRET=1")
def test_processes_have_the_bits_of_plain_torch(tmp_path: Path) -> None:
    """Of 2 and 3 ranks, and of 4 in `make test-long`: by kernels in memory that all have mapped, and by gloo. One that
    is late is named."""
    ranks = RANKS if IS_LONG else RANKS[:2]
    command = [sys.executable, "-m", "support.interpreted_ranks", str(tmp_path), *map(str, ranks)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


def test_plans_count_what_is_mapped() -> None:
    assert region_bytes() == MAPPED_BYTES


class Streams:
    """Ranks that are streams of one GPU, with a region each of its memory."""

    def __init__(self, ranks: int) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        self.regions = torch.zeros(ranks, region_bytes(), dtype=torch.uint8, device="cuda")
        self.hosts = [torch.zeros(1 + ranks, dtype=torch.int32).pin_memory() for _ in range(ranks)]
        places = [region.data_ptr() for region in self.regions]
        self.ranks = [
            Exchange(torch.tensor([*places, host.data_ptr()], device="cuda"), rank, ranks)
            for rank, host in enumerate(self.hosts)
        ]

    def run(self, work: Callable[[Exchange], object]) -> None:
        torch.cuda.synchronize()
        for group, stream in zip(self.ranks, self.streams, strict=True):
            with torch.cuda.stream(stream):
                work(group)
        torch.cuda.synchronize()

    def warm_up(self, work: Callable[[Exchange], object]) -> None:
        """Have kernels compiled and loaded while none waits."""
        for host in self.hosts:
            host[0] = 1
        self.run(work)
        self.regions.zero_()
        for host in self.hosts:
            host.zero_()


@pytest.mark.skipif(backend.INTERPRETED, reason="needs a GPU: TRITON_INTERPRET=0")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", [1, 7, 300, 4000], ids=lambda rows: f"{rows} rows")
def test_streams_of_a_gpu_have_the_bits_of_plain_torch(ranks: int, rows: int) -> None:
    """In one shot, in two and in pieces, in every dtype; again and again, and captured."""
    streams = Streams(ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(rows)
        parts = torch.randn(ranks, rows, 1536, device="cuda").to(dtype)
        index = torch.randint(0, 99, (ranks, rows), device="cuda")
        index[-1] = -1
        values = parts[:, :, 0].double().round()
        x, found = parts.clone(), dict[int, tuple[torch.Tensor, ...]]()

        def work(
            group: Exchange,
            x: torch.Tensor = x,
            parts: torch.Tensor = parts,
            values: torch.Tensor = values,
            index: torch.Tensor = index,
            found: dict[int, tuple[torch.Tensor, ...]] = found,
        ) -> None:
            rank = group.rank
            x[rank].copy_(parts[rank])
            all_reduce_(x[rank], group)
            whole = all_gather(parts[rank][:, :500], ranks * 499 - 1, group)
            found[rank] = whole, *best_of_ranks(index[rank], values[rank], group)

        streams.warm_up(work)
        best = best_in_order(torch.stack([index.double(), values], dim=-1))
        columns = torch.cat(list(parts[:, :, :499]), dim=1)[:, :-1]
        for _ in range(5):
            streams.run(work)
            for rank in range(ranks):
                assert torch.equal(x[rank], sum_in_order(parts))
                assert torch.equal(found[rank][0], columns)
                assert torch.equal(found[rank][1], best[0])
        graphs = []
        for group, stream in zip(streams.ranks, streams.streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                work(group)
            graphs.append(graph)
        for _ in range(5):
            x.zero_()
            streams.run(lambda group, graphs=graphs: graphs[group.rank].replay())
            assert all(torch.equal(part, sum_in_order(parts)) for part in x)


@pytest.mark.skipif(backend.INTERPRETED, reason="needs a GPU: TRITON_INTERPRET=0")
def test_a_rank_that_waits_on_a_gpu_can_be_stopped() -> None:
    streams = Streams(2)
    x = torch.ones(3, 64, device="cuda")
    streams.warm_up(lambda group: all_reduce_(x, group))
    with torch.cuda.stream(streams.streams[0]):
        all_reduce_(x, streams.ranks[0])  # the other one does not come
        done = torch.cuda.Event()
        done.record()
    assert not done.query()
    streams.hosts[0][0] = 1
    torch.cuda.synchronize()
    assert streams.hosts[0].tolist() == [1, 0, 1]
