"""Paged attention in Triton: right against plain torch in float64, for every kind of step and any splitting."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_kernels import AttentionMetadata, AttentionOptions, reference
from octavo_kernels.triton import INTERPRETED, attention
from octavo_kernels.triton import attention_configs as configs

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU: TRITON_INTERPRET=0")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tiles and chunks: short sequences have many of them."""
    if not INTERPRETED:
        return
    tile = configs.Config(16, 16, 4, 1)
    monkeypatch.setattr(configs, "prefill_config", lambda *a, **k: replace(tile, block_m=32))
    monkeypatch.setattr(
        configs,
        "decode_config",
        lambda head_size, dtype, kv_dtype, group, device, tokens=None: replace(
            tile, block_m=configs.next_power_of_2(max(16, group * (tokens or 2)))
        ),
    )
    exact = replace(tile, block_n=32)
    for name in ("prefill_config", "decode_config"):
        other = getattr(configs, name)
        monkeypatch.setattr(
            configs,
            name,
            lambda head_size, dtype, *a, other=other, **k: (
                exact if dtype == torch.float32 else other(head_size, dtype, *a, **k)
            ),
        )
    split_into(monkeypatch, 12, 32)
    monkeypatch.setattr(configs, "EXACT_CHUNK", 64)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that nobody has written holds NaN: a result left out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def split_into(monkeypatch, programs: int, min_chunk: int) -> None:
    monkeypatch.setattr(configs, "splits", lambda device: configs.Splits(programs, min_chunk))


def make_parts(sequence_type, shapes, heads, kv_heads, head_size, dtype, seed=0):
    return [
        (sequence_type.random(computed + new, heads, kv_heads, head_size, seed + i, dtype), computed, new)
        for i, (computed, new) in enumerate(shapes)
    ]


def to_device(device, q, kv_cache, metadata):
    metadata = copy.copy(metadata)
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        setattr(metadata, name, getattr(metadata, name).to(device))
    return q.to(device), kv_cache.to(device), metadata


def attend(device, q, kv_cache, metadata, *options, limit=None, **named):
    return attention.paged_attention(
        *to_device(device, q, kv_cache, metadata), AttentionOptions(*options, **named), limit
    ).cpu()


def factor(dtype: torch.dtype) -> float:
    """How much less exact than plain torch attention may be: it rounds the weights before they meet the values, as
    tensor cores ask for, and of bfloat16's 8 bits that is now and then a little more than the final rounding."""
    return 3.0 if dtype == torch.bfloat16 else 2.0


def check(device, assert_close, q, kv_cache, metadata, *options, limit=None, **named):
    out = attend(device, q, kv_cache, metadata, *options, limit=limit, **named)
    options = AttentionOptions(*options, **named)
    exact = reference.paged_attention(q.double(), kv_cache.double(), metadata, options, limit)
    plain = reference.paged_attention(q, kv_cache, metadata, options, limit)
    rows = metadata.num_actual_tokens
    assert out.dtype == q.dtype
    assert_close(out[:rows], exact[:rows], plain[:rows], factor(q.dtype), slack=1e-6)
    assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))
    return out


# ---------------------------------------------------------------- right


@pytest.mark.sampled
@pytest.mark.parametrize(
    "heads, kv_heads, head_size, block_size, window, softcap",
    [
        (4, 2, 64, 16, None, None),
        (3, 1, 80, 48, 37, None),
        (2, 2, 96, 16, None, 20.0),
        (2, 1, 128, 32, 50, 5.0),
        (1, 1, 256, 16, None, None),
        (2, 1, 512, 16, 30, None),
    ],
)
def test_mixed_step_agrees_with_plain_torch(
    device, sequence_type, lay_out, assert_close, dtype, heads, kv_heads, head_size, block_size, window, softcap
):
    """Decode rows, drafts and prompts in one call, over pages full of NaN where nothing was written."""
    shapes = [(150, 1), (0, 1), (30, 3), (15, 40), (0, 17), (16, 8)]
    parts = make_parts(sequence_type, shapes, heads, kv_heads, head_size, dtype)
    q, kv_cache, metadata = lay_out(parts, block_size, padding=2, shift=1)
    check(device, assert_close, q, kv_cache, metadata, head_size**-0.5, window, softcap)


def test_sinks_take_part_in_the_softmax_once(device, sequence_type, lay_out, assert_close, dtype):
    """In rows with one chunk of keys and with several, and in prompts."""
    sinks = torch.tensor([-1.0, 0.0, 3.0, 20.0], device=device)
    parts = make_parts(sequence_type, [(300, 1), (0, 1), (15, 40)], 4, 2, 32, dtype)
    q, kv_cache, metadata = lay_out(parts, 16, padding=2)
    without = attend(device, q, kv_cache, metadata, 0.2, 40)
    out = check(device, assert_close, q, kv_cache, metadata, 0.2, 40, sinks=sinks)
    assert not torch.equal(out, without)


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("window, block_size", [(37, 16), (1, 16), (16, 16), (50, 48)])
def test_blocks_that_a_window_has_passed_may_be_any(device, sequence_type, lay_out, dtype, window, block_size):
    """Their entries in tables are the null block, or what they were before they were given back: here one of NaN."""
    shapes = [(199, 1), (150, 40), (63, 1), (96, 3), (0, 70)]
    parts = [(sequence_type.random(a + b, 4, 2, 64, seed, dtype), a, b) for seed, (a, b) in enumerate(shapes)]
    q, kv_cache, metadata = lay_out(parts, block_size)
    table = metadata.block_table.clone()
    for r, (computed, _) in enumerate(shapes):
        table[r, : max(0, computed - window + 1) // block_size] = 0
    expected, out = (
        attend(device, q, kv_cache, replace(metadata, block_table=blocks), 0.125, window)
        for blocks in (metadata.block_table, table)
    )
    assert expected.isfinite().all() and torch.equal(out, expected)


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("chunk, block_size", [(37, 16), (16, 16), (1, 16), (50, 48), (1000, 16)])
def test_windows_that_do_not_slide_begin_at_their_multiples(
    device, sequence_type, lay_out, assert_close, dtype, chunk, block_size
):
    """In single rows, drafts and prompts; blocks that lie before the first query's window hold NaN."""
    shapes = [(199, 1), (150, 40), (63, 1), (64, 3), (73, 3), (0, 70)]
    parts = make_parts(sequence_type, shapes, 4, 2, 32, dtype)
    q, kv_cache, metadata = lay_out(parts, block_size, padding=2)
    table = metadata.block_table.clone()
    for r, (computed, _) in enumerate(shapes):
        table[r, : computed // chunk * chunk // block_size] = 0
    options = {"scale": 0.2, "window": chunk, "chunked": True}
    out = check(device, assert_close, q, kv_cache, replace(metadata, block_table=table), **options)
    assert torch.equal(out, attend(device, q, kv_cache, metadata, **options))
    if dtype == torch.float32:
        alone = attend(device, *lay_out(parts[1:2], block_size), **options)
        assert torch.equal(alone, out[1:41])


@pytest.mark.sampled
@pytest.mark.parametrize("window", [None, 37])
def test_rows_attend_up_to_their_limit(device, sequence_type, lay_out, assert_close, dtype, window):
    """Later positions than their own: in prompts, drafts and single rows, in one chunk and in several."""
    shapes = [(15, 40), (0, 90), (150, 3), (30, 8), (9, 1)]
    parts = make_parts(sequence_type, shapes, 4, 2, 32, dtype)
    q, kv_cache, metadata = lay_out(parts, 16, padding=2)
    positions = torch.cat([torch.arange(a, a + b) for a, b in shapes] + [torch.zeros(2, dtype=torch.int64)])
    ahead = torch.randint(0, 60, positions.shape, generator=torch.Generator().manual_seed(1))
    limit = torch.where(ahead < 15, positions, positions + ahead).int().to(device)
    out = check(device, assert_close, q, kv_cache, metadata, 0.2, window, limit=limit)
    assert not torch.equal(out, attend(device, q, kv_cache, metadata, 0.2, window))
    check(device, assert_close, q, kv_cache, metadata, 0.2, window, limit=torch.full_like(limit, 1000))
    if dtype == torch.float32:
        alone = lay_out(parts[1:2], 16)
        rows = slice(40, 130)
        assert torch.equal(attend(device, *alone, 0.2, window, limit=limit[rows].contiguous()), out[rows])


@pytest.mark.sampled
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 160])
def test_decode_at_the_edges_of_pages_and_chunks(device, sequence_type, lay_out, assert_close, dtype, length):
    parts = make_parts(sequence_type, [(length - 1, 1), (40, 1)], 2, 1, 32, dtype, seed=length)
    check(device, assert_close, *lay_out(parts, 16), 0.2)


@pytest.mark.sampled
@pytest.mark.parametrize("count", range(1, 9))
def test_several_queries_of_a_sequence(device, sequence_type, lay_out, assert_close, dtype, count):
    """Drafts to verify: 1 to 8 queries a sequence, also where a window begins within them."""
    parts = make_parts(sequence_type, [(61, count), (0, count), (130, 1)], 4, 2, 16, dtype, seed=count)
    window = None if count % 2 else 40
    check(device, assert_close, *lay_out(parts, 16), 0.25, window)


@st.composite
def steps(draw):
    heads = draw(st.sampled_from([(2, 2), (3, 1), (4, 2)]))
    parts = draw(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12) | st.just(35)), min_size=1, max_size=3))
    return {
        "heads": heads,
        "parts": parts,
        "block_size": draw(st.sampled_from([16, 32, 48])),
        "padding": draw(st.integers(0, 2)),
        "programs": draw(st.integers(1, 30)),
        "window": draw(st.sampled_from([None, None, 1, 16, 50])),
        "softcap": draw(st.sampled_from([None, None, 5.0])),
        "seed": draw(st.integers(0, 1000)),
    }


@given(step=steps())
@settings(max_examples=8, **FIXTURES)
def test_any_step_agrees_with_plain_torch(device, monkeypatch, sequence_type, lay_out, assert_close, dtype, step):
    split_into(monkeypatch, step["programs"], 16)
    parts = make_parts(sequence_type, step["parts"], *step["heads"], 16, dtype, step["seed"])
    batch = lay_out(parts, step["block_size"], seed=step["seed"], padding=step["padding"])
    check(device, assert_close, *batch, 0.25, step["window"], step["softcap"])


@given(step=steps(), unused=st.integers(0, 2), longest=st.sampled_from([128, 300]))
@settings(max_examples=12, **FIXTURES)
def test_any_step_as_a_graph_has_it(
    device, monkeypatch, sequence_type, lay_out, assert_close, dtype, step, unused, longest
):
    """A captured step knows upper bounds, and has room for sequences that are not there, with any length."""
    split_into(monkeypatch, step["programs"], 16)
    parts = make_parts(sequence_type, step["parts"], *step["heads"], 16, dtype, step["seed"])
    q, kv_cache, metadata = lay_out(parts, step["block_size"], seed=step["seed"], padding=step["padding"])
    exact = reference.paged_attention(
        q.double(), kv_cache.double(), metadata, AttentionOptions(0.25, step["window"], step["softcap"])
    )
    plain = reference.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25, step["window"], step["softcap"]))
    rows = metadata.num_actual_tokens
    stale = torch.tensor([70, 0], dtype=torch.int32)[:unused]
    table = metadata.block_table
    captured = AttentionMetadata(
        query_start_loc=torch.cat([metadata.query_start_loc, torch.full((unused,), rows, dtype=torch.int32)]),
        seq_lens=torch.cat([metadata.seq_lens, stale]),
        block_table=torch.cat([table, torch.full((unused, table.shape[1]), 2**30, dtype=torch.int32)]),
        slot_mapping=metadata.slot_mapping,
        max_query_len=max(len(q), 9),
        max_seq_len=longest,
        num_actual_tokens=len(q),
    )
    out = attend(device, q, kv_cache, captured, 0.25, step["window"], step["softcap"])
    assert_close(out[:rows], exact[:rows], plain[:rows], factor(q.dtype), slack=1e-6)
    assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))


def test_large_scores_stay_finite(device, sequence_type, lay_out, assert_close, dtype):
    parts = make_parts(sequence_type, [(50, 1), (20, 20)], 2, 1, 32, dtype)
    for sequence, _, _ in parts:
        sequence.q *= 40
    q, kv_cache, metadata = lay_out(parts, 16)
    out = attend(device, q, kv_cache, metadata, 1.0)
    exact = reference.paged_attention(q.double(), kv_cache.double(), metadata, AttentionOptions(1.0))
    assert_close(
        out, exact, reference.paged_attention(q, kv_cache, metadata, AttentionOptions(1.0)), factor(dtype), slack=1e-4
    )


# ---------------------------------------------------------------- memory


def test_rows_without_work_give_zeros_and_read_nothing(device, sequence_type, lay_out, dtype):
    """A padded batch: sequences without rows, sequences of length 0 with a row, rows of no sequence at all."""
    (part,) = make_parts(sequence_type, [(10, 3)], 4, 2, 16, dtype)
    q, kv_cache, metadata = lay_out([part], 16)
    alone = attend(device, q, kv_cache, metadata, 0.25)
    q = torch.cat([q, torch.full((5, *q.shape[1:]), float("nan"), dtype=dtype)])
    metadata.query_start_loc = torch.tensor([0, 3, 3, 4, 5], dtype=torch.int32)
    metadata.seq_lens = torch.tensor([13, 0, 0, 0], dtype=torch.int32)
    far = torch.full((3, metadata.block_table.shape[1]), 2**30, dtype=torch.int32)
    metadata.block_table = torch.cat([metadata.block_table, far])
    for actual in (8, 5, 3, 2):
        metadata.num_actual_tokens = actual
        out = attend(device, q, kv_cache, metadata, 0.25)
        rows = min(actual, 3)
        assert torch.equal(out[:rows], alone[:rows])
        assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))


def test_prompts_of_padding_cost_no_row(device, sequence_type, lay_out):
    """Sequences after the actual rows may be prompts too: theirs are zeros, the others' right."""
    parts = make_parts(sequence_type, [(3, 40), (2, 30), (0, 60)], 2, 1, 16, torch.float16)
    q, kv_cache, metadata = lay_out(parts, 16)
    whole = attend(device, q, kv_cache, metadata, 0.25)
    metadata.num_actual_tokens = 50
    out = attend(device, q, kv_cache, metadata, 0.25)
    assert torch.equal(out[:50], whole[:50])
    assert torch.equal(out[50:], torch.zeros_like(out[50:]))


@pytest.mark.long  # the interpreter copies all 12 GB
@pytest.mark.parametrize("new", [1, 12])
def test_pages_beyond_2_to_31_elements(device, sequence_type, lay_out, new):
    """A cache of 12 GB of addresses, of which a few pages are ever touched."""
    parts = make_parts(sequence_type, [(40, new)], 2, 1, 16, torch.float16)
    q, kv_cache, metadata = lay_out(parts, 16)
    stride = 2**29 + 16
    blocks = kv_cache.shape[1]
    far = torch.empty(2 * blocks * stride, dtype=torch.float16, device=device).as_strided(
        kv_cache.shape, (blocks * stride, stride, *kv_cache.stride()[2:])
    )
    assert metadata.block_table[0, : -(-(40 + new) // 16)].max() * stride > 2**31
    far.copy_(kv_cache)
    near = attend(device, q, kv_cache, metadata, 0.25)
    out = attention.paged_attention(
        q.to(device), far, to_device(device, q, q, metadata)[2], AttentionOptions(0.25)
    ).cpu()
    assert torch.equal(out, near)


def test_keys_and_values_in_float8(device, sequence_type, lay_out, assert_close, dtype):
    """The scales of keys and values come in where they cost nothing; the cache's own numbers are exact."""
    parts = make_parts(sequence_type, [(90, 1), (20, 3), (5, 20)], 4, 2, 32, dtype)
    q, kv_cache, metadata = lay_out(parts, 16, kv_dtype=torch.float8_e4m3fn)
    out = attend(device, q, kv_cache, metadata, 0.2, k_scale=0.5, v_scale=3.0)
    wide = kv_cache.to(torch.float64) * torch.tensor([0.5, 3.0]).reshape(2, 1, 1, 1, 1)
    exact = reference.paged_attention(q.double(), wide, metadata, AttentionOptions(0.2))
    plain = reference.paged_attention(q, kv_cache, metadata, AttentionOptions(0.2, k_scale=0.5, v_scale=3.0))
    assert_close(out, exact, plain, factor(dtype), slack=1e-6)


# ---------------------------------------------------------------- splitting


@pytest.mark.parametrize("programs, min_chunk", [(1, 16), (4, 16), (60, 16), (60, 128)])
def test_any_split_gives_the_same(device, monkeypatch, sequence_type, lay_out, assert_close, programs, min_chunk):
    """One chunk or dozens, many times what is reduced at once."""
    split_into(monkeypatch, programs, min_chunk)
    parts = make_parts(sequence_type, [(500, 1), (3, 1), (77, 4)], 1, 1, 16, torch.float16)
    check(device, assert_close, *lay_out(parts, 16), 0.25)


@pytest.mark.parametrize("others", [[], [(0, 40)], [(100, 9), (0, 12)]])
def test_decode_rows_are_split_in_any_company(device, monkeypatch, sequence_type, lay_out, others):
    """A prompt in the step changes nothing for decode rows: they never meet the prompts' kernel."""
    split_into(monkeypatch, 12, 32)
    written = {}

    class Nothing:
        def __getitem__(self, grid):
            return lambda *a, **k: written.setdefault("prompts", True)

    class Watched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                args[4].fill_(float("nan"))  # maxima of the chunks
                self.kernel[grid](*args, **kwargs)
                written["chunks"] = (~args[4].isnan().all(-1)).sum().item()
                written["keys"] = max(kwargs["BLOCK_N"], 32)

            return launch

    monkeypatch.setattr(attention, "prefill_attention", Nothing())
    monkeypatch.setattr(attention, "decode_attention", Watched(attention.decode_attention))
    parts = make_parts(sequence_type, [(150, 1), (90, 1), *others], 2, 1, 16, torch.float16)
    q, kv_cache, metadata = lay_out(parts, 16)
    out = attend(device, q, kv_cache, metadata, 0.25)
    plain = reference.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25))
    torch.testing.assert_close(out[:2], plain[:2], atol=4e-3, rtol=4e-3)
    assert written.get("prompts", False) == bool(others)
    # 242 keys of one head over 12 programs are 21 each: chunks are the smallest allowed, a whole tile at least.
    assert written["chunks"] == -(-151 // written["keys"]) + -(-91 // written["keys"]) > 2


# ---------------------------------------------------------------- bit-equal in float32


@given(step=steps())
@settings(max_examples=4, **FIXTURES)
def test_a_float32_row_does_not_depend_on_its_company(device, sequence_type, lay_out, step):
    """The bits of a row are the same in a mixed batch, alone, in chunks, as a decode row, and for other pages."""
    parts = make_parts(sequence_type, step["parts"], *step["heads"], 16, torch.float32, step["seed"])
    options = (0.25, step["window"], step["softcap"])
    together = attend(device, *lay_out(parts, step["block_size"], padding=1), *options)
    rows = iter(together.split([new for _, _, new in parts] + [1]))
    for sequence, computed, new in parts:
        mine = next(rows)
        assert torch.equal(attend(device, *lay_out([(sequence, computed, new)], 16, seed=1), *options), mine)
        for start, end in {(0, 1), (new // 2, new)}:
            chunk = attend(device, *lay_out([(sequence, computed + start, end - start)], 16), *options)
            assert torch.equal(chunk, mine[start:end])


# ---------------------------------------------------------------- refused, and graphs


def test_unsupported_shapes_are_refused_by_name(sequence_type, lay_out):
    (part,) = make_parts(sequence_type, [(3, 1)], 2, 1, 16, torch.float32)
    q, kv_cache, metadata = lay_out([part], 24)
    with pytest.raises(ValueError, match="block_size=24 is not a multiple of 16"):
        attention.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25))
    q, kv_cache, metadata = lay_out([part], 16)
    with pytest.raises(ValueError, match=r"KV cache in torch\.float16 does not go with queries in torch\.float32"):
        attention.paged_attention(q, kv_cache.half(), metadata, AttentionOptions(0.25))
    with pytest.raises(ValueError, match="head_size=544 exceeds 512"):
        attention.paged_attention(
            torch.zeros(1, 1, 544), torch.zeros(2, 1, 1, 16, 544), metadata, AttentionOptions(0.25)
        )
    with pytest.raises(ValueError, match="65 query heads of size 512 are more than 64"):
        attention.paged_attention(
            torch.zeros(1, 65, 512), torch.zeros(2, 1, 1, 16, 512), metadata, AttentionOptions(0.25)
        )
    with pytest.raises(ValueError, match=r"scale=0\.0 must be greater than 0"):
        attention.paged_attention(q, kv_cache, metadata, AttentionOptions(0.0))


@needs_gpu
def test_a_captured_graph_follows_the_lengths(device, sequence_type, lay_out, dtype):
    """Replayed with other lengths and pages, a captured step gives what an eager one does, bit for bit."""
    steps = [[(900, 1), (3, 1), (17, 1)], [(5, 1), (2000, 1), (0, 1)]]
    batches = [
        to_device(device, *lay_out(make_parts(sequence_type, shapes, 8, 2, 64, dtype), 16, shift=200 * (1 - i)))
        for i, shapes in enumerate(steps)
    ]
    width = max(b[2].block_table.shape[1] for b in batches)
    pages = max(b[1].shape[1] for b in batches)
    q, kv_cache, metadata = batches[0]
    static = replace(metadata)
    static.block_table = torch.zeros(3, width, dtype=torch.int32, device=device)
    static.max_seq_len = 2001
    kv = torch.zeros(2, pages, *kv_cache.shape[2:], dtype=dtype, device=device)
    attention.paged_attention(q, kv, static, AttentionOptions(0.1))
    static.plans.clear()  # the graph shall make its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_attention(q, kv, static, AttentionOptions(0.1))
    for mine, cache, its in batches:
        q.copy_(mine)
        kv[:, : cache.shape[1]].copy_(cache)
        static.block_table[:, : its.block_table.shape[1]].copy_(its.block_table)
        static.seq_lens.copy_(its.seq_lens)
        graph.replay()
        assert torch.equal(out, attention.paged_attention(mine, cache, its, AttentionOptions(0.1)))
