"""Weights in groups: packing, and the Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder

from octavo_kernels import GroupWeight, reference
from octavo_kernels import triton as backend
from octavo_kernels.group_weight import FORMS, unpack_codes
from octavo_kernels.packing import pack_group_weight
from octavo_kernels.triton import group_weight

# Form, [N, K], group, zeros, act order: groups of whole blocks, of parts of them, of whole rows; odd sizes; MXFP4 with
# its exponents, NVFP4's groups of 16, weights in FP8.
KINDS = {
    "awq": ("int4", (70, 200), 128, True, False),
    "gptq g32 desc_act": ("int4", (130, 256), 32, False, True),
    "g64": ("int4", (64, 192), 64, True, False),
    "of 256 columns": ("int4", (128, 256), 128, True, False),
    "rows": ("int4", (64, 160), 160, True, False),
    "8 bits": ("int8", (64, 192), 64, True, False),
    "8 bits, rows": ("int8", (65, 130), 130, False, False),
    "mxfp4": ("e2m1", (70, 160), 32, False, False),
    "nvfp4": ("e2m1", (64, 128), 16, False, False),
    "fp8": ("e4m3", (70, 130), 130, False, False),
}


def make(kind: str, device: str = "cpu") -> GroupWeight:
    form, (n, k), group, zeros, order = KINDS[kind]
    g, groups = torch.Generator().manual_seed(len(kind)), -(-k // group)
    codes = torch.randint(0, 1 << FORMS[form], (n, k), generator=g, dtype=torch.uint8)
    if form == "e4m3":
        codes[codes % 128 == 127] = 1  # no NaN
    scales = torch.rand(n, groups, generator=g).half() / 16
    if kind == "mxfp4":
        scales = torch.randint(0, 255, (n, groups), generator=g, dtype=torch.uint8)
        scales = torch.where(scales < 200, scales % 8 + 120, scales % 4)  # the smallest are below float32's normal ones
    points = torch.randint(0, 1 << FORMS[form], (n, groups), generator=g, dtype=torch.uint8) if zeros else None
    moved = torch.randperm(k, generator=g) if order else None
    packed = pack_group_weight(codes, scales, points, moved, form=form, group=group, device=device)
    assert torch.equal(unpack_codes(packed).cpu(), codes)
    return packed


@given(n=st.integers(1, 200), k=st.integers(1, 300), form=st.sampled_from(sorted(FORMS)))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
def test_packing_keeps_every_code(n, k, form):
    codes = torch.randint(0, 1 << FORMS[form], (n, k), dtype=torch.uint8)
    packed = pack_group_weight(codes, torch.ones(n, 1), form=form, group=k)
    assert torch.equal(unpack_codes(packed), codes)
    assert packed.codes.nbytes == -(-n // 64) * -(-k // packed.block) * 4096, "4 KB for 64 channels of a block"


def test_a_thread_loads_the_columns_that_it_multiplies():
    """16 bytes of one channel hold columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16: thread t of four has them."""
    for form in ("int4", "int8"):
        block = 512 // FORMS[form]
        for thread in range(4):
            mine = torch.arange(block) // 2 % 4 == thread
            packed = pack_group_weight(mine.to(torch.uint8)[None], torch.ones(1, 1), form=form, group=block)
            expected = [
                0x11111111 if form == "int4" else 0x01010101 if word // 4 == thread else 0 for word in range(16)
            ]
            if form == "int4":
                expected = [value if word // 4 == thread else 0 for word, value in enumerate(expected)]
            assert packed.codes[0, 0, 0].tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dequantised_bit_by_bit(kind, out, device):
    weight = make(kind, device)
    assert torch.equal(backend.group_dequantize(weight, out), reference.group_dequantize(weight, out))


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, half", [(3, torch.bfloat16), (20, torch.float16), (65, torch.bfloat16)], ids=str)
def test_products(kind, rows, half, device):
    """Few rows, more and many: beside the rounding of the result within 5e-4 of the product in float64, with the exact
    weight or with the one that is rounded to 16 bits."""
    weight = make(kind, device)
    x = torch.randn(rows, weight.width, generator=torch.Generator().manual_seed(rows)).to(device, half)
    bias = torch.randn(weight.channels, generator=torch.Generator().manual_seed(7)).to(device, half)
    values = [reference.group_dequantize(weight, dtype).double() for dtype in (torch.float32, half)]
    exact = [torch.nn.functional.linear(x.double(), value, bias.double()) for value in values]
    for config, splits in (
        (group_weight.tile_config(group_weight.CONFIGS, rows, weight.channels), 1),
        (group_weight.CONFIGS[16], 2),
    ):
        ordered = x if weight.order is None else x[:, weight.order]
        ours = group_weight.launch(ordered, weight, bias, config, splits)
        assert ours.dtype == half
        rounding = torch.finfo(half).eps / 2
        errors = [((ours.double() - e).abs() - rounding * e.abs()).max().item() / e.abs().max().item() for e in exact]
        assert min(errors) <= 5e-4, (errors, config, splits)
        if config.rows > 16:
            assert torch.equal(backend.group_linear(x, weight, bias), ours), "the dispatch chooses this launch"


def test_a_row_does_not_depend_on_its_company(device):
    """Nor a result on the order in which parts of K are done, nor on what an earlier call has left in the counters."""
    weight = make("awq", device)
    x = torch.randn(16, weight.width).half().to(device)
    config = group_weight.CONFIGS[16]
    first, second = (group_weight.launch(x, weight, None, config, 2) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(group_weight.launch(x[3:4], weight, None, config, 2), first[3:4])


@pytest.mark.skipif(not backend.INTERPRETED, reason="counts in Triton's interpreter: TRITON_INTERPRET=1")
@pytest.mark.parametrize("rows, splits", [(5, 1), (5, 2), (100, 1)])
def test_every_code_and_scale_is_read_once(device, monkeypatch, rows, splits):
    """Whatever the split: for one tile of rows, the bytes that are loaded are those of the codes, scales and zeros."""
    weight = make("of 256 columns", device)
    read = dict.fromkeys(weight.tensors, 0)
    plain = InterpreterBuilder.create_masked_load

    def noted(self, pointers, mask, *rest):
        for name, tensor in weight.tensors.items():
            start = tensor.data_ptr()
            inside = (pointers.data >= start) & (pointers.data < start + tensor.nbytes) & mask.data
            read[name] += int(inside.sum()) * tensor.element_size()
        return plain(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted)
    x = torch.randn(rows, weight.width).half().to(device)
    group_weight.launch(x, weight, None, group_weight.tile_config(group_weight.CONFIGS, rows, weight.channels), splits)
    assert read == {name: tensor.nbytes for name, tensor in weight.tensors.items()}


def test_many_rows_and_float32_are_dequantised(device, monkeypatch):
    weight = make("g64", device)
    monkeypatch.setattr(group_weight, "DEQUANTIZE_ROWS", 4)
    for x in (torch.randn(4, weight.width).half(), torch.randn(3, weight.width)):
        exact = reference.group_linear(x.double().to(device), weight)
        ours = backend.group_linear(x.to(device), weight)
        torch.testing.assert_close(ours.double(), exact, atol=2e-3 * exact.abs().max().item(), rtol=0)


@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 14336), (1000, 1088)])
def test_every_launch_is_known_before_serving(n, k, any_gpu):
    """`group_row_counts` names each pair of tile and parts that a number of rows below the limit leads to."""
    codes = torch.empty(-(-n // 64), -(-k // 128), 64, 16, dtype=torch.int32, device="meta")
    weight = GroupWeight(codes, codes, None, None, "int4", n, k, 128)

    def launch(rows):
        config = group_weight.tile_config(group_weight.configs_for(weight), rows, n)
        return config, group_weight._splits(config, rows, weight)

    counts = group_weight.group_row_counts(weight)
    assert counts[-1] == group_weight.DEQUANTIZE_ROWS
    assert {launch(rows) for rows in counts[:-1]} == {launch(rows) for rows in range(1, group_weight.DEQUANTIZE_ROWS)}
    assert len(counts) <= 12


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"form": "int5"}, "form: 'int5' is not known"),
        ({"group": 48}, "groups of 48 columns have no kernel"),
        ({"scales": torch.ones(3, 1)}, r"scales: shape \[3, 1\]"),
        ({"form": "e2m1", "zeros": torch.ones(2, 2, dtype=torch.uint8)}, "zeros: the form 'e2m1' has none"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_packed_are_refused(change, problem):
    arguments = {
        "codes": torch.zeros(2, 256, dtype=torch.uint8),
        "scales": torch.ones(2, 2),
        "form": "int4",
        "group": 128,
    }
    with pytest.raises(ValueError, match=problem):
        pack_group_weight(**arguments | change)
