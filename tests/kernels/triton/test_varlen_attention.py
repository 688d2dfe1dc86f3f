"""Attention without a cache in Triton: right against plain torch in float64, and the same in any company."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from octavo_kernels import reference
from octavo_kernels.triton import INTERPRETED, varlen

DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = [1, 70, 16, 33]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(varlen, "BLOCK_M", 32)
        monkeypatch.setattr(varlen, "BLOCK_N", 16)


def layout(lengths):
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 2, 32), (4, 2, 24)])
def test_agrees_with_plain_torch(assert_close, heads, kv_heads, size, window):
    qkv = torch.randn(sum(LENGTHS) + 3, (heads + 2 * kv_heads) * size, device=DEVICE)
    arguments = (*layout(LENGTHS), heads, kv_heads, size, size**-0.5, window)
    out = varlen.varlen_attention(qkv, *arguments)
    exact = reference.varlen_attention(qkv.double(), *arguments)
    assert_close(out.cpu(), exact.cpu(), reference.varlen_attention(qkv, *arguments).cpu(), 3.0)
    assert not out[sum(LENGTHS) :].any()


def test_the_same_bits_in_any_company():
    qkv = torch.randn(sum(LENGTHS), 3 * 64, device=DEVICE)
    whole = varlen.varlen_attention(qkv, *layout(LENGTHS), 2, 2, 32, 0.2)
    alone = [varlen.varlen_attention(part, *layout([len(part)]), 2, 2, 32, 0.2) for part in qkv.split(LENGTHS)]
    assert torch.equal(whole, torch.cat(alone))
