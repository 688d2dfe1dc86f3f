"""The choice of experts and their products: those of the reference, and a row's own bits in any company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import emulated_amx
from torch import Tensor

import octavo_kernels
from octavo_kernels import reference
from octavo_kernels.cpu import Program, compiler, record
from octavo_kernels.moe import Experts, ExpertTable, expert_table
from octavo_kernels.packing import KINDS, pack_codes, pack_dense, pack_w8
from octavo_kernels.quant import GROUP, PackedLinear, num_groups

# Without the emulator of Arm: it translates addresses that operations are given, not those in a table of experts.
ISAS = [*compiler.supported_isas(), *emulated_amx.names()]
pytestmark = [
    pytest.mark.parametrize("isa", ISAS, indirect=True),
    pytest.mark.usefixtures("isa"),
    pytest.mark.sampled(strength=2),
]

HIDDEN, INNER, EXPERTS = 80, 44, 5
FORMS = ["float32", "bfloat16", "float16", "int8", "int8-two-terms"]
CODES = {str(kind): kind for kind in KINDS if kind.bits < 8}


def random_codes(form: str, shape: tuple[int, int], generator: torch.Generator) -> PackedLinear:
    """A weight of numbers of about ``columns**-0.5``."""
    kind, (channels, width) = CODES[form], shape
    groups = num_groups(width)
    sizes = (channels, groups, 2) if kind.halves else (channels, groups)
    codes = torch.randint(0, 1 << kind.bits, (channels, groups, GROUP), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(sizes, generator=generator) + 0.5) * (3 / width) ** 0.5 / (1 << (kind.bits - 1))
    minima = -scales * kind.zero if kind.affine else None
    table = list(range(-8, 8)) if kind.table else None
    packed = pack_codes(codes, scales, minima, bits=kind.bits, table=table)
    return replace(packed, width=width)


def experts(form: str, count: int = EXPERTS, **settings: Any) -> Experts:
    generator = torch.Generator().manual_seed(7)

    def table(*shapes: tuple[int, int]) -> ExpertTable:
        parts = []
        for rows, columns in shapes:
            if form in CODES:
                parts.append([random_codes(form, (rows, columns), generator) for _ in range(count)])
                continue
            values = [torch.randn(rows, columns, generator=generator) * columns**-0.5 for _ in range(count)]
            if form.startswith("int8"):
                parts.append([pack_w8(value, activation_terms=2 if "two" in form else 1) for value in values])
            else:
                parts.append([pack_dense(value.to(getattr(torch, form))) for value in values])
        return expert_table(parts)

    return Experts(table((INNER, HIDDEN), (INNER, HIDDEN)), table((HIDDEN, INNER)), **settings)


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def routes(count: int, k: int = 2, among: int = EXPERTS) -> tuple[Tensor, Tensor]:
    logits = torch.randn(count, among, generator=torch.Generator().manual_seed(3))
    return octavo_kernels.topk_route(logits, k, renormalise=True)


ROUTES: list[dict[str, Any]] = [
    {},
    {"renormalise": True},
    {"kind": "sigmoid"},
    {"groups": (4, 2)},
    {"kind": "sigmoid", "bias": True, "renormalise": True, "scale": 2.5},
    {"kind": "sigmoid", "groups": (4, 2), "bias": True, "renormalise": True},
    {"renormalise": True, "expert_scale": True},
]


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_routes_are_those_of_the_reference(route: dict[str, Any]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(50, 24) * 3
    settings = route | {name: torch.rand(24) if route.get(name) else None for name in ("bias", "expert_scale")}
    for k in (1, 4, 12):
        ids, weights = octavo_kernels.topk_route(logits, k, **settings)
        their_ids, their_weights = reference.topk_route(logits, k, **settings)
        assert torch.equal(ids, their_ids) and ids.dtype == torch.int32
        torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=1e-6)
        assert torch.equal(octavo_kernels.topk_route(logits, k, first=9, **settings)[0], ids - 9)
        for row in (0, 17):  # in any company
            alone = octavo_kernels.topk_route(logits[row : row + 1], k, **settings)
            assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])


@pytest.mark.parametrize("backend", [octavo_kernels, reference])
def test_the_lowest_of_equal_experts_is_chosen(backend: Any) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]])
    for settings in ({}, {"kind": "sigmoid"}, {"groups": (3, 3)}, {"bias": torch.zeros(6)}):
        assert backend.topk_route(logits, 4, **settings)[0].tolist() == [[1, 2, 4, 0]]
    assert backend.topk_route(torch.zeros(2, 6), 3, groups=(3, 2))[0].tolist() == [[0, 1, 2]] * 2
    large = torch.full((1, 4), 200.0) + torch.tensor([[0.0, 1.0, 2.0, 3.0]])  # whose sigmoids are all 1
    assert backend.topk_route(large, 1, kind="sigmoid")[0].tolist() == [[3]]


def test_rows_of_nan_choose_experts_that_are_there() -> None:
    logits = torch.randn(3, 6)
    logits[1] = torch.nan
    for settings in ({}, {"kind": "sigmoid", "groups": (3, 1)}):
        ids, weights = octavo_kernels.topk_route(logits, 2, **settings)
        assert int(ids.min()) >= 0 and int(ids.max()) < 6 and weights[1].isnan().all()
        assert len(set(ids[1].tolist())) == 2 and weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("k", "settings", "said"),
    [
        (0, {}, "k: 0"),
        (7, {}, "k: 7"),
        (4, {"groups": (3, 1)}, "k: 4"),
        (1, {"groups": (4, 2)}, "groups"),
        (1, {"kind": "best"}, "kind"),
    ],
)
@pytest.mark.parametrize("backend", [octavo_kernels, reference])
def test_routes_that_cannot_be_are_refused(k: int, settings: dict[str, Any], said: str, backend: Any) -> None:
    with pytest.raises(ValueError, match=said):
        backend.topk_route(torch.zeros(2, 6), k, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [*FORMS, *CODES])
def test_results_are_those_of_the_reference_in_any_company(form: str, dtype: torch.dtype) -> None:
    held, x, (ids, weights) = experts(form), rows(40, dtype), routes(40)
    ours = octavo_kernels.fused_moe(x, ids, weights, held)
    expected = reference.fused_moe(x, ids, weights, held)
    # A code of an activation that is rounded the other way moves a result by some thousandths.
    near = 3e-2 if dtype == torch.bfloat16 else 5e-3 if form.startswith("int8") or form in CODES else 1e-5
    assert ours.dtype == dtype and (ours - expected).abs().max() < near
    for some in (slice(0, 1), slice(5, 6), slice(3, 20)):
        assert torch.equal(octavo_kernels.fused_moe(x[some], ids[some], weights[some], held), ours[some])


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "gelu_tanh"},
        {"activation": "clamped_swiglu", "limit": 0.5},
        {"weighs_input": True},
        {"biases": True},
    ],
    ids=str,
)
def test_activations_biases_and_weights_of_inputs(form: str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    if settings.pop("biases", False):
        settings = {"gate_up_bias": torch.randn(EXPERTS, 2 * INNER), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    held, x, (ids, weights) = experts(form, **settings), rows(9), routes(9)
    shared, gate = rows(9) * 2, torch.randn(9, 1)
    for more in ((), (shared,), (shared, gate)):
        ours = octavo_kernels.fused_moe(x, ids, weights, held, *more)
        torch.testing.assert_close(
            ours, reference.fused_moe(x, ids, weights, held, *more), rtol=0, atol=1e-5 if form == "float32" else 1e-2
        )


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int8-two-terms", *list(CODES)[:1]])
def test_ups_without_gates_are_multiplied_once(form: str) -> None:
    """The bits are those of gates that are a copy of the ups."""
    plain, x, (ids, weights) = experts(form, activation="relu"), rows(40), routes(40)
    gates, ups = plain.gate_up.parts  # type: ignore[union-attr]
    copies = [replace(up, parts=tuple(replace(part, data=part.data.clone()) for part in up.parts)) for up in ups]
    found, twice = (replace(plain, gate_up=expert_table([some, ups])) for some in (ups, copies))
    ours = octavo_kernels.fused_moe(x, ids, weights, found)
    assert torch.equal(ours, octavo_kernels.fused_moe(x, ids, weights, twice))
    expected = reference.fused_moe(x, ids, weights, found)
    assert (ours - expected).abs().max() < (1e-5 if form in ("float32", "bfloat16") else 5e-3)
    assert not torch.equal(
        ours, octavo_kernels.fused_moe(x, ids, weights, replace(found, gate_up=expert_table([gates, ups])))
    )


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_all_rows_to_one_expert_one_row_and_one_expert(form: str) -> None:
    held = experts(form)
    x, weights = rows(33), torch.ones(33, 1)
    together = octavo_kernels.fused_moe(x, torch.full((33, 1), 3, dtype=torch.int32), weights, held)
    for row in (0, 32):
        ids = torch.tensor([[3, 0]], dtype=torch.int32)
        alone = octavo_kernels.fused_moe(x[row : row + 1], ids, torch.tensor([[1.0, 0.0]]), held)
        assert torch.equal(alone[0], together[row])
    only = experts(form, 1)
    ids, weights = routes(4, 1, 1)
    assert ids.tolist() == [[0]] * 4 and weights.tolist() == [[1.0]] * 4
    theirs = reference.fused_moe(x[:4], ids, weights, only)
    torch.testing.assert_close(octavo_kernels.fused_moe(x[:4], ids, weights, only), theirs, rtol=0, atol=5e-3)
    assert octavo_kernels.fused_moe(x[:0], ids[:0], weights[:0], only).shape == (0, HIDDEN)


@pytest.mark.parametrize("form", FORMS)
def test_experts_of_other_ranks_are_left_out(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What parts of the experts give adds up to what all give, whatever lies in memory that nobody has written."""
    held, logits = experts(form), torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(3))
    x, empty, groups = rows(40, torch.bfloat16), torch.empty, (range(2), range(2, EXPERTS))
    whole = octavo_kernels.fused_moe(x, *octavo_kernels.topk_route(logits, 2), held, out_dtype=torch.float32)
    assert torch.equal(octavo_kernels.fused_moe(x, *octavo_kernels.topk_route(logits, 2), held), whole.bfloat16())

    def poisoned(*args: Any, **how: Any) -> Tensor:
        made = empty(*args, **how)
        return made.fill_(torch.nan if made.is_floating_point() else 0 if made.dtype == torch.uint8 else 1 << 30)

    monkeypatch.setattr(torch, "empty", poisoned)
    total = torch.zeros_like(whole)
    for mine in groups:
        tables = [expert_table([part[mine.start : mine.stop] for part in w.parts]) for w in (held.gate_up, held.down)]
        own = replace(held, gate_up=tables[0], down=tables[1])
        ids, weights = octavo_kernels.topk_route(logits, 2, first=mine.start)
        part = octavo_kernels.fused_moe(x, ids, weights, own, out_dtype=torch.float32)
        near = 5e-3 if form.startswith("int8") else 3e-2
        torch.testing.assert_close(
            part, reference.fused_moe(x, ids, weights, own, out_dtype=torch.float32), rtol=0, atol=near
        )
        none = ((ids < 0) | (ids >= len(mine))).all(1)
        assert none.any() and not part[none].any()
        for some in (slice(0, 1), slice(3, 20)):
            alone = octavo_kernels.fused_moe(x[some], ids[some], weights[some], own, out_dtype=torch.float32)
            assert torch.equal(alone, part[some])
        total += part
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_a_recorded_step_reads_the_choice_when_it_runs(form: str) -> None:
    held, logits, x = experts(form), torch.zeros(12, EXPERTS), rows(12)

    def step() -> Tensor:
        ids, weights = octavo_kernels.topk_route(logits, 2, renormalise=True)
        return octavo_kernels.fused_moe(x, ids, weights, held)

    program: Program[Tensor] = record(step)
    for count in (12, 5, 1):
        logits.copy_(torch.randn(12, EXPERTS))
        program.replay(count)
        assert torch.equal(program.outputs[:count], step()[:count])


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_threads_that_come_late_find_no_work(form: str) -> None:
    """By the time that they look for it, the memory of the choices may hold something else."""
    held, weight, x = experts(form), torch.randn(EXPERTS, HIDDEN), rows(6)
    router = pack_dense(weight)

    def step() -> Tensor:
        out = x
        for _ in range(12):
            ids, weights = octavo_kernels.topk_route(octavo_kernels.dense_linear(out, router), 2, renormalise=True)
            out = octavo_kernels.fused_moe(out, ids, weights, held)
        return out

    expected, program = step(), record(step)
    for _ in range(40):
        program.replay(6, threads=8)
        assert torch.equal(program.outputs, expected)


def test_a_row_s_values_hurt_no_other() -> None:
    held, x, (ids, weights) = experts("int8"), rows(6), routes(6)
    fine = octavo_kernels.fused_moe(x, ids, weights, held)
    x[2] = torch.nan
    ours = octavo_kernels.fused_moe(x, ids, weights, held)
    others = [0, 1, 3, 4, 5]
    assert ours[2].isnan().all() and torch.equal(ours[others], fine[others])


def test_experts_of_unlike_forms_are_refused() -> None:
    one, other = pack_dense(torch.zeros(4, 6)), pack_dense(torch.zeros(4, 6, dtype=torch.bfloat16))
    for parts in ([[one, other]], [[one], [pack_w8(torch.zeros(4, 6))]], [[one, pack_dense(torch.zeros(5, 6))]]):
        with pytest.raises(ValueError, match="every expert"):
            expert_table(parts)
