"""Low-rank adapters of each row, against plain torch: unlike ranks, parts, layers that an adapter leaves alone."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.emulated_kernels import ARM64

from octavo_kernels import AdapterTable, cpu, reference
from octavo_kernels.cpu import record

DTYPES = [torch.float32, torch.bfloat16]
SLOTS = [2, -1, 0, 1, 0, 3, -1, 2, 2]
RANKS = [3, 8, 5, 0]


@pytest.fixture(autouse=True)
def _tables_of_addresses(request):
    if request.node.callspec.params.get("isa", "").startswith(ARM64):
        pytest.skip("the emulator translates addresses that operations are given, not those in a table")


def make_table(width: int, sizes: list[int], dtype: torch.dtype) -> AdapterTable:
    table = AdapterTable(len(RANKS), max(RANKS), sizes, dtype)
    for slot, rank in enumerate(RANKS):
        if rank:
            a, b = torch.randn(len(sizes) * rank, width) / width**0.5, torch.randn(rank, sum(sizes))
            table.set(slot, a.to(dtype), b.to(dtype))
    return table


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width, sizes", [(9, 37, [5]), (9, 64, [40, 7, 300]), (61, 16, [70, 70])])
def test_rows_get_what_their_adapter_adds(isa, assert_close, rows, width, sizes, dtype, weight_dtype):
    torch.manual_seed(rows)
    slots = torch.tensor((SLOTS * rows)[:rows], dtype=torch.int32)
    x, base = torch.randn(rows, width).to(dtype), torch.randn(rows, sum(sizes) + 3).to(dtype)[:, : sum(sizes)]
    table = make_table(width, sizes, weight_dtype)
    found, plain, exact = base.clone(), base.clone(), base.double()
    cpu.lora_expand_(found, cpu.lora_shrink(x, table, slots), table, slots)
    reference.lora_expand_(plain, reference.lora_shrink(x, table, slots), table, slots)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and RANKS[slot]:
            a, b = table.a[slot].double().view(len(sizes), RANKS[slot], width), table.b[slot].double().split(sizes, 1)
            exact[row] += torch.cat([x[row].double() @ one.T @ other for one, other in zip(a, b, strict=True)])
    assert_close(found, exact, plain, slack=2e-6)
    alone = torch.tensor([slot < 0 or not RANKS[slot] for slot in slots.tolist()])
    assert torch.equal(found[alone], base[alone]) and not torch.equal(found[~alone], base[~alone])
    for row in (0, 3, rows - 1):  # the same bits alone
        one, slot = base[row : row + 1].clone(), slots[row : row + 1]
        cpu.lora_expand_(one, cpu.lora_shrink(x[row : row + 1], table, slot), table, slot)
        assert torch.equal(one[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_take_columns_of_what_the_rank_holds(isa, dtype):
    torch.manual_seed(0)
    table, slots = AdapterTable(len(RANKS), max(RANKS), [33], dtype), torch.tensor(SLOTS, dtype=torch.int32)
    for slot, rank in enumerate(RANKS):
        if rank:
            table.set(slot, torch.randn(20, rank).to(dtype), torch.randn(rank, 33).to(dtype))
    ids = torch.tensor([10, 11, 12, 29, 30, 5, 6, 9, 28])
    found, plain = torch.zeros(9, 33), torch.zeros(9, 33)
    cpu.lora_expand_(found, cpu.lora_gather(ids, table, slots, 10, 20), table, slots)
    reference.lora_expand_(plain, reference.lora_gather(ids, table, slots, 10, 20), table, slots)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert [bool(row.any()) for row in found] == [True, False, True, True, False, False, False, False, True]


def test_a_recorded_step_follows_slots_that_change(isa):
    if isa == "torch":
        pytest.skip("nothing is recorded without a library")
    torch.manual_seed(0)
    x, y, slots = torch.randn(12, 32), torch.randn(12, 48), torch.full((12,), -1, dtype=torch.int32)
    table = make_table(32, [16, 32], torch.float32)

    def step() -> torch.Tensor:
        out = cpu.add(y, y)
        cpu.lora_expand_(out, cpu.lora_shrink(x, table, slots), table, slots)
        return out

    program = record(step)
    program.replay(7)
    assert torch.equal(program.outputs[:7], (y + y)[:7])
    slots[:9] = torch.tensor(SLOTS, dtype=torch.int32)
    table.set(2, None, None)
    program.replay(9)
    expected = y + y
    cpu.lora_expand_(expected, cpu.lora_shrink(x, table, slots), table, slots)
    assert torch.equal(program.outputs[:9], expected[:9])


def test_numbers_of_items_outlive_the_operations_that_have_them(isa):
    """A thread that comes late to an operation still reads them."""
    if isa == "torch":
        pytest.skip("nothing is recorded without a library")
    x, slots = torch.randn(12, 32), torch.tensor([1] * 12, dtype=torch.int32)
    table = make_table(32, [32], torch.float32)

    def step() -> torch.Tensor:
        y, tiles = cpu.add(x, x), cpu.lora_tiles(slots, len(RANKS))
        cpu.lora_expand_(y, cpu.lora_shrink(x, table, slots, tiles), table, slots, tiles)
        for _ in range(4):
            y = cpu.add(y, y)
        return y

    program = record(step)
    program.replay(9)
    at = program._words.tolist().index(46) + 2  # lora_tiles
    held = (ctypes.c_int32 * 7).from_address(int(program._words[at + 2]))
    assert list(held) == [2, 1, 0, 8, 1, 8, 1]
