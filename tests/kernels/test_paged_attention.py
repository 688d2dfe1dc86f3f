"""Paged attention: right against plain torch in float64 and torch's SDPA, and bit-equal in any company."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import emulated_amx
from support.emulated_kernels import all_parameters
from torch.nn import functional

import octavo_kernels
from octavo_kernels import AttentionOptions, cpu, reference
from octavo_kernels.cpu import compiler, library
from octavo_kernels.cpu.attention import from_pair_layout, has_pair_layout, to_pair_layout

C_ISAS = all_parameters()
FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def attend(parts, lay_out, scale, window=None, softcap=None, backend=cpu, **layout):
    q, kv_cache, metadata = lay_out(parts, **layout)
    return backend.paged_attention(q, ordered(kv_cache), metadata, AttentionOptions(scale, window, softcap))


def multiplies_pairs():
    return (chosen := library.get_library()) is not None and chosen.isa in library.PAIR_ISAS


def ordered(kv_cache):
    """A cache as the library in use has it."""
    return to_pair_layout(kv_cache) if has_pair_layout(kv_cache) else kv_cache


def with_passed_blocks(metadata, parts, window: int, block_size: int, block: int):
    """The step with ``block`` in place of the blocks that no query of it sees."""
    table = metadata.block_table.clone()
    for r, (_, computed, _) in enumerate(parts):
        table[r, : max(0, computed - window + 1) // block_size] = block
    return replace(metadata, block_table=table)


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_blocks_that_a_window_has_passed_may_be_any(isa, sequence_type, lay_out, kv_dtype):
    """Tables still name them after they were given back: here one full of NaN."""
    shapes = [(299, 1), (0, 5), (250, 40), (63, 1), (96, 1), (0, 130)]
    parts = [(sequence_type.random(a + b, 4, 2, 64, seed), a, b) for seed, (a, b) in enumerate(shapes)]
    for window, block_size in [(37, 16), (1, 16), (16, 16), (100, 7), (17, 48)]:
        q, kv_cache, metadata = lay_out(parts, block_size, kv_dtype=getattr(torch, kv_dtype))
        passed = with_passed_blocks(metadata, parts, window, block_size, 0)
        assert not torch.equal(passed.block_table, metadata.block_table)
        expected, out = (
            cpu.paged_attention(q, ordered(kv_cache), step, AttentionOptions(0.125, window))
            for step in (metadata, passed)
        )
        assert expected.isfinite().all() and torch.equal(out, expected), (window, block_size)


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk, block_size", [(37, 16), (16, 16), (1, 16), (100, 7), (64, 48), (1000, 16)])
def test_windows_that_do_not_slide_begin_at_their_multiples(
    isa, sequence_type, lay_out, assert_close, kv_dtype, chunk, block_size
):
    """Against SDPA with a mask; blocks that lie before the first query's window hold NaN."""
    shapes = [(299, 1), (0, 5), (250, 40), (63, 1), (64, 3), (99, 1), (0, 130)]
    parts = [(sequence_type.random(a + b, 4, 2, 64, seed), a, b) for seed, (a, b) in enumerate(shapes)]
    q, kv_cache, metadata = lay_out(parts, block_size, kv_dtype=getattr(torch, kv_dtype))
    table = metadata.block_table.clone()
    for r, (computed, _) in enumerate(shapes):
        table[r, : computed // chunk * chunk // block_size] = 0
    step = replace(metadata, block_table=table)
    exact = []
    for sequence, computed, new in parts:
        queries, keys = torch.arange(computed, computed + new)[:, None], torch.arange(computed + new)[None]
        mask = (keys <= queries) & (keys >= queries // chunk * chunk)
        q_of, k, v = (x.double().transpose(0, 1) for x in (sequence.q[computed:], sequence.k, sequence.v))
        if kv_dtype == "bfloat16":
            k, v = k.bfloat16().double(), v.bfloat16().double()
        k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
        exact.append(functional.scaled_dot_product_attention(q_of, k, v, mask).transpose(0, 1))
    options = AttentionOptions(0.125, chunk, chunked=True)
    out = cpu.paged_attention(q, ordered(kv_cache), step, options)
    plain = reference.paged_attention(q, kv_cache, step, options)
    # Where pairs of bfloat16 are multiplied, queries are rounded too.
    bound = 2.0 if kv_dtype == "float32" else 1e5
    assert_close(out, torch.cat(exact), plain, bound, slack=1e-6)
    assert_close(plain, torch.cat(exact), plain)


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@pytest.mark.parametrize("dtype, kv_dtype", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize(
    "heads, kv_heads, head_size", [(9, 3, 64), (4, 4, 80), (5, 1, 120), (16, 2, 128), (2, 1, 8), (2, 2, 256)]
)
def test_mixed_batch_agrees_with_plain_torch(
    isa, sequence_type, lay_out, assert_close, heads, kv_heads, head_size, dtype, kv_dtype
):
    """Decode, chunked and whole prompts in one call, over poisoned pages, agree with float64 as torch does.

    A machine that multiplies pairs of bfloat16 works in a bfloat16 cache's precision, others in that of the queries.
    """
    dtype, kv_dtype = getattr(torch, dtype), getattr(torch, kv_dtype)
    shapes = [(299, 1), (0, 5), (250, 40), (0, 1), (63, 1), (64, 1), (65, 1), (63, 66)]
    sequences = [
        sequence_type.random(a + b, heads, kv_heads, head_size, seed, dtype) for seed, (a, b) in enumerate(shapes)
    ]
    parts = [(s, a, b) for s, (a, b) in zip(sequences, shapes, strict=True)]
    for window, softcap, block_size in [
        (None, None, 16),
        (37, None, 7),
        (37, 5.0, 48),
        (None, 20.0, 1),
        (250, 5.0, 32),
    ]:
        q, kv_cache, metadata = lay_out(parts, block_size, kv_dtype=kv_dtype, padding=3, shift=2)
        options = (metadata, AttentionOptions(head_size**-0.5, window, softcap))
        out = cpu.paged_attention(q, ordered(kv_cache), *options)
        exact = reference.paged_attention(q.double(), kv_cache.double(), *options)
        plain = reference.paged_attention(q.to(kv_dtype) if multiplies_pairs() else q, kv_cache, *options)
        rows = metadata.num_actual_tokens
        assert out.dtype == dtype
        assert_close(out[:rows], exact[:rows], plain[:rows], slack=1e-6)
        assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_take_part_in_the_softmax_once(isa, sequence_type, lay_out, assert_close, dtype):
    """Also of rows whose positions several splits cover, on one thread and on several."""
    dtype, sinks = getattr(torch, dtype), torch.tensor([-30.0, -1.0, 0.0, 2.0, 9.0, 40.0])
    shapes = [(600, 1), (0, 5), (250, 40), (0, 1)]
    parts = [(sequence_type.random(a + b, 6, 2, 64, a, dtype), a, b) for a, b in shapes]
    q, kv_cache, metadata = lay_out(parts, 16, kv_dtype=dtype, padding=3)
    for window, softcap in [(None, None), (37, 5.0)]:
        without = AttentionOptions(0.125, window, softcap)
        options = (metadata, replace(without, sinks=sinks))
        exact = reference.paged_attention(q.double(), kv_cache.double(), *options)
        plain = reference.paged_attention(q, kv_cache, *options)
        out = cpu.paged_attention(q, ordered(kv_cache), *options)
        assert_close(out[:-3], exact[:-3], plain[:-3], slack=1e-6)
        assert not torch.equal(out, cpu.paged_attention(q, ordered(kv_cache), metadata, without))
        alone = lay_out(parts[:1], 16, kv_dtype=dtype)
        alone = cpu.paged_attention(alone[0], ordered(alone[1]), alone[2], *options[1:])
        assert torch.equal(alone[:1], out[:1]), "split over the threads or not"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_attend_up_to_their_limit(isa, sequence_type, lay_out, assert_close, threads, dtype):
    """Later positions than their own, past the end too, by one thread and by several; and as in an encoder."""
    dtype = getattr(torch, dtype)
    shapes = [(0, 90), (600, 1), (250, 40), (300, 5)]
    parts = [(sequence_type.random(a + b, 6, 2, 64, a, dtype), a, b) for a, b in shapes]
    q, kv_cache, metadata = lay_out(parts, 16, kv_dtype=dtype, padding=3)
    positions = torch.cat([torch.arange(a, a + b) for a, b in shapes] + [torch.zeros(3, dtype=torch.int64)])
    ahead = torch.randint(0, 130, positions.shape, generator=torch.Generator().manual_seed(1))
    limit = torch.where(ahead < 30, positions, positions + ahead).int()
    for window, softcap in [(None, None), (37, 5.0)]:
        options = (metadata, AttentionOptions(0.125, window, softcap), limit)
        exact = reference.paged_attention(q.double(), kv_cache.double(), *options)
        plain = reference.paged_attention(q, kv_cache, *options)
        outs = []
        for count in (1, 4):
            threads(count)
            outs.append(cpu.paged_attention(q, ordered(kv_cache), *options))
            assert_close(outs[-1][:-3], exact[:-3], plain[:-3], slack=1e-6)
        assert torch.equal(*outs), "depends on the threads"
        assert not torch.equal(outs[0], cpu.paged_attention(q, ordered(kv_cache), *options[:-1]))
    sequence, _, length = parts[0]
    whole = lay_out(parts[:1], 16, kv_dtype=dtype)
    limit = torch.full((length,), length - 1, dtype=torch.int32)
    out = cpu.paged_attention(whole[0], ordered(whole[1]), whole[2], AttentionOptions(0.125), limit=limit)
    heads = [x.double().transpose(0, 1)[None] for x in (sequence.q, sequence.k, sequence.v)]
    expected = functional.scaled_dot_product_attention(*heads, enable_gqa=True, scale=0.125)[0].transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 130])
def test_prompt_agrees_with_sdpa(isa, sequence_type, lay_out, length):
    sequence = sequence_type.random(length, 9, 3, 64, seed=length)
    out = attend([(sequence, 0, length)], lay_out, 0.125, block_size=16)
    q, k, v = (x.transpose(0, 1)[None] for x in (sequence.q, sequence.k, sequence.v))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.125)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=2e-6, rtol=2e-5)


def test_large_scores_and_far_offsets_stay_finite(isa, sequence_type, lay_out, assert_close):
    """Scores of +-1000 neither overflow nor lose the row."""
    sequence = sequence_type.random(150, 2, 1, 64, seed=1)
    sequence.q *= 60
    q, kv_cache, metadata = lay_out([(sequence, 140, 10)], 16)
    out = cpu.paged_attention(q, kv_cache, metadata, AttentionOptions(1.0))
    exact = reference.paged_attention(q.double(), kv_cache.double(), metadata, AttentionOptions(1.0))
    assert_close(out, exact, reference.paged_attention(q, kv_cache, metadata, AttentionOptions(1.0)), slack=1e-4)


def test_rows_without_work(isa, sequence_type, lay_out):
    """Sequences of a padded batch that have no rows, and lengths of 0, change nothing and read nothing."""
    sequence = sequence_type.random(20, 4, 2, 16, seed=3)
    q, kv_cache, metadata = lay_out([(sequence, 10, 10)], 8)
    alone = cpu.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25))
    metadata.query_start_loc = torch.tensor([0, 10, 10, 10], dtype=torch.int32)
    metadata.seq_lens = torch.tensor([20, 0, 0], dtype=torch.int32)
    metadata.block_table = torch.cat(
        [metadata.block_table, torch.full((2, metadata.block_table.shape[1]), 99999)]
    ).int()
    assert torch.equal(cpu.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25)), alone)


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("computed, new", [(4, 1), (63, 1), (299, 1), (900, 1), (0, 70), (768, 32), (768, 3)])
def test_a_query_with_a_nan_spoils_its_own_result(isa, sequence_type, lay_out, kv_dtype, computed, new):
    """Alone and in company: also where there is nothing before it whose maximum would stay."""
    sequences = [sequence_type.random(computed + new, 4, 2, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    sequences[1].q[computed, 2, 5] = float("nan")
    for parts in ([sequences[1]], sequences):
        spoilt = attend([(s, computed, new) for s in parts], lay_out, 0.125, block_size=16, kv_dtype=kv_dtype).isnan()
        at = (len(parts) - 1) // 2 * new
        assert spoilt[at, 2].all()
        spoilt[at, 2] = False
        assert not spoilt.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [30.0, 1e4, 1e8, 1e12])
def test_the_largest_score_wins_however_large_it_is(isa, sequence_type, lay_out, dtype, size):
    """Scores far apart leave each row one value; those before the last tiles are small, so that maxima grow late."""
    shapes = [(0, 150), (299, 1), (190, 40)]
    parts = [(sequence_type.random(a + b, 4, 2, 64, seed, dtype), a, b) for seed, (a, b) in enumerate(shapes)]
    for sequence, _, _ in parts:
        sequence.k[:70] /= 1000
        sequence.k.mul_(size)
    q, kv_cache, metadata = lay_out(parts, 16)
    out = cpu.paged_attention(q, ordered(kv_cache), metadata, AttentionOptions(0.125))
    # Where pairs of bfloat16 are multiplied, queries are rounded too.
    rounded = q.to(kv_cache.dtype).double()
    exact = reference.paged_attention(rounded, kv_cache.double(), metadata, AttentionOptions(0.125))
    off = (out.double() - exact).abs().amax(-1) > 0.05
    assert out.isfinite().all() and off.double().mean() < (0.2 if size == 30 else 0.01)


# ---------------------------------------------------------------- bit-equal


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_may_lie_anywhere(isa, kv_dtype):
    """Layers beside each other in a block give what caches of their own give and keep out of each other's bytes."""
    if problem := cpu.attention_problem(16, torch.float32, kv_dtype, 64):
        pytest.skip(problem)
    width = 64 + cpu.kv_scale_bytes(kv_dtype, 64)
    blocks = torch.zeros(9, 3, 2, 2, 16, width).to(kv_dtype)  # of three layers
    beside, own = blocks[:, 1].transpose(0, 1), torch.zeros(2, 9, 2, 16, width).to(kv_dtype)
    table = torch.randperm(8)[:5].int().view(1, 5) + 1
    positions = torch.arange(70)
    slots = table[0, positions // 16].long() * 16 + positions % 16
    metadata = octavo_kernels.AttentionMetadata(
        query_start_loc=torch.tensor([0, 70], dtype=torch.int32),
        seq_lens=torch.tensor([70], dtype=torch.int32),
        block_table=table,
        slot_mapping=slots,
        max_query_len=70,
        max_seq_len=70,
        num_actual_tokens=70,
    )
    qkv, results = torch.randn(70, 8 * 64), []
    for kv_cache in (beside, own):
        q = cpu.rope_and_cache(qkv, positions, None, kv_cache, slots, 4, 2, 64)
        results.append(cpu.paged_attention(q, kv_cache, metadata, AttentionOptions(0.125)))
    assert torch.equal(*results) and torch.equal(beside, own) and own.any()
    assert not blocks[:, ::2].any()


@st.composite
def steps(draw):
    """A batch (computed, new) of sequences, and how each is to be chunked when it comes alone."""
    heads, kv_heads = draw(st.sampled_from([(9, 3), (4, 4), (6, 1), (2, 1)]))
    head_size = draw(st.sampled_from([8, 16, 24, 64, 96]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    edge = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 300, 520])
    parts = draw(st.lists(st.tuples(edge | st.integers(1, 320), st.integers(1, 80)), min_size=1, max_size=5))
    return {
        "heads": (heads, kv_heads, head_size),
        "parts": [(length - min(new, length), min(new, length)) for length, new in parts],
        "dtype": dtype,
        "block_sizes": draw(st.lists(st.sampled_from([1, 3, 16, 64]), min_size=2, max_size=2)),
        "chunk": draw(st.integers(1, 50)),
        "window": draw(st.sampled_from([None, None, 1, 20, 100])),
        "softcap": draw(st.sampled_from([None, None, 15.0])),
        "growth": draw(st.sampled_from([0, 0, 20, 1e5])),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@given(step=steps())
@settings(max_examples=40, **FIXTURES)
def test_a_row_does_not_depend_on_its_company(isa, threads, sequence_type, lay_out, step):
    """The bits of a row are the same in a mixed batch, alone, in chunks, as single decode rows, for every block size,
    page order and number of threads."""
    parts = [
        (sequence_type.random(computed + new, *step["heads"], step["seed"] + i, step["dtype"]), computed, new)
        for i, (computed, new) in enumerate(step["parts"])
    ]
    for sequence, _, _ in parts:  # maxima that grow from tile to tile
        sequence.k.mul_(1 + step["growth"] * torch.linspace(0, 1, len(sequence.k))[:, None, None])
    options = {"scale": step["heads"][2] ** -0.5, "window": step["window"], "softcap": step["softcap"]}
    one, other = step["block_sizes"]
    threads(1)
    together = attend(parts, lay_out, block_size=one, seed=step["seed"], padding=2, **options)
    threads(2)
    assert torch.equal(attend(parts, lay_out, block_size=other, seed=step["seed"] + 1, padding=2, **options), together)
    rows = iter(together.split([new for _, _, new in parts] + [2]))
    for sequence, computed, new in parts:
        mine = next(rows)
        assert torch.equal(attend([(sequence, computed, new)], lay_out, block_size=other, **options), mine)
        for size in (step["chunk"], 1):
            starts = range(computed, computed + new, size)
            if len(starts) > 12:  # a few single rows are enough
                starts = list(starts)[:: len(starts) // 6]
            for start in starts:
                count = min(size, computed + new - start)
                chunk = attend([(sequence, start, count)], lay_out, block_size=one, **options)
                assert torch.equal(chunk, mine[start - computed : start - computed + count])


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
def test_long_single_sequence_is_split_over_threads_without_a_trace(isa, threads, sequence_type, lay_out):
    """One long decode row is shared out to the threads in parts; the bits stay those of one thread."""
    sequence = sequence_type.random(1500, 3, 1, 64, seed=5)
    results = []
    for count, window in itertools.product((1, 2, 3), (None, 700)):
        threads(count)
        results.append(attend([(sequence, 1499, 1)], lay_out, 0.125, window=window, block_size=16))
    assert torch.equal(results[0], results[2]) and torch.equal(results[0], results[4])
    assert torch.equal(results[1], results[3]) and torch.equal(results[1], results[5])
    assert not torch.equal(results[0], results[1])


@pytest.mark.skipif(compiler.AMX not in compiler.supported_isas(), reason="no matrix units here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_emulator_of_matrix_units_has_their_bits(sequence_type, lay_out, dtype):
    parts = [(sequence_type.random(n + new, 6, 2, 64, n, dtype), n, new) for n, new in ((0, 150), (300, 1), (64, 40))]
    before, outs = library.get_library(), []
    for chosen in (library.load(compiler.AMX), emulated_amx.load("avx512bf16")):
        library.use_library(chosen)
        outs.append(attend(parts, lay_out, 0.125, block_size=16, kv_dtype=torch.bfloat16))
    library.use_library(before)
    assert torch.equal(*outs)


@given(blocks=st.integers(1, 3), heads=st.integers(1, 3), chunks=st.integers(1, 3), width=st.integers(1, 4))
@settings(deadline=None)
def test_the_order_of_pairs_is_undone(blocks, heads, chunks, width):
    """And puts neighbours side by side: elements of a key, positions of a value."""
    plain = torch.arange(2 * blocks * heads * chunks * 16 * width * 32).view(2, blocks, heads, chunks * 16, width * 32)
    paired = to_pair_layout(plain)
    assert torch.equal(from_pair_layout(paired), plain)
    assert paired[0, 0, 0].flatten()[:4].tolist() == plain[0, 0, 0, [0, 0, 1, 1], [0, 1, 0, 1]].tolist()
    assert paired[1, 0, 0].flatten()[:4].tolist() == plain[1, 0, 0, [0, 1, 0, 1], [0, 0, 1, 1]].tolist()


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
def test_fallbacks_to_plain_torch_read_and_write_the_same_cache(isa, sequence_type, lay_out):
    """Scales of a cache are not the C kernels' business: written and read by plain torch, in their order."""
    sequence = sequence_type.random(40, 4, 2, 64, 0, torch.bfloat16)
    q, kv_cache, metadata = lay_out([(sequence, 30, 10)], 16)
    kv_cache.nan_to_num_(0.0)
    qkv = torch.cat([q, sequence.k[30:], sequence.v[30:]], 1).flatten(1) * 0.5
    args = (metadata.slot_mapping, 4, 2, 64, None, None, 1e-6, 2.0, 2.0)
    mine, expected = ordered(kv_cache).clone(), kv_cache.clone()
    out = cpu.rope_and_cache(qkv, torch.arange(10), None, mine, *args)
    assert torch.equal(out, reference.rope_and_cache(qkv, torch.arange(10), None, expected, *args))
    assert torch.equal(mine, ordered(expected))
    options = (metadata, AttentionOptions(0.125, k_scale=2.0, v_scale=2.0))
    assert torch.equal(cpu.paged_attention(q, mine, *options), reference.paged_attention(q, expected, *options))


def test_module_function_dispatches_by_device(sequence_type, lay_out):
    sequence = sequence_type.random(9, 2, 1, 16, seed=0)
    q, kv_cache, metadata = lay_out([(sequence, 0, 9)], 4)
    assert torch.equal(
        octavo_kernels.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25)),
        cpu.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25)),
    )
