"""Keys and values in int8: near what was written, attention exact on what is there, the same bits in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulated_kernels import all_parameters
from torch import Tensor

from octavo_kernels import AttentionOptions, cpu, reference
from octavo_kernels.cpu.attention import kv_scale_bytes

pytestmark = pytest.mark.parametrize("isa", all_parameters(), indirect=True)
FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
CHUNK, GROUP = 16, 32


def empty(blocks: int, kv_heads: int, block_size: int, head_size: int) -> Tensor:
    """A cache full of bytes that are NaN as a scale."""
    width = head_size + kv_scale_bytes(torch.int8, head_size)
    return torch.full((2, blocks, kv_heads, block_size, width), -1, dtype=torch.int8)


def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """``k``, ``v`` [rows, kv heads, head size], as they are."""
    (rows, heads, size), positions = k.shape, torch.zeros(len(k), dtype=torch.int64)
    qkv = torch.cat([torch.zeros_like(k), k, v], 1).reshape(rows, -1)
    cpu.rope_and_cache(qkv, positions, None, cache, slots, heads, heads, size)


def rows_at(plain: Tensor, slots: Tensor) -> Tensor:
    """[2, rows, kv heads, head size]"""
    block_size = plain.shape[3]
    return plain[:, slots // block_size, :, slots % block_size].transpose(0, 1)


def hadamard(x: Tensor) -> Tensor:
    """Orthogonal, on GROUP elements at a time; its own inverse."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while matrix.shape[0] < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.unflatten(-1, (-1, GROUP)) @ matrix / GROUP**0.5).flatten(-2)


def dequantize(cache: Tensor, head_size: int) -> Tensor:
    """Values of a cache, float32 [2, blocks, kv heads, block size, head size]; csrc/attention_ops.h has its layout."""
    shape, codes_size = (*cache.shape[1:4], head_size), head_size * CHUNK
    keys, values = cache.unflatten(3, (-1, CHUNK)).flatten(-2)  # [blocks, heads, chunks, bytes]
    codes = keys[..., :codes_size].view(torch.uint8).float() - 128
    codes = codes.unflatten(-1, (-1, CHUNK, 4)).movedim(-2, -3).flatten(-2)
    scales = keys[..., codes_size : codes_size + 2 * CHUNK * (head_size // GROUP)].contiguous().view(torch.bfloat16)
    groups = codes.unflatten(-1, (-1, GROUP)) * scales.float().unflatten(-1, (-1, CHUNK)).mT[..., None]
    plain_keys = hadamard(groups.flatten(-2)).reshape(shape) * GROUP**0.5
    codes = values[..., :codes_size].float().unflatten(-1, (-1, head_size, 4)).mT.flatten(-3, -2)
    scales = values[..., codes_size : codes_size + 4 * CHUNK].contiguous().view(torch.float32)
    return torch.stack([plain_keys, (codes * scales[..., None]).reshape(shape)])


def as_int8(x: Tensor, group: int) -> Tensor:
    """The nearest of 255 values, a scale for each ``group`` elements."""
    parts = x.unflatten(-1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return ((parts / scale).round() * scale).flatten(-2)


def lay_out_int8(lay_out, parts, block_size: int, **layout):
    """`lay_out` with an int8 cache."""
    q, plain, metadata = lay_out(parts, block_size, **layout)
    _, blocks, heads, _, size = plain.shape
    cache = empty(blocks, heads, block_size, size)
    for r, (sequence, computed, new) in enumerate(parts):
        at = torch.arange(computed + new)
        slots = metadata.block_table[r].long()[at // block_size] * block_size + at % block_size
        write(cache, sequence.k[: len(at)], sequence.v[: len(at)], slots)
    return q, cache, metadata


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_written_values_are_there_within_half_a_step(isa, head_size, dtype):
    torch.manual_seed(head_size)
    k, v = (torch.randn(2, 40, 3, head_size) * torch.logspace(-3, 3, 40)[:, None, None]).to(dtype)
    k[3, 1], v[4, 2] = 0.0, 0.0
    k[5, 0, 7] *= 100  # an outlier
    slots = torch.randperm(6 * 16)[:40]
    slots[11] = -1
    cache = empty(6, 3, 16, head_size)
    write(cache, k, v, slots)
    kept = slots >= 0
    keys, values = rows_at(dequantize(cache, head_size), slots[kept])
    k, v = k[kept].float(), v[kept].float()
    step = v.abs().amax(-1, keepdim=True) / 127
    assert ((values - v).abs() <= 0.501 * step).all()
    spread = hadamard(k).unflatten(-1, (-1, GROUP))
    step = spread.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)  # a key's scales are rounded up to bfloat16
    off = (hadamard(keys).unflatten(-1, (-1, GROUP)) - spread).abs()
    assert (off <= 0.501 * step + 1e-6 * spread.abs().amax(-1, keepdim=True)).all()


@given(data=st.data())
@settings(max_examples=20, **FIXTURES)
def test_a_write_leaves_its_neighbours_alone(isa, data):
    """Rows in any order and in any calls make the same cache, byte by byte; other slots stay as they were."""
    rows = data.draw(st.integers(1, 40))
    k, v = torch.randn(2, rows, 2, 64, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    slots = torch.tensor(data.draw(st.permutations(range(48)))[:rows])
    together, apart = empty(3, 2, 16, 64), empty(3, 2, 16, 64)
    write(together, k, v, slots)
    for i in data.draw(st.permutations(range(rows))):
        write(apart, k[i : i + 1], v[i : i + 1], slots[i : i + 1])
    assert torch.equal(together, apart)
    plain = dequantize(together, 64)
    finite = rows_at(plain, torch.arange(48)).isfinite().all(-1).all(-1)
    expected = torch.zeros(48, dtype=torch.bool)
    expected[slots] = True
    assert torch.equal(finite[0], expected) and torch.equal(finite[1], expected)


# ---------------------------------------------------------------- reading


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, kv_heads, head_size", [(9, 3, 64), (4, 4, 96), (5, 1, 32), (16, 2, 128), (2, 2, 256), (8, 1, 64)]
)
def test_attention_is_right_on_what_the_cache_holds(isa, sequence_type, lay_out, heads, kv_heads, head_size, dtype):
    """Decode, chunked and whole prompts in one call, over poisoned pages. Queries are rounded to int8 too; beside that
    only contributions are rounded, to parts of the largest."""
    shapes = [(299, 1), (0, 5), (250, 40), (0, 1), (63, 1), (64, 1), (65, 1), (63, 66)]
    sequences = [
        sequence_type.random(a + b, heads, kv_heads, head_size, seed, dtype) for seed, (a, b) in enumerate(shapes)
    ]
    parts = [(s, a, b) for s, (a, b) in zip(sequences, shapes, strict=True)]
    for window, softcap, block_size in [(None, None, 16), (37, None, 48), (37, 5.0, 16), (None, 20.0, 64)]:
        q, cache, metadata = lay_out_int8(lay_out, parts, block_size, padding=3, shift=2)
        options = (metadata, AttentionOptions(head_size**-0.5, window, softcap))
        out = cpu.paged_attention(q, cache, *options)
        rows = metadata.num_actual_tokens
        rounded = hadamard(as_int8(hadamard(q[:rows].double()), GROUP))
        plain = dequantize(cache, head_size).double()
        expected = reference.paged_attention(torch.cat([rounded, q[rows:].double()]), plain, *options)
        assert out.dtype == dtype and torch.equal(out[rows:], torch.zeros_like(out[rows:]))
        largest = max(s.v.abs().max().item() for s in sequences)
        slack = 2e-3 if dtype == torch.float32 else 2e-3 + 2**-8
        assert (out[:rows] - expected[:rows]).abs().max() <= slack * largest


def test_a_sink_takes_nothing_from_the_others(isa, sequence_type, lay_out):
    """The first position has nearly all of the weight and a value of nearly nothing, as trained models do it: what is
    left for the others is small and has to be right all the same."""
    sequence = sequence_type.random(200, 3, 1, 64, seed=1)
    sequence.q[:], sequence.k[1:] = sequence.q * 0.1, sequence.k[1:] * 0.1
    sequence.q[..., :8], sequence.k[0, :, :8] = 4.0, 3.0  # 12 nats above the others
    sequence.v[0] *= 1e-6
    q, cache, metadata = lay_out_int8(lay_out, [(sequence, 190, 10)], 16)
    out = cpu.paged_attention(q, cache, metadata, AttentionOptions(0.125))
    rounded = hadamard(as_int8(hadamard(q.double()), GROUP))
    expected = reference.paged_attention(rounded, dequantize(cache, 64).double(), metadata, AttentionOptions(0.125))
    assert expected.abs().max() < 0.01
    assert (out - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_positions_give_nan_to_the_rows_that_attend_to_them_alone(isa, sequence_type, lay_out, what, bad):
    sequence = sequence_type.random(100, 4, 2, 64, seed=2)
    getattr(sequence, what)[70, 1, 5] = bad
    q, cache, metadata = lay_out_int8(lay_out, [(sequence, 0, 100)], 16)
    spoilt = cpu.paged_attention(q, cache, metadata, AttentionOptions(0.125)).isnan()
    assert spoilt[70:, 2:].all() and not spoilt[:70].any() and not spoilt[:, :2].any()


@pytest.mark.parametrize("computed, new", [(4, 1), (63, 1), (299, 1), (900, 1), (0, 70), (768, 32), (768, 3)])
def test_a_query_with_a_nan_spoils_its_own_result(isa, sequence_type, lay_out, computed, new):
    """Alone and in company: also where there is nothing before it whose maximum would stay."""
    sequences = [sequence_type.random(computed + new, 4, 2, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    sequences[1].q[computed, 2, 5] = float("nan")
    for parts in ([sequences[1]], sequences):
        spoilt = cpu.paged_attention(
            *lay_out_int8(lay_out, [(s, computed, new) for s in parts], 16), AttentionOptions(0.125)
        ).isnan()
        at = (len(parts) - 1) // 2 * new
        assert spoilt[at, 2].all()
        spoilt[at, 2] = False
        assert not spoilt.any()


@st.composite
def steps(draw):
    heads, kv_heads = draw(st.sampled_from([(9, 3), (4, 4), (6, 1), (2, 1)]))
    edge = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 300, 520])
    parts = draw(st.lists(st.tuples(edge | st.integers(1, 320), st.integers(1, 80)), min_size=1, max_size=4))
    return {
        "heads": (heads, kv_heads, draw(st.sampled_from([32, 64, 96]))),
        "parts": [(length - min(new, length), min(new, length)) for length, new in parts],
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "block_sizes": draw(st.lists(st.sampled_from([16, 48, 64]), min_size=2, max_size=2)),
        "chunk": draw(st.integers(1, 50)),
        "options": (draw(st.sampled_from([None, None, 1, 20, 100])), draw(st.sampled_from([None, None, 15.0]))),
        "seed": draw(st.integers(0, 1000)),
    }


def test_blocks_that_a_window_has_passed_may_be_any(isa, sequence_type, lay_out):
    """Tables still name them after they were given back: here one of nothing but NaN."""
    shapes = [(299, 1), (250, 40), (96, 1), (0, 130)]
    parts = [(sequence_type.random(a + b, 4, 2, 64, seed), a, b) for seed, (a, b) in enumerate(shapes)]
    for window, block_size in [(37, 16), (1, 16), (100, 48)]:
        q, cache, metadata = lay_out_int8(lay_out, parts, block_size)
        table = metadata.block_table.clone()
        for r, (computed, _) in enumerate(shapes):
            table[r, : max(0, computed - window + 1) // block_size] = 0
        expected, out = (
            cpu.paged_attention(q, cache, replace(metadata, block_table=blocks), AttentionOptions(0.125, window))
            for blocks in (metadata.block_table, table)
        )
        assert expected.isfinite().all() and torch.equal(out, expected), (window, block_size)


@given(step=steps())
@settings(max_examples=25, **FIXTURES)
def test_a_row_does_not_depend_on_its_company(isa, threads, sequence_type, lay_out, step):
    """The bits of a row are the same in a mixed batch, alone, in chunks and as single decode rows."""

    def attend(parts, block_size, **layout):
        q, cache, metadata = lay_out_int8(lay_out, parts, block_size, **layout)
        return cpu.paged_attention(q, cache, metadata, AttentionOptions(0.125, *step["options"]))

    parts = [
        (sequence_type.random(computed + new, *step["heads"], step["seed"] + i, step["dtype"]), computed, new)
        for i, (computed, new) in enumerate(step["parts"])
    ]
    one, other = step["block_sizes"]
    threads(1)
    together = attend(parts, one, seed=step["seed"], padding=2)
    threads(2)
    assert torch.equal(attend(parts, other, seed=step["seed"] + 1, padding=2), together)
    rows = iter(together.split([new for _, _, new in parts] + [2]))
    for sequence, computed, new in parts:
        mine = next(rows)
        for size in (new, step["chunk"], 1):
            starts = list(range(computed, computed + new, size))
            for start in starts[:: max(1, len(starts) // 4)]:
                count = min(size, computed + new - start)
                chunk = attend([(sequence, start, count)], one)
                assert torch.equal(chunk, mine[start - computed : start - computed + count])


def test_one_long_sequence_is_split_over_threads_without_a_trace(isa, threads, sequence_type, lay_out):
    q, cache, metadata = lay_out_int8(lay_out, [(sequence_type.random(1500, 3, 1, 64, seed=5), 1499, 1)], 16)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(cpu.paged_attention(q, cache, metadata, AttentionOptions(0.125)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_caches_that_no_kernel_can_read_are_refused(isa):
    def write_to(cache: Tensor, head_size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        qkv, zero = torch.randn(1, 3 * head_size).to(dtype), torch.zeros(1, dtype=torch.int64)
        cpu.rope_and_cache(qkv, zero, None, cache, zero, 1, 1, head_size, None, None, 1e-6, scale, 1.0)

    for message, cache, options in [
        ("int8 KV cache", empty(2, 1, 16, 64), {"head_size": 64, "scale": 2.0}),
        ("head_size=48", empty(2, 1, 16, 48), {"head_size": 48}),
        ("block_size=8", empty(2, 1, 8, 64), {"head_size": 64}),
        ("float16", empty(2, 1, 16, 64), {"head_size": 64, "dtype": torch.float16}),
        ("68 bytes", empty(2, 1, 16, 64), {"head_size": 128}),
    ]:
        with pytest.raises(ValueError, match=message):
            write_to(cache, **options)
