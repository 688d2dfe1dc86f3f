"""Rotary embedding, per-head norms, cache writes and block copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import octavo_kernels
from octavo_kernels import cpu, reference
from octavo_kernels.cpu.attention import from_pair_layout, has_pair_layout
from octavo_kernels.cpu.library import get_library


def make_table(positions: int, rot_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def run(
    backend, qkv, positions, table, slots, heads, kv_heads, head_size, norms=(None, None), kv_dtype=None, block_size=4
):
    kv_cache = torch.full((2, 12, kv_heads, block_size, head_size), float("nan"), dtype=kv_dtype or qkv.dtype)
    q = backend.rope_and_cache(qkv, positions, table, kv_cache, slots, heads, kv_heads, head_size, *norms, 1e-6)
    return q, from_pair_layout(kv_cache) if backend is cpu and has_pair_layout(kv_cache) else kv_cache


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("head_size, rot_dim", [(64, 64), (128, 128), (80, 32), (8, 8), (24, 20), (6, 2)])
@pytest.mark.parametrize(
    "dtype, kv_dtype",
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("block_size", [4, 16])
def test_agrees_with_plain_torch(isa, head_size, rot_dim, dtype, kv_dtype, norm, block_size):
    dtype, kv_dtype = getattr(torch, dtype), getattr(torch, kv_dtype)
    torch.manual_seed(head_size)
    heads, kv_heads, rows = 6, 2, 9
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_size).to(dtype)
    positions = torch.randint(0, 100, (rows,))
    slots = torch.randperm(47)[:rows] + 1
    slots[3] = -1
    norms = tuple(torch.randn(head_size).to(dtype) if norm else None for _ in range(2))
    args = (qkv, positions, make_table(100, rot_dim), slots, heads, kv_heads, head_size, norms, kv_dtype, block_size)
    q, kv_cache = run(cpu, *args)
    expected_q, expected_cache = run(reference, *args)
    if norm or dtype == torch.bfloat16:  # sums of squares differ in their order; one step of bfloat16 at most
        tolerance = (
            {"atol": 3e-6, "rtol": 3e-6} if kv_dtype == dtype == torch.float32 else {"atol": 1e-2, "rtol": 1.6e-2}
        )
        torch.testing.assert_close(q, expected_q, **tolerance)
        torch.testing.assert_close(kv_cache, expected_cache, equal_nan=True, **tolerance)
    else:
        assert torch.equal(q, expected_q)
        assert torch.equal(kv_cache.nan_to_num(7.0), expected_cache.nan_to_num(7.0))
    # A row that is not to be written leaves no trace: exactly the other slots are filled.
    assert int(kv_cache[0, :, 0, :, 0].isfinite().sum()) == rows - 1


def test_norms_in_float32_are_applied_before_the_rounding(isa):
    """Gemma's norms of queries and keys in a bfloat16 model."""
    torch.manual_seed(0)
    qkv, weights = torch.randn(9, 4 * 64).bfloat16(), [torch.rand(64) + 0.5 for _ in range(2)]

    def rows(backend, norms):
        q, kv_cache = run(backend, qkv, torch.arange(9), None, torch.arange(9), 2, 1, 64, norms, block_size=16)
        return torch.cat([q.flatten(), kv_cache[0, 0, 0, :9].flatten()])

    expected = rows(reference, weights)
    assert (rows(cpu, weights) == expected).float().mean() > 0.98
    assert (rows(cpu, [weight.bfloat16() for weight in weights]) == expected).float().mean() < 0.9


def test_is_the_rotation_of_transformers(isa):
    torch.manual_seed(0)
    heads, kv_heads, size, rows = 9, 3, 64, 7
    qkv, positions = torch.randn(rows, (heads + 2 * kv_heads) * size), torch.arange(40, 40 + rows)
    q, kv_cache = run(cpu, qkv, positions, make_table(100, size), torch.arange(rows), heads, kv_heads, size)
    table = make_table(100, size)[positions]
    cos, sin = (torch.cat([half, half], dim=-1)[None] for half in table.chunk(2, dim=-1))
    split = qkv.view(rows, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    expected_q, expected_k = apply_rotary_pos_emb(
        split[0].transpose(0, 1)[None], split[1].transpose(0, 1)[None], cos, sin
    )
    assert torch.equal(q, expected_q[0].transpose(0, 1))
    written = kv_cache.transpose(2, 3).reshape(2, -1, kv_heads, size)[:, :rows]
    assert torch.equal(written[0], expected_k[0].transpose(0, 1))
    assert torch.equal(written[1], split[2])


def test_padding_rows_may_hold_anything(isa):
    """Rows with slot -1 and positions outside the table are computed without reading outside of it."""
    qkv = torch.randn(3, 4 * 16)
    positions = torch.tensor([1, -5, 10**9])
    q, kv_cache = run(cpu, qkv, positions, make_table(10, 16), torch.tensor([5, -1, -1]), 2, 1, 16)
    assert torch.isfinite(q).all() and int(kv_cache[0, :, 0, :, 0].isfinite().sum()) == 1


def test_without_positions(isa):
    """Models with learned positions (OPT) hand over no table: q, k and v pass unchanged."""
    qkv = torch.randn(3, 6 * 8)
    q, kv_cache = run(cpu, qkv, torch.arange(3), None, torch.arange(3), 2, 2, 8)
    assert torch.equal(q.flatten(1), qkv[:, :16])
    assert torch.equal(kv_cache[1, 0, :, :3].transpose(0, 1).flatten(1), qkv[:, 32:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_copies_read_before_they_write(isa, dtype, data):
    """Copies of whole blocks are as if simultaneous, also in chains and swaps."""
    blocks = data.draw(st.integers(2, 9))
    targets = data.draw(st.lists(st.integers(0, blocks - 1), unique=True, min_size=0, max_size=blocks))
    pairs = torch.tensor([(data.draw(st.integers(0, blocks - 1)), t) for t in targets], dtype=torch.int64).view(-1, 2)
    contents = torch.randn(blocks, data.draw(st.sampled_from([1, 333, 20_000]))).to(dtype)  # the last in several parts
    before, expected = contents.clone(), contents.clone()
    cpu.copy_blocks(contents, pairs)
    for source, target in pairs.tolist():
        expected[target] = before[source]
    assert torch.equal(contents, expected)


@pytest.mark.parametrize("rot_dim", [7, 10, 96])
def test_a_table_wider_than_a_head_is_refused_everywhere(isa, rot_dim):
    """By the interface for all backends, and by C itself: a model file's number must not lead out of a buffer."""
    qkv, table, slots = torch.randn(2, 32), torch.randn(4, rot_dim), torch.tensor([1, 2])
    args = (qkv, torch.tensor([0, 1]), table, torch.zeros(2, 2, 1, 4, 8), slots, 2, 1, 8)
    with pytest.raises(ValueError, match=rf"{rot_dim} elements of a head"):
        octavo_kernels.rope_and_cache(*args)
    if get_library() is not None:
        with pytest.raises(RuntimeError, match="or its sizes"):
            cpu.rope_and_cache(*args)
