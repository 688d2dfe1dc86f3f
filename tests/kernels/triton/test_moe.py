"""Mixtures of experts in Triton: the choice, the sorting and the products, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo_kernels import Experts, ScaledWeight, StackedWeight, reference
from octavo_kernels import triton as backend
from octavo_kernels.packing import pack_group_weight
from octavo_kernels.triton import moe, moe_gemm

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
HIDDEN, INNER, EXPERTS = 136, 72, 5
ROUTES: list[dict[str, Any]] = [
    {},
    {"renormalise": True},
    {"kind": "sigmoid", "bias": True, "renormalise": True, "scale": 2.5},
    {"groups": (4, 2)},
    {"kind": "sigmoid", "groups": (4, 2), "bias": True, "renormalise": True},
    {"kind": "sigmoid", "groups": (24, 12)},
    {"renormalise": True, "expert_scale": True},
]
# Of the codes that GPUs keep: form, columns with one scale, zeros.
CODES = {
    "int4": ("int4", 64, True),
    "int4 rows": ("int4", 1 << 20, False),
    "int8": ("int8", 64, True),
    "mxfp4": ("e2m1", 32, False),
    "fp8": ("e4m3", 1 << 20, False),
}
SCALED = {
    "w8a8 int8": (torch.int8, 1),
    "w8a8 fp8": (torch.float8_e4m3fn, 1),
    "w8a8 fp8 blocks": (torch.float8_e4m3fn, 2),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that few rows are of every kind: one row alone, a tile, several tiles."""
    if backend.INTERPRETED:
        tiles = {1: moe_gemm.MoeConfig(16, 64, 64, 4, 1), 4: moe_gemm.MoeConfig(32, 128, 64, 4, 1)}
        tiles[1 << 30] = moe_gemm.MoeConfig(64, 64, 64, 4, 1)
        for table in ("CONFIGS", "SMALL_CONFIGS"):
            monkeypatch.setattr(moe_gemm, table, tiles)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stacked(kind: str, channels: int, width: int, device: str) -> Tensor | StackedWeight:
    """``channels`` of each expert, in the form ``kind``."""
    values = randn(EXPERTS * channels, width, seed=width) * width**-0.5
    if kind in SCALED:
        kept, blocks = SCALED[kind]
        blocks = blocks if blocks == 1 else -(-width // 128)
        numbers, scales = reference.quantize_tokens(values, kept, blocks)
        return StackedWeight(ScaledWeight(numbers.to(device), scales.t().contiguous().to(device)), EXPERTS)
    if kind not in CODES:
        return values.view(EXPERTS, channels, width).to(device, getattr(torch, kind))
    form, group, zeros = CODES[kind]
    groups = -(-width // min(group, width))
    g = torch.Generator().manual_seed(width)
    codes = torch.randint(0, 16 if form in ("int4", "e2m1") else 256, values.shape, generator=g, dtype=torch.uint8)
    if form == "e4m3":
        codes[codes % 128 == 127] = 1  # no NaN
    scales = torch.rand(len(values), groups, generator=g) / (64 if form == "int4" else 512)
    points = torch.randint(6, 10, scales.shape, generator=g, dtype=torch.uint8) if zeros else None
    points = points if points is None or form == "int4" else points + 120
    if form == "e2m1":
        scales = torch.randint(122, 125, scales.shape, generator=g, dtype=torch.uint8)
    return StackedWeight(pack_group_weight(codes, scales, points, form=form, group=group, device=device), EXPERTS)


def experts(kind: str, device: str, **how: Any) -> Experts:
    return Experts(stacked(kind, 2 * INNER, HIDDEN, device), stacked(kind, HIDDEN, INNER, device), **how)


def routes(rows: int, k: int, device: str, seed: int = 3) -> tuple[Tensor, Tensor]:
    ids, weights = reference.topk_route(randn(rows, EXPERTS, seed=seed), k, renormalise=True)
    return ids.to(device), weights.to(device)


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("k", [1, 7])
def test_routes_are_those_of_plain_torch(device, dtype, route, k):
    logits = (randn(8, 24) * 3).to(device, dtype)
    logits[3] = logits[4, 0]  # all equal
    logits[5, ::2] = logits[5, 0]
    bias = (torch.arange(24) % 3 / 8).to(device) if route.get("bias") else None  # exact, so that ties stay ties
    scales = torch.rand(24).to(device) if route.get("expert_scale") else None
    how = route | {"bias": bias, "expert_scale": scales}
    ids, weights = backend.topk_route(logits, k, **how)
    their_ids, their_weights = reference.topk_route(logits, k, **how)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, their_ids)
    assert torch.equal(backend.topk_route(logits, k, first=9, **how)[0], ids - 9)
    torch.testing.assert_close(weights, their_weights, atol=1e-6, rtol=1e-5)


def test_every_row_has_experts_that_exist(device):
    """Rows of padding may hold anything."""
    logits = randn(4, 6)
    logits[0], logits[1, 2], logits[2] = float("nan"), float("nan"), -float("inf")
    for kind in ("softmax", "sigmoid"):
        ids, weights = backend.topk_route(logits.to(device), 3, kind)
        assert ((ids >= 0) & (ids < 6)).all()
        assert all(len({*row}) == 3 for row in ids.tolist())
        assert weights[0].isnan().all()
        assert torch.equal(ids[3], reference.topk_route(logits[3:], 3, kind)[0][0].to(device))


# ---------------------------------------------------------------- sorting


@given(rows=st.integers(1, 60), k=st.integers(1, 5), tile=st.sampled_from([16, 64]), seed=st.integers(0, 99))
@settings(max_examples=12, **FIXTURES)
def test_every_choice_lies_once_in_a_tile_of_its_expert(device, rows, k, tile, seed):
    ids = torch.randint(0, EXPERTS + 1, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    if seed % 3 == 0:
        ids[:] = seed % EXPERTS  # all to one expert
    ids[ids == EXPERTS] = -1  # of another rank
    slots, tiles = (t.cpu() for t in moe.moe_sort(ids.to(device), EXPERTS, tile))
    slots = slots.view(-1, tile)
    assert len(slots) == len(tiles) <= rows * k
    used = -(-torch.bincount(ids[ids >= 0].flatten(), minlength=EXPERTS) // tile)
    assert tiles.tolist() == [e for e in range(EXPERTS) for _ in range(int(used[e]))] + [-1] * (len(tiles) - used.sum())
    for expert in range(EXPERTS):
        mine = slots[tiles == expert].flatten()
        assert mine[mine >= 0].tolist() == (ids.flatten() == expert).nonzero().flatten().tolist()
        assert (mine[len(mine[mine >= 0]) :] == -1).all()


def test_more_choices_than_are_looked_at_at_once(device, monkeypatch):
    monkeypatch.setattr(moe, "LANES", 16)
    ids = torch.randint(0, EXPERTS, (50, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32).to(device)
    mine = moe.moe_sort(ids, EXPERTS, 16)
    monkeypatch.undo()
    slots, tiles = moe.moe_sort(ids, EXPERTS, 16)
    used = int((tiles >= 0).sum())
    assert torch.equal(tiles, mine[1])
    assert torch.equal(slots[: used * 16], mine[0][: used * 16])


# ---------------------------------------------------------------- products


def check(device, assert_close, rows, k, kind, half, factor=2.0, shared=None, first=0, **how):
    held = experts(kind, device, **how)
    x = randn(rows, HIDDEN, seed=rows).to(device, half)
    ids, weights = routes(rows, k, device)
    ids = ids - first
    out = backend.fused_moe(x, ids, weights, held, *(shared or ()))
    exact = reference.fused_moe(x.double(), ids, weights, wide(held), *(shared or ()))
    plain = reference.fused_moe(x, ids, weights, held, *(shared or ()))
    assert out.dtype == half
    # Each expert's result is rounded to x's dtype before they are added.
    assert_close(out, exact, plain, factor, slack=2e-6 if half == torch.float32 else torch.finfo(half).eps)
    return x, ids, weights, held, out


def wide(held: Experts) -> Experts:
    """Plain weights in float64."""
    parts = [w.double() if isinstance(w, Tensor) else w for w in (held.gate_up, held.down)]
    return replace(held, gate_up=parts[0], down=parts[1])


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("rows, k", [(4, 5), (5, 1), (23, 2), (70, 3)])
def test_products_of_plain_weights(device, assert_close, dtype, rows, k):
    name = str(dtype).removeprefix("torch.")
    x, ids, weights, held, out = check(device, assert_close, rows, k, name, dtype)
    mine = slice(rows // 2, rows // 2 + 1)
    for others in (mine, slice(rows // 2, rows)):
        again = backend.fused_moe(x[others], ids[others], weights[others], held)
        assert torch.equal(again[:1], out[mine]), "a row's result depends on its company"


@pytest.mark.parametrize("rows", [2, 23])
def test_experts_of_other_ranks_are_left_out(device, assert_close, rows):
    for first in (2, 1 - EXPERTS):  # those before are others', and those behind
        check(device, assert_close, rows, 3, "float32", torch.float32, first=first)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"])
def test_activations_biases_and_what_is_shared(device, assert_close, dtype, activation):
    biases = {
        "gate_up_bias": randn(EXPERTS, 2 * INNER, seed=8).to(device),
        "down_bias": randn(EXPERTS, HIDDEN).to(device),
    }
    shared = (randn(9, HIDDEN, seed=4).to(device, dtype), randn(9, 1, seed=5).to(device))
    how = {"activation": activation, "weighs_input": activation in ("silu", "clamped_swiglu"), "limit": 1.0, **biases}
    name = str(dtype).removeprefix("torch.")
    check(device, assert_close, 9, 2, name, dtype, shared=shared, **how)
    if activation == "silu":
        check(device, assert_close, 9, 2, name, dtype, shared=shared[:1], **how)


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize("kind", [*CODES, *SCALED])
@pytest.mark.parametrize("half", [torch.bfloat16], ids=str)
def test_products_of_codes(device, assert_close, kind, half):
    """One choice a tile, and sorted."""
    for rows in (3, 14):
        x, ids, weights, held, out = check(device, assert_close, rows, 2, kind, half, 3.0)
        assert torch.equal(backend.fused_moe(x[2:3], ids[2:3], weights[2:3], held)[0], out[2])


def test_all_rows_to_one_expert_and_choices_of_other_ranks(device):
    held = experts("float32", device)
    x = randn(20, HIDDEN).to(device)
    ids, weights = torch.full((20, 2), 3, dtype=torch.int32, device=device), torch.rand(20, 2).to(device)
    ids[4:9, 1] = -1
    ids[7] = EXPERTS
    for rows in (slice(0, 20), slice(6, 9)):
        out = backend.fused_moe(x[rows], ids[rows], weights[rows], held)
        torch.testing.assert_close(
            out, reference.fused_moe(x[rows], ids[rows], weights[rows], held), atol=1e-5, rtol=1e-5
        )


def test_rows_in_pieces(device, monkeypatch):
    """Many rows are computed in pieces; the last may be a few."""
    held, x = experts("float32", device), randn(23, HIDDEN).to(device)
    (ids, weights), shared = routes(23, 2, device), randn(23, HIDDEN, seed=2).to(device)
    gate = randn(23, 1).to(device)
    whole = backend.fused_moe(x, ids, weights, held, shared, gate)
    monkeypatch.setattr(moe, "MAX_ROWS", 10)
    assert torch.equal(backend.fused_moe(x, ids, weights, held, shared, gate), whole)


@pytest.mark.parametrize("count, k", [(8, 2), (128, 8), (256, 8), (16, 1)])
def test_every_launch_is_known_before_serving(count, k, any_gpu):
    held = Experts(torch.empty(count, 2, 1, device="meta"), torch.empty(count, 1, 2, device="meta"))
    for dtype in (torch.bfloat16, torch.float32):
        known = {
            moe._config(rows, k, held, torch.empty(1, dtype=dtype, device="meta"))
            for rows in backend.moe_row_counts(held, k)
        }
        assert known == {
            moe._config(rows, k, held, torch.empty(1, dtype=dtype, device="meta"))
            for rows in range(1, moe.MAX_ROWS + 1)
        }
