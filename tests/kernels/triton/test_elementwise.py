"""Norms, activation, rotary embedding, cache writes, block copies and linears of few rows in Triton, against plain
torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_kernels import reference
from octavo_kernels import triton as backend
from octavo_kernels.triton import block_copies, small_linear
from octavo_kernels.triton.devices import HOPPER

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("width", [1, 70, 576, 4096])
def test_rms_norm(assert_close, dtype, device, width):
    x, weight = randn(3, width, dtype=dtype, device=device) * 3, randn(width, dtype=dtype, device=device, seed=1)
    out = backend.rms_norm(x, weight, 1e-5)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert out.dtype == dtype
    assert_close(out, exact, reference.rms_norm(x, weight, 1e-5), slack=2e-7)


def test_a_float32_weight_is_applied_before_the_rounding(device):
    """Gemma's norm, of rows and of heads."""
    x, weight = randn(3, 64, dtype=torch.bfloat16, device=device), randn(64, dtype=torch.float32, device=device) + 1
    expected = reference.rms_norm(x, weight, 1e-6)
    out = backend.rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16 and (out == expected).float().mean() > 0.98
    assert (backend.rms_norm(x, weight.bfloat16(), 1e-6) == expected).float().mean() < 0.9
    cache, rows = torch.zeros(2, 1, 1, 16, 16, dtype=torch.bfloat16, device=device), torch.arange(3, device=device)
    args = (rows, None, cache, rows, 2, 1, 16, weight[:16], weight[:16], 1e-6)
    heads, plain = (module.rope_and_cache(x, *args) for module in (backend, reference))
    assert (heads == plain).float().mean() > 0.98


@pytest.mark.parametrize("width", [70, 576])
def test_fused_add_keeps_the_rounded_sum(dtype, device, width):
    """The new residual is exactly residual + x, and the norm is exactly the norm of it."""
    x, residual = (randn(3, width, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = randn(width, dtype=dtype, device=device, seed=3)
    normed, total = backend.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, backend.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("width", [5, 1500])
def test_silu_and_mul(assert_close, dtype, device, width):
    x = randn(3, 2 * width, dtype=dtype, device=device) * 8
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(backend.silu_and_mul(x), gate * torch.sigmoid(gate) * up, reference.silu_and_mul(x), slack=2e-7)


def test_silu_of_extreme_gates(device):
    """Gates far out give 0 or the gate itself, never NaN."""
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]], device=device)
    out = backend.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-35, rtol=2e-7)


@pytest.mark.parametrize("kind", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activations(assert_close, dtype, device, kind):
    x = randn(3, 2 * 1030, dtype=dtype, device=device) * 4
    x[0, :4] = torch.tensor([0.0, -80.0, 80.0, -1e-3])
    for gated in (False, True):
        out, plain = backend.activate(x, kind, gated), reference.activate(x, kind, gated)
        assert out.dtype == dtype
        assert_close(out, reference.activate(x.double(), kind, gated), plain, slack=4e-7)


@pytest.mark.parametrize("width", [70, 1030])
@pytest.mark.parametrize("given", ["nothing", "weight", "weight and bias"])
def test_layer_norm(assert_close, dtype, device, width, given):
    x, residual = (randn(3, width, dtype=dtype, device=device, seed=seed) * 3 + 1 for seed in (0, 1))
    weight, bias = (randn(width, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    held = {"nothing": (None, None), "weight": (weight, None), "weight and bias": (weight, bias)}[given]
    for added in (None, residual):
        out, total = backend.layer_norm(x, *held, 1e-5, added)
        plain, theirs = reference.layer_norm(x, *held, 1e-5, added)
        assert torch.equal(total, theirs)
        exact = reference.layer_norm(theirs.double(), *(t if t is None else t.double() for t in held), 1e-5)[0]
        assert_close(out, exact, plain, slack=4e-7)


def test_scaling_and_caps(assert_close, dtype, device):
    x = randn(2, 1500, dtype=dtype, device=device) * 20
    for factor, cap in ((0.37, None), (1.0, 30.0)):
        out, plain = backend.scale(x, factor, cap), reference.scale(x, factor, cap)
        assert out.dtype == dtype
        assert_close(out, reference.scale(x.double(), factor, cap), plain, slack=2e-7)


def test_a_norm_in_place_of_some_columns(dtype, device):
    whole, weight = randn(3, 200, dtype=dtype, device=device), randn(64, dtype=dtype, device=device, seed=1)
    expected = whole.clone()
    expected[:, 40:104] = backend.rms_norm(whole[:, 40:104], weight, 1e-6)
    backend.rms_norm_(whole[:, 40:104], weight, 1e-6)
    assert torch.equal(whole, expected)


def test_norms_in_place_of_heads(dtype, device):
    whole, weight = randn(3, 200, dtype=dtype, device=device), randn(24, dtype=dtype, device=device, seed=1)
    expected = whole.clone()
    for start in (40, 64, 88):
        backend.rms_norm_(expected[:, start : start + 24], weight, 1e-6)
    backend.rms_norm_(whole[:, 40:112], weight, 1e-6)
    assert torch.equal(whole, expected)


def test_columns_times_a_row(dtype, device):
    whole, row = randn(5, 60, dtype=dtype, device=device), randn(37, dtype=dtype, device=device, seed=1)
    x = whole[:, 11:48]
    assert torch.equal(backend.activate(x, "none", up=row.expand_as(x)), x * row)


def test_gates_of_another_tensors_columns(dtype, device):
    gate, wide = randn(3, 37, dtype=dtype, device=device), randn(3, 100, dtype=dtype, device=device, seed=1)
    up = wide[:, 40:77]
    expected = backend.activate(torch.cat([gate, up], dim=1), "gelu_tanh", True)
    assert torch.equal(backend.activate(gate, "gelu_tanh", up=up), expected)


def test_embedding(dtype, device):
    """Exact rows; ids of padding rows are looked up within the table."""
    table, ids = randn(9, 1030, dtype=dtype, device=device), torch.tensor([8, 0, 3, 3, -7, 10**12], device=device)
    assert torch.equal(backend.embedding(ids, table), table[ids.clamp(0, 8)])
    expected = reference.embedding(ids, table, 2)  # a rank's rows: of ids 2 to 10
    assert torch.equal(backend.embedding(ids, table, 2), expected) and (expected == 0).all(dim=-1).any()


def test_rows_of_a_wider_tensor(device):
    """Views that are not contiguous are taken as they are."""
    wide, weight = randn(6, 64, dtype=torch.float32, device=device), randn(32, dtype=torch.float32, device=device)
    part = wide[::2, 16:48]
    assert torch.equal(backend.rms_norm(part, weight, 1e-6), backend.rms_norm(part.contiguous(), weight, 1e-6))
    assert torch.equal(backend.silu_and_mul(part), backend.silu_and_mul(part.contiguous()))


@pytest.mark.parametrize("shape", [(1, 70, 128, 1), (3, 130, 256, 2), (16, 64, 640, 4)], ids=str)
def test_linear_of_few_rows(assert_close, device, shape):
    """Whatever the split, whatever the rest of the last tile; a second call finds the counters as the first did."""
    rows, n, k, splits = shape
    dtype = torch.float16
    x, weight, bias = (randn(*size, dtype=dtype, device=device) for size in ((rows, k), (n, k), (n,)))
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    plain = torch.nn.functional.linear(x, weight, bias)
    config = small_linear.SmallConfig(64, splits)
    first, second = (small_linear.small_linear(x, weight, bias, config) for _ in range(2))
    assert_close(first, exact, plain)
    assert torch.equal(first, second)
    alone = small_linear.small_linear(x[-1:], weight, bias, config)
    assert torch.equal(alone, first[-1:]), "a row's result depends on its company"


@given(n=st.integers(1, 200_000), k=st.integers(1, 40_000))
@settings(max_examples=300, deadline=None)
def test_splits_leave_no_part_empty(n, k):
    config = small_linear.split_config(n, k)
    if config is not None:
        blocks, rest = divmod(k, config.block_k)
        each = -(-blocks // config.splits)
        assert rest == 0
        assert (config.splits - 1) * each < blocks <= config.splits * each
        assert config.splits <= small_linear.MAX_SPLITS
        durations = [small_linear.estimated_duration(n, k, config.block_k, s) for s in range(1, config.splits + 1)]
        assert durations[-1] <= min(durations[0], 1.05 * min(durations))
    assert small_linear.small_config(n, k) == (config if 2 * n * k >= small_linear.MIN_WEIGHT_BYTES else None)


@pytest.mark.parametrize(
    "n, k, splits",
    [(6144, 4096, 4), (4096, 4096, 6), (28672, 4096, 4), (4096, 14336, 6), (128256, 4096, 1)],
    ids=["qkv", "o", "gate_up", "down", "lm_head"],
)
def test_splits_fill_the_last_wave(n, k, splits):
    """The weights of Llama-3.1-8B: 448 tiles of gate_up on 396 slots would be two waves, the second nearly empty."""
    assert small_linear.split_config(n, k).splits == splits


@pytest.mark.parametrize("multiprocessors, splits", [(32, 1), (58, 3), (108, 3), (132, 4)])
def test_parts_fill_the_own_device(multiprocessors, splits):
    """qkv of Llama-3.1-8B is 96 tiles: a slice of a GPU is full with them, larger ones need parts of K."""
    device = replace(HOPPER, multiprocessors=multiprocessors)
    assert small_linear.split_config(6144, 4096, device).splits == splits


def test_measured_shapes_go_before_the_rule(monkeypatch):
    small, large = (1024, 1024), (28672, 4096)
    assert small_linear.small_config(*small) is None
    config = small_linear.SmallConfig(64, 2)
    monkeypatch.setattr(small_linear, "MEASURED", {small: config, large: None})
    assert small_linear.small_config(*small) == config
    assert small_linear.small_config(*large) is None


# ---- rotary embedding and the cache


def make_table(positions: int, rot_dim: int, device: str) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_size, rot_dim", [(64, 64), (80, 32), (24, 20), (16, 0)])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (5, 1)])
def test_rope_and_cache(assert_close, dtype, device, head_size, rot_dim, heads, kv_heads, norm):
    """A row of padding (slot -1, any position) leaves no trace; all else is as in plain torch."""
    rows = 5
    qkv = randn(rows, (heads + 2 * kv_heads) * head_size, dtype=dtype, device=device)
    positions = torch.tensor([7, 0, 10**12, 99, 3], device=device)
    slots = torch.tensor([3, 17, -1, 0, 47], device=device)
    norms = [randn(head_size, dtype=dtype, device=device, seed=s) if norm else None for s in (1, 2)]
    table = make_table(100, rot_dim, device) if rot_dim else None

    def run(function, cast):
        cache = torch.full((2, 12, kv_heads, 4, head_size), float("nan"), dtype=cast(qkv).dtype, device=device)
        weights = [None if w is None else cast(w) for w in norms]
        turn = None if table is None else table.to(torch.promote_types(torch.float32, cast(qkv).dtype))
        q = function(cast(qkv), positions, turn, cache, slots, heads, kv_heads, head_size, *weights, 1e-6)
        return torch.cat([q.flatten(), cache.flatten()])

    out = run(backend.rope_and_cache, lambda t: t)
    exact = run(reference.rope_and_cache, lambda t: t.double())
    plain = run(reference.rope_and_cache, lambda t: t)
    assert torch.equal(out.isnan(), exact.isnan())
    assert_close(out[~out.isnan()], exact[~out.isnan()], plain[~out.isnan()], slack=2e-7)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 4.0)], ids=str)
def test_a_cache_of_fp8(device, scales):
    """Keys and values are divided by their scales and cut to what e4m3 holds.

    The values need no rounding, which Triton's interpreter gets wrong where it carries into the exponent.
    """
    dtype, float8 = torch.float16, torch.float8_e4m3fn
    # Beyond 448 some versions of torch cut, others give NaN.
    qkv = (randn(4, 3 * 64, dtype=dtype, device=device) * 400).clamp(-448, 448).to(float8).to(dtype)
    caches = []
    for function in (backend.rope_and_cache, reference.rope_and_cache):
        cache = torch.zeros(2, 3, 1, 4, 64, device=device).to(float8)
        arguments = (qkv, torch.arange(4, device=device), None, cache, torch.tensor([0, 5, -1, 7], device=device))
        function(*arguments, 1, 1, 64, k_scale=scales[0], v_scale=scales[1])
        caches.append(cache.float())
    assert torch.equal(*caches)
    assert caches[0].abs().max() == 448.0
    with pytest.raises(ValueError, match="fp8"):
        backend.rope_and_cache(qkv, torch.arange(4), None, torch.zeros(2, 3, 1, 4, 64), qkv, 1, 1, 64, k_scale=2.0)


@pytest.mark.untouched_memory
def test_offsets_beyond_32_bits(device):
    """A cache, an embedding table and a batch whose last rows lie more than 2**31 elements into their storage."""
    far = 2**31 + 4096
    storage = torch.empty(far + 4096, dtype=torch.float16, device=device)  # pages that nobody touches cost nothing
    cache = storage.as_strided((2, 2, 1, 16, 64), (1024, far, 1024, 64, 1))
    qkv = randn(1, 3 * 64, dtype=torch.float16, device=device)
    ones = torch.ones(1, dtype=torch.int64, device=device)
    backend.rope_and_cache(qkv, ones, None, cache, ones * 18, 1, 1, 64)
    assert torch.equal(cache[0, 1, 0, 2], qkv[0, 64:128])
    assert torch.equal(cache[1, 1, 0, 2], qkv[0, 128:])
    blocks = storage.as_strided((far // 1024 + 1, 1024), (1024, 1))
    backend.copy_blocks(blocks, torch.tensor([[far // 1024, 0]], device=device))
    assert torch.equal(cache[0, 0, 0, 2], cache[0, 1, 0, 2]) and cache[0, 0, 0, 2].any()
    rows = storage.as_strided((2, 64), (far, 1))
    rows.copy_(randn(2, 64, dtype=torch.float16, device=device))
    weight = randn(64, dtype=torch.float16, device=device, seed=1)
    assert torch.equal(backend.embedding(ones, rows), rows[1:])
    assert torch.equal(backend.silu_and_mul(rows), backend.silu_and_mul(rows.contiguous()))
    assert torch.equal(backend.rms_norm(rows, weight, 1e-6), backend.rms_norm(rows.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("scratch", [1, 4 * 60 * 256 * 8, 1 << 20])
def test_many_copies_share_little_scratch_memory(device, monkeypatch, scratch):
    """However little there is, one program can do it all; and no more than is allowed is asked for."""
    monkeypatch.setattr(block_copies, "SCRATCH", scratch)
    sizes, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **k: sizes.append(size) or empty(*size, **k))
    blocks = randn(70, 6 * 256 * 2, dtype=torch.float32, device=device)
    expected = blocks.clone()
    pairs = torch.stack([torch.randperm(70)[:60], torch.randperm(70)[:60]], 1).to(device)
    backend.copy_blocks(blocks, pairs)
    reference.copy_blocks(expected, pairs)
    assert torch.equal(blocks, expected)
    assert sizes[0] == (60 * 256 * max(1, min(6, scratch // (60 * 256 * 8))),)  # words; a block has six chunks of 256


@given(data=st.data())
@settings(max_examples=12, **FIXTURES)
def test_copies_read_before_they_write(device, data):
    """Copies of whole blocks are as if simultaneous, also in chains and swaps, of any dtype and length."""
    blocks = data.draw(st.integers(2, 40))
    count = data.draw(st.integers(0, blocks))
    targets = torch.randperm(blocks)[:count]
    pairs = torch.stack([torch.randint(0, blocks, (count,)), targets], dim=1).to(device)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8]))
    contents = (torch.randn(blocks, data.draw(st.sampled_from([1, 60, 3000]))) * 50).to(dtype).to(device)
    expected = contents.clone()
    backend.copy_blocks(contents, pairs)
    reference.copy_blocks(expected, pairs)
    assert torch.equal(contents, expected)
