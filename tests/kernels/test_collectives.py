"""Exchanges between ranks through shared memory: threads, each with a mapping of its own, are the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import cpu
from octavo_kernels.cpu import SharedMemory, compiler, library
from octavo_kernels.cpu.recording import Program, record

T = TypeVar("T")
NAN = float("nan")


@contextmanager
def ranks_of(count: int, timeout: float = 60.0, has_cores: bool = False) -> Iterator[list[SharedMemory]]:
    descriptor = cpu.create_shared_memory(count, timeout, has_cores)
    try:
        yield [SharedMemory(descriptor, rank, count) for rank in range(count)]
    finally:
        os.close(descriptor)


def all_do(ranks: list[SharedMemory], work: Callable[[SharedMemory], T]) -> list[T]:
    found: dict[int, T] = {}
    threads = [threading.Thread(target=lambda r=rank: found.update({r.rank: work(r)})) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(ranks)
    return [found[rank] for rank in range(len(ranks))]


@pytest.fixture(params=compiler.supported_isas())
def isa(request: pytest.FixtureRequest, all_libraries: None) -> Iterator[str]:
    before = library.get_library()
    try:
        library.use_library(library.load(request.param))
    except compiler.BuildError as error:
        pytest.skip(str(error))
    yield request.param
    library.use_library(before)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_made_in_the_order_of_ranks(isa: str, dtype: torch.dtype) -> None:
    """Of sizes below a vector's, in several items, and beyond what fits into a slot; bit for bit on every rank."""
    for count, threads in ((2, 1), (3, 2)):
        with ranks_of(count) as ranks:
            for shape in ((1, 1), (3, 37), (5, 2049), (300, 5000)):
                g = torch.Generator().manual_seed(shape[1])
                parts = [torch.randn(*shape, generator=g).mul_(10**rank).to(dtype) for rank in range(count)]
                mine = [part.clone() for part in parts]

                def work(rank: SharedMemory, mine: list[torch.Tensor] = mine, threads: int = threads) -> None:
                    torch.set_num_threads(threads)
                    rank.all_reduce(mine[rank.rank])

                all_do(ranks, work)
                for part in mine:
                    assert torch.equal(part, summed(parts)), shape
                copies = [part.clone() for part in parts]

                def work_apart(rank: SharedMemory, copies: list[torch.Tensor] = copies) -> torch.Tensor:
                    return rank.all_reduce(copies[rank.rank], torch.bfloat16)

                for total in all_do(ranks, work_apart):
                    assert torch.equal(total, summed(parts).bfloat16()), "of float32, rounded once"
            assert not any(rank.stopped or rank.late for rank in ranks)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40), st.integers(0, 1 << 30))
def test_columns_are_gathered_and_the_best_is_found(count: int, rows: int, total: int, seed: int) -> None:
    """However many columns the last ranks lack; the first of equal ones, the first NaN."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.randint(-3, 4, (rows, total), generator=g).float()
    whole[torch.rand(whole.shape, generator=g) < 0.03] = NAN
    whole[torch.rand(rows, generator=g) < 0.1] = -torch.inf
    most = -(-total // count)

    def work(rank: SharedMemory) -> list[torch.Tensor]:
        own = whole[:, rank.rank * most : (rank.rank + 1) * most]
        padded = torch.cat([own, torch.full((rows, most + 1 - own.shape[1]), torch.inf)], dim=1)
        gathered = rank.all_gather(padded, total)
        rank.all_gather(padded, total, torch.zeros(1, dtype=torch.int64))
        pair = cpu.argmax(padded[:, : own.shape[1]]) if own.shape[1] else (None, None)
        return [gathered, *rank.best(*pair, rank.rank * most, rows)]

    with ranks_of(count) as ranks:
        for gathered, index, best in all_do(ranks, work):
            torch.testing.assert_close(gathered, whole, rtol=0, atol=0, equal_nan=True)
            expected = cpu.argmax(whole)
            assert torch.equal(index, expected[0])
            torch.testing.assert_close(best, expected[1], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 3, 40, 300]), min_size=2, max_size=4), st.booleans(), st.integers(0, 1 << 30))
def test_rows_of_experts_go_to_all_ranks_and_come_back(counts: list[int], bfloat16: bool, seed: int) -> None:
    """Of ranks with few rows, none, and more than a slot takes: each gets its own rows' sums in the order of ranks,
    with its own shared part; the same as a recorded step that is replayed with other numbers of rows."""
    if not any(counts):
        return
    g, width, k = torch.Generator().manual_seed(seed), 2001, 2
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    whole, ids = (
        torch.randn(sum(counts), width, generator=g).to(dtype),
        torch.randint(0, 9, (sum(counts), k), generator=g),
    )
    weights, shared, gate = (torch.randn(sum(counts), n, generator=g) for n in (k, width, 1))
    parts = [torch.randn(sum(counts), width, generator=g) for _ in counts]
    expected = summed(parts) + gate.sigmoid() * shared.to(dtype).float()
    most = max(counts) + 6

    def recorded(rank: SharedMemory) -> tuple[Program[list[torch.Tensor]], list[torch.Tensor], torch.Tensor]:
        given = [torch.zeros(most, width, dtype=dtype), torch.zeros(most, k, dtype=torch.int32), torch.zeros(most, k)]
        given += [torch.zeros(most, width, dtype=dtype), torch.zeros(most, 1), torch.zeros(most * len(counts), width)]
        x, chosen, by, shared, gate, parts = given
        rows = torch.full((len(counts),), most)

        def step() -> list[torch.Tensor]:
            return [*rank.gather_rows(x, chosen, by, rows, rank.rank), rank.sum_rows(parts, rows, x, shared, gate)]

        return record(step), given, rows

    def work(rank: SharedMemory) -> list[torch.Tensor]:
        own, rows = slice(sum(counts[: rank.rank]), sum(counts[: rank.rank + 1])), torch.tensor(counts)
        mine = [whole[own], ids[own].int(), weights[own], shared[own].to(dtype), gate[own]]
        mine = [torch.nn.functional.pad(tensor, (0, 0, 0, 5)) for tensor in mine]
        gathered = rank.gather_rows(*mine[:3], rows, rank.rank)
        padded = rank.sum_rows(parts[rank.rank], rows, mine[0], *mine[3:])
        total = padded[:-5]
        assert len(total) == own.stop - own.start and not padded[-5:].any()
        program, given, counted = programs[rank.rank]
        for ours, values in zip(given, (*mine, parts[rank.rank]), strict=True):
            ours[: len(values)] = values
        counted[:] = rows
        program.replay()
        again = [*(tensor[: sum(counts)] for tensor in program.outputs[:3]), program.outputs[3][: len(total)]]
        assert all(map(torch.equal, again, (*gathered, total)))
        return [*gathered, total]

    with ranks_of(len(counts)) as ranks:
        programs = [recorded(rank) for rank in ranks]
        found = all_do(ranks, work)
    for rank, (x, chosen, by, _) in enumerate(found):
        assert torch.equal(x, whole) and torch.equal(chosen, ids.int() - rank) and torch.equal(by, weights)
    total = torch.cat([one[3] for one in found])
    torch.testing.assert_close(
        total, expected.to(dtype), rtol=1e-2 if bfloat16 else 1e-5, atol=1e-2 if bfloat16 else 1e-5
    )


def test_the_smallest_of_every_ranks_numbers() -> None:
    with ranks_of(3) as ranks:
        found = all_do(ranks, lambda rank: rank.smallest([rank.rank, 1 << 40, -rank.rank]))
    assert found == [[0, 1 << 40, -2]] * 3


def test_exchanges_are_recorded_with_the_step() -> None:
    """For as many rows as a replay has, those that need several slots included."""
    big = 700  # rows of 4,000 bytes: more than a slot
    with ranks_of(2) as ranks:
        inputs = [torch.randn(big, 1000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

        def step(rank: SharedMemory) -> torch.Tensor:
            x = cpu.scale(inputs[rank.rank], 2.0)
            rank.all_reduce(x)
            return rank.all_gather(cpu.scale(x, 0.5), 2000)

        programs = [record(lambda rank=rank: step(rank)) for rank in ranks]
        for rows in (big, 1, 600):
            all_do(ranks, lambda rank, rows=rows: programs[rank.rank].replay(rows))
            total = inputs[0][:rows] + inputs[1][:rows]
            for program in programs:
                assert torch.equal(program.outputs[:rows], torch.cat([total, total], dim=1))


def test_turns_may_wrap() -> None:
    with ranks_of(2) as ranks:
        for rank in range(2):
            for own in ranks[:1]:
                own._memory[64 * (1 + rank) : 64 * (1 + rank) + 4] = (0xFFFFFFFE).to_bytes(4, "little")
        for turn in range(4):
            x = [torch.full((1, 8), float(turn + rank)) for rank in range(2)]
            all_do(ranks, lambda rank, x=x: rank.all_reduce(x[rank.rank]))
            assert torch.equal(x[0], torch.full((1, 8), 2.0 * turn + 1)) and torch.equal(x[0], x[1])


def test_a_rank_that_does_not_come_is_named() -> None:
    with ranks_of(3, timeout=0.3) as ranks:
        all_do(ranks[:2], lambda rank: rank.all_reduce(torch.ones(1, 8)))
        assert ranks[0].stopped == ranks[2].stopped == "a rank did not come"
        assert ranks[0].late == [2]
        started = time.monotonic()
        for _ in range(100):
            ranks[1].all_reduce(torch.ones(1, 8))
        assert time.monotonic() - started < 10, "nobody waits any more"


def test_waiting_ends_when_told_to_stop() -> None:
    with ranks_of(2, timeout=600) as ranks:
        timer = threading.Timer(0.3, ranks[1].stop)
        timer.start()
        ranks[0].all_reduce(torch.ones(1, 8))
        timer.join()
        assert ranks[0].stopped == "told to stop"


def test_a_rank_that_is_killed_stops_nobody_for_ever() -> None:
    """And what it leaves behind has no name."""
    descriptor = cpu.create_shared_memory(2, 1.0)
    code = f"""
import os, signal, threading, time, torch
from octavo_kernels.cpu import SharedMemory
rank = SharedMemory({descriptor}, 1, 2)
print("ready", flush=True)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
while True: rank.all_reduce(torch.ones(1, 8))
"""
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=(descriptor,), stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        mine = SharedMemory(descriptor, 0, 2)
        os.close(descriptor)
        while not mine.stopped:
            mine.all_reduce(torch.ones(1, 8))
        assert other.wait(90) == -9 and mine.late == [1]


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 48"):
        cpu.create_shared_memory(49)
    with ranks_of(1) as (rank,), pytest.raises(ValueError, match="contiguous"):
        rank.all_reduce(torch.ones(4, 4).t()[:, :2])


def test_rows_of_ids_that_a_table_does_not_hold_are_zero(isa: str) -> None:
    from octavo_kernels import packing, reference

    table, ids = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 99, 100, 139, 140])
    expected = torch.zeros(5, 70)
    expected[2:4] = table[[0, 39]]
    for module in (cpu, reference):
        assert torch.equal(module.embedding(ids, table, 100), expected)
        assert torch.equal(module.dense_embedding(ids, packing.pack_dense(table), torch.float32, 100), expected)
        packed = packing.pack_w8(table)
        rows = module.quantized_embedding(ids, packed, torch.float32, 100)
        assert not rows[[0, 1, 4]].any()
        assert torch.equal(rows[2:4], module.quantized_embedding(torch.tensor([0, 39]), packed, torch.float32))
