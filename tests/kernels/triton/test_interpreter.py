"""What the other tests here rely on: Triton's interpreter is as hostile, and rounds as well, as a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from octavo_kernels import triton as backend

pytestmark = pytest.mark.skipif(not backend.INTERPRETED, reason="for Triton's interpreter: TRITON_INTERPRET=1")


@triton.jit
def order_kernel(count_ptr, out_ptr):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out_ptr + program, tl.atomic_add(count_ptr, 1))


def test_programs_run_in_another_order_each_time():
    orders = []
    for _ in range(2):
        out = torch.zeros(40, dtype=torch.int32)
        order_kernel[(8, 5)](torch.zeros(1, dtype=torch.int32), out)
        assert sorted(out.tolist()) == list(range(40))
        orders.append(out.tolist())
    assert list(range(40)) != orders[0] != orders[1]


def test_memory_that_is_asked_for_is_poisoned():
    assert torch.empty(8).isnan().all()
    assert (torch.empty(8, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


@triton.jit
def round_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_numbers_are_rounded_to_the_nearest(kept):
    x, out = torch.randn(256) * 30, torch.zeros(256).to(kept)
    round_kernel[(1,)](x, out, BLOCK=256)
    assert torch.equal(out.float(), x.to(kept).float())


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, product.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_products_of_types_without_a_number_of_numpys(kept):
    a, b = (torch.randint(-9, 9, (16, 16)).to(kept) for _ in range(2))
    out = torch.zeros(16, 16, dtype=torch.int32 if kept == torch.int8 else torch.float32)
    product_kernel[(1,)](a, b, out, BLOCK=16)
    assert torch.equal(out.float(), a.float() @ b.float())
