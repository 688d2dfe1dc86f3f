"""Attention without a cache: right against plain torch in float64, and bit-equal in any company."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from support.emulated_kernels import all_parameters

from octavo_kernels import cpu, reference

C_ISAS = all_parameters()
SHAPES = [(12, 12, 32), (4, 2, 80), (3, 3, 24), (2, 1, 256)]
LENGTHS = [1, 130, 7, 64, 65, 300]


def layout(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return starts, torch.tensor(lengths, dtype=torch.int32)


def rows_of(lengths: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(sum(lengths), (heads + 2 * kv_heads) * size, generator=generator) * 1.5).to(dtype)


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [None, 65, 1])
def test_agrees_with_plain_torch(isa, assert_close, dtype, heads, kv_heads, size, window):
    qkv = rows_of(LENGTHS, heads, kv_heads, size, dtype)
    padded = torch.cat([qkv, torch.full((3, qkv.shape[1]), float("nan"), dtype=dtype)])
    arguments = (*layout(LENGTHS), heads, kv_heads, size, size**-0.5, window)
    out = cpu.varlen_attention(padded, *arguments)
    exact = reference.varlen_attention(qkv.double(), *arguments)
    factor = 4.0 if dtype == torch.bfloat16 else 2.0  # pairs of bfloat16 round the weights as well
    assert_close(out[: len(qkv)], exact, reference.varlen_attention(qkv, *arguments), factor)
    assert not out[len(qkv) :].any(), "rows of padding"


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@pytest.mark.parametrize("window", [None, 20])
def test_the_same_bits_in_any_company_and_on_any_number_of_threads(isa, threads, window):
    heads, size = 4, 32
    qkv = rows_of(LENGTHS, heads, heads, size, torch.float32)
    rest = (heads, heads, size, size**-0.5, window)
    alone = torch.cat([cpu.varlen_attention(part, *layout([len(part)]), *rest) for part in qkv.split(LENGTHS)])
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(cpu.varlen_attention(qkv, *layout(LENGTHS), *rest), alone)


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_in_place_is_that_of_the_reference(isa, dtype):
    heads, size, rotated = 6, 24, 4
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, heads * size, generator=generator).to(dtype)
    table = torch.randn(20, 16, generator=generator)
    positions = torch.randint(0, 20, (50,), generator=generator)
    expected = x.clone()
    reference.rope_(expected, positions, table, rotated, size)
    cpu.rope_(x, positions, table, rotated, size)
    assert torch.equal(x, expected)
    assert torch.equal(x[:, rotated * size :], expected[:, rotated * size :])


def test_a_step_is_recorded_and_replayed_with_other_rows():
    heads, size = 4, 32
    qkv = rows_of(LENGTHS, heads, heads, size, torch.float32)
    starts, lengths = layout(LENGTHS)
    program = cpu.record(lambda: cpu.varlen_attention(qkv, starts, lengths, heads, heads, size, 1.0))
    program.replay()
    assert torch.equal(program.outputs, cpu.varlen_attention(qkv, starts, lengths, heads, heads, size, 1.0))
    few = cpu.varlen_attention(qkv[:138], starts[:4], lengths[:3], heads, heads, size, 1.0)
    program.outputs.zero_()
    program.replay(138, sequences=3)
    assert torch.equal(program.outputs[:138], few) and not program.outputs[138:].any()
