"""Multi-head latent attention in Triton: right against keys and values of every head, and bit-equal in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.latents import Layer, make_layer

from octavo_kernels import reference
from octavo_kernels import triton as backend
from octavo_kernels.triton import INTERPRETED, latent
from octavo_kernels.triton import attention_configs as configs

DEVICE = "cpu" if INTERPRETED else "cuda"
PARTS = [(70, 1), (0, 20), (33, 3), (0, 1)]
# Heads; sizes of a head's plain and turned elements, of latents, of values. 66 heads are two tiles of 33.
SIZES = [
    (3, 8, 4, 20, 12),
    *(pytest.param(s, marks=pytest.mark.slow) for s in [(16, 16, 8, 32, 24), (66, 8, 4, 16, 8)]),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tiles and chunks: short sequences have many of them."""
    if not INTERPRETED:
        return
    monkeypatch.setattr(configs, "splits", lambda device: configs.Splits(8, 32))
    monkeypatch.setattr(configs, "EXACT_CHUNK", 32)
    monkeypatch.setitem(configs.PREFILL, configs.LATENT, configs.Config(16, 16, 4, 1))
    rows = dict.fromkeys((16, 32, 64), (16, 4, 1))
    monkeypatch.setitem(configs.DECODE, configs.LATENT, rows)
    for name, value in (("MANY_ROWS", 32), ("CHANNELS", 16)):
        monkeypatch.setattr(latent, name, value)


def layer_of(sizes: tuple[int, ...]) -> Layer:
    layer = make_layer(80, *sizes)
    tensors = {name: value.to(DEVICE) for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    return replace(layer, **tensors)


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", SIZES)
def test_is_attention_to_the_keys_and_values_of_all_heads(assert_close, dtype, sizes):
    """In decode rows, drafts and prompts, over caches full of NaN where nothing was written."""
    layer = layer_of(sizes)
    exact = layer.with_keys_and_values(PARTS).cpu()
    plain = layer.run(reference, PARTS, 16, dtype, dtype)
    out = layer.run(backend, PARTS, 16, dtype, dtype, before=reference)
    assert out.dtype == dtype
    assert_close(out.cpu(), exact, plain.cpu(), factor=3.0, slack=1e-6)
    if dtype == torch.float32:
        assert (out.cpu().double() - exact).abs().max() < 1e-4


@pytest.mark.skipif(not INTERPRETED, reason="cuBLAS makes no such promise")
@pytest.mark.parametrize("sizes", SIZES[:2])
def test_a_row_has_the_same_bits_in_any_company(sizes):
    layer = layer_of(sizes)
    together = layer.run(backend, PARTS, 16, torch.float32, torch.float32, before=reference)
    at = 0
    for computed, new in PARTS:
        alone = layer.run(backend, [(computed, new)], 32, torch.float32, torch.float32, before=reference)
        assert torch.equal(together[at : at + new], alone), (computed, new)
        at += new


def test_rows_of_padding_write_nothing_and_give_zeros(dtype):
    layer = layer_of(SIZES[0])
    whole = layer.run(backend, PARTS, 16, dtype, dtype, before=reference)
    padded = layer.run(backend, PARTS, 16, dtype, dtype, padding=3, before=reference)
    assert torch.equal(padded[:-3], whole) and not padded[-3:].any()


def test_a_cache_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="does not go with latent queries"):
        layer_of(SIZES[0]).run(backend, PARTS, 16, torch.float16, torch.float32)


@pytest.mark.parametrize(("heads", "size", "turned"), [(3, 24, 24), (20, 32, 8), (1, 16, 2)])
def test_heads_are_turned_in_place(dtype, assert_close, heads, size, turned):
    """The first ones of each row; those behind, and elements that are not turned, stay."""
    x = torch.randn(7, (heads + 2) * size, device=DEVICE).to(dtype)
    angles = torch.randn(50, turned // 2, device=DEVICE)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 49, 3, 3, 20, 1, 10_000], device=DEVICE)
    exact, plain, out = x.double(), x.clone(), x.clone()
    reference.rope_(exact, positions, table.double(), heads, size)
    reference.rope_(plain, positions, table, heads, size)
    backend.rope_(out, positions, table, heads, size)
    assert_close(out.cpu(), exact.cpu(), plain.cpu())
    kept = torch.ones(size, dtype=torch.bool)
    kept[:turned] = False
    for whole in (out, plain):
        assert torch.equal(whole[:, heads * size :], x[:, heads * size :])
    turned_heads = out[:, : heads * size].view(7, heads, size)
    assert torch.equal(turned_heads[..., kept], x[:, : heads * size].view(7, heads, size)[..., kept])
