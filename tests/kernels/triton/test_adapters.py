"""Low-rank adapters in Triton, against plain torch: unlike ranks and parts, rows sorted and gathered, rows of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo_kernels import SlotMemory, SlotTable, reference
from octavo_kernels import triton as backend
from octavo_kernels.triton import lora

RANK = 11  # the highest
Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """So that few columns are cut in parts."""
    if backend.INTERPRETED:
        monkeypatch.setattr(lora, "SPLIT_COLUMNS", 64)
        monkeypatch.setattr(lora, "BLOCK_N", 32)


def adapter(rank: int, parts: int, inputs: int, outputs: int, seed: int) -> Pair:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(parts * rank, inputs, generator=g) / inputs**0.5
    return a, torch.randn(rank, outputs, generator=g) / rank**0.5


def in_slots(
    layers: list[tuple[list[int], int]], ranks: list[list[int]], dtype: torch.dtype, device: str
) -> tuple[list[SlotTable], list[list[Pair | None]]]:
    """Tables of ``layers`` (sizes, inputs) with adapters of ``ranks`` by slot and layer, and these."""
    memory = SlotMemory(len(ranks), RANK, dtype)
    tables = [memory.add(*layer) for layer in layers]
    memory.allocate(torch.device(device))
    found = []
    for slot, of_layers in enumerate(ranks):
        memory.fill(slot, memory.image([None] * len(layers)))  # as if another had been there
        matrices = [
            adapter(rank, len(sizes), inputs, sum(sizes), 10 * slot + i) if rank else None
            for i, (rank, (sizes, inputs)) in enumerate(zip(of_layers, layers, strict=True))
        ]
        held = [pair and (pair[0].to(dtype), pair[1].to(dtype)) for pair in matrices]
        memory.fill(slot, memory.image(held))
        found.append(held)
    return tables, found


def exact(x: Tensor, y: Tensor, slots: list[int], held: list[Pair | None], sizes: list[int]) -> Tensor:
    y = y.double().cpu()
    for row, slot in enumerate(slots):
        pair = held[slot] if slot >= 0 else None
        if pair is not None:
            a, b = pair[0].double().unflatten(0, (len(sizes), -1)), pair[1].double().split(sizes, 1)
            y[row] += torch.cat([x[row].double().cpu() @ one.T @ other for one, other in zip(a, b, strict=True)])
    return y


def added(x: Tensor, y: Tensor, table: SlotTable, slots: Tensor, module: Any = backend) -> Tensor:
    y = y.clone()
    tiles = module.lora_tiles(slots, len(table.ranks))
    module.lora_expand_(y, module.lora_shrink(x, table, slots, tiles), table, slots, tiles)
    return y


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_row_gets_what_its_adapter_adds(device, dtype, data):
    """In any step: the values of plain torch, the bits that the row has alone, and none where there is no adapter."""
    sizes = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    inputs = data.draw(st.sampled_from([16, 37, 200]))
    ranks = data.draw(st.lists(st.lists(st.integers(0, RANK), min_size=2, max_size=2), min_size=1, max_size=4))
    which = data.draw(st.lists(st.integers(-1, len(ranks) - 1), min_size=1, max_size=40))
    (_, table), pairs = in_slots([([8], 8), (sizes, inputs)], ranks, dtype, device)
    held = [one[1] for one in pairs]
    g = torch.Generator().manual_seed(len(which))
    x = torch.randn(len(which), inputs + 3, generator=g).to(device, dtype)[:, :inputs]
    y = torch.randn(len(which), sum(sizes) + 5, generator=g).to(device, dtype)[:, : sum(sizes)]
    slots = torch.tensor(which, dtype=torch.int32, device=device)
    found = added(x, y, table, slots)
    torch.testing.assert_close(
        found.double().cpu(),
        exact(x, y, which, held, sizes),
        atol=4e-3 if dtype != torch.float32 else 2e-5,
        rtol=1e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 2e-5,
    )
    untouched = torch.tensor([slot < 0 or held[slot] is None for slot in which])
    assert torch.equal(found[untouched], y[untouched])
    for row in {0, len(which) // 2, len(which) - 1}:
        alone = slice(row, row + 1)
        assert torch.equal(added(x[alone], y[alone], table, slots[alone])[0], found[row])


def test_parts_of_sums_in_float32_and_matrices_of_half_the_bits(device):
    """Row-parallel layers of several ranks leave float32; the same memory serves plain torch."""
    (table,), pairs = in_slots([([48], 96)], [[5], [RANK]], torch.bfloat16, device)
    which = [1, 0, -1, 1] * 5
    slots = torch.tensor(which, dtype=torch.int32, device=device)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 96, generator=g).bfloat16().to(device), torch.randn(20, 48, generator=g).to(device)
    wanted = exact(x, y, which, [one[0] for one in pairs], [48])
    for module in (backend, reference):
        torch.testing.assert_close(added(x, y, table, slots, module).double().cpu(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [9, 36])
def test_embeddings_take_columns_of_what_the_rank_holds(device, dtype, rows):
    memory = SlotMemory(3, RANK, dtype)
    memory.add([7], 5)
    table = memory.add([33], 20, is_embedding=True)
    memory.allocate(torch.device(device))
    g = torch.Generator().manual_seed(0)
    held: list[Pair | None] = [None]
    for slot, rank in ((1, 4), (2, RANK)):
        pair = torch.randn(20, rank, generator=g).to(dtype), torch.randn(rank, 33, generator=g).to(dtype)
        memory.fill(slot, memory.image([None, pair]))
        held.append(pair)
    which = ([1, 2, -1, 0, 1, 2, 1, 2, 2] * 4)[:rows]
    ids = torch.tensor(([10, 11, 12, 29, 30, 5, 29, 9, 28] * 4)[:rows], device=device)
    slots = torch.tensor(which, dtype=torch.int32, device=device)
    y = torch.zeros(rows, 33, device=device)
    tiles = backend.lora_tiles(slots, 3)
    backend.lora_expand_(y, backend.lora_gather(ids, table, slots, 10, 20), table, slots, tiles)
    for row, (slot, id) in enumerate(zip(which, ids.tolist(), strict=True)):
        pair = held[slot] if slot >= 0 else None
        wanted = torch.zeros(33) if pair is None or not 10 <= id < 30 else pair[0][id - 10].float() @ pair[1].float()
        torch.testing.assert_close(y[row].cpu(), wanted, atol=1e-4, rtol=1e-4)


def test_parts_of_k_are_the_same_for_any_number_of_rows():
    assert {lora.num_splits(4096, width) for width in (16, 48)} == {8}
    assert [lora.num_splits(*one) for one in ((64, 16), (4096, 512), (14336, 128))] == [1, 1, 4]
