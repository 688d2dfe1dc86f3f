"""A recorded step does what the step does, on whatever its inputs hold then, and refuses what it cannot hold."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support import emulated_amx

import octavo_kernels
from octavo_kernels import AttentionMetadata, AttentionOptions, cpu, packing, quant
from octavo_kernels.cpu import compiler
from octavo_kernels.cpu.library import get_library, use_library

HEADS, KV_HEADS, HEAD_SIZE, BLOCK, ROWS, LAYERS = 6, 2, 32, 16, 4, 3
HIDDEN, INNER, VOCAB, MAX_BLOCKS = HEADS * HEAD_SIZE, 160, 50, 6

pytestmark = pytest.mark.skipif(get_library() is None, reason="needs the C kernels")
on_each = pytest.mark.parametrize("isa", [*compiler.supported_isas(), *emulated_amx.names()], indirect=True)
DTYPES = [torch.float32, torch.bfloat16]


class Decoder:
    """A small llama: linears (in float32 quantised ones), paged attention, and inputs that lie at fixed places."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(seed)
        self.is_quantised = dtype == torch.float32

        def weight(n: int, k: int) -> quant.PackedLinear | quant.DenseWeight:
            values = torch.randn(n, k, generator=g) * k**-0.5
            return packing.pack_w8(values) if self.is_quantised else packing.pack_dense(values.to(dtype))

        shapes = [((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
        self.layers = [[weight(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.table = torch.randn(VOCAB, HIDDEN, generator=g).to(dtype)
        self.norm = (torch.rand(HIDDEN, generator=g) + 0.5).to(dtype)
        self.head = (
            packing.pack_w8(self.table, activation_terms=2) if self.is_quantised else packing.pack_dense(self.table)
        )
        angles = torch.outer(torch.arange(MAX_BLOCKS * BLOCK).float(), 10000.0 ** (-torch.arange(0, 1, 2 / HEAD_SIZE)))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        cache = (2, 40, KV_HEADS, BLOCK, HEAD_SIZE)
        self.caches = [torch.randn(cache, generator=g).to(dtype) for _ in range(LAYERS)]
        self.ids, self.positions = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
        self.metadata = AttentionMetadata(
            query_start_loc=torch.arange(ROWS + 1, dtype=torch.int32),
            seq_lens=torch.ones(ROWS, dtype=torch.int32),
            block_table=torch.zeros(ROWS, MAX_BLOCKS, dtype=torch.int32),
            slot_mapping=torch.full((ROWS,), -1),
            max_query_len=1,
            max_seq_len=MAX_BLOCKS * BLOCK,
            num_actual_tokens=ROWS,
        )

    def fill(self, seed: int, rows: int = ROWS) -> None:
        """Other tokens of other sequences, ``rows`` of them and padding."""
        g = torch.Generator().manual_seed(seed)
        m = self.metadata
        lengths = torch.randint(1, MAX_BLOCKS * BLOCK, (ROWS,), generator=g)
        lengths[rows:] = 0
        m.block_table[:] = (torch.randperm(39, generator=g)[: ROWS * MAX_BLOCKS] + 1).view(ROWS, -1)
        m.seq_lens[:] = lengths
        m.query_start_loc[:] = torch.arange(ROWS + 1).clamp(max=rows)
        self.ids[:] = torch.randint(0, VOCAB, (ROWS,), generator=g)
        self.positions[:] = (lengths - 1).clamp(min=0)
        page = m.block_table[torch.arange(ROWS), self.positions // BLOCK]
        m.slot_mapping[:] = page * BLOCK + self.positions % BLOCK
        m.slot_mapping[rows:] = -1

    def step(self) -> torch.Tensor:
        k = octavo_kernels
        x, residual = k.embedding(self.ids, self.table), None
        for cache, (qkv, out, gate_up, down) in zip(self.caches, self.layers, strict=True):
            rows, residual = self.normed(x, residual)
            q = k.rope_and_cache(
                self.linear(rows, qkv),
                self.positions,
                self.cos_sin,
                cache,
                self.metadata.slot_mapping,
                HEADS,
                KV_HEADS,
                HEAD_SIZE,
            )
            x = self.linear(k.paged_attention(q, cache, self.metadata, AttentionOptions(0.25)).view(ROWS, -1), out)
            x, residual = k.fused_add_rms_norm(x, residual, self.norm, 1e-5)
            x = self.linear(k.silu_and_mul(self.linear(x, gate_up)), down)
        x, _ = k.fused_add_rms_norm(x, residual, self.norm, 1e-5)
        return self.linear(x, self.head)

    def normed(self, x, residual):
        if self.is_quantised:
            return octavo_kernels.rms_norm_quantize(x, self.norm, 1e-5, residual)
        if residual is None:
            return octavo_kernels.rms_norm(x, self.norm, 1e-5), x
        return octavo_kernels.fused_add_rms_norm(x, residual, self.norm, 1e-5)

    def linear(self, x, weight) -> torch.Tensor:
        multiply = octavo_kernels.quantized_linear if self.is_quantised else octavo_kernels.dense_linear
        return multiply(x, weight)


@on_each
@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])  # more than there are cores, too: most then sleep
def test_replaying_is_running(isa, threads, count, dtype):
    """Logits and the cache that replays leave are those of running the step, to the bit, with padding rows and
    without.
    """
    threads(count)
    recorded, plain = Decoder(dtype=dtype), Decoder(dtype=dtype)
    recorded.fill(0)
    plain.fill(0)
    program = cpu.record(recorded.step)
    assert all(torch.equal(a, b) for a, b in zip(recorded.caches, plain.caches, strict=True)), "recording computes"
    for seed in range(8):
        rows = ROWS if seed % 2 else seed % ROWS + 1
        recorded.fill(seed, rows)
        plain.fill(seed, rows)
        program.replay()
        assert torch.equal(program.outputs[:rows], plain.step()[:rows])
        assert all(torch.equal(a, b) for a, b in zip(recorded.caches, plain.caches, strict=True))


@on_each
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_does_smaller_steps_too(isa, threads, dtype):
    """Rows and sequences beyond those asked for are neither read nor written, whatever lies there."""
    threads(2)
    recorded, plain = Decoder(dtype=dtype), Decoder(dtype=dtype)
    program = cpu.record(recorded.step)
    for seed in range(1, 9):
        rows = seed % ROWS + 1
        recorded.fill(seed, rows)
        plain.fill(seed, rows)
        recorded.ids[rows:], recorded.positions[rows:] = -1, 10**9
        recorded.metadata.slot_mapping[rows:] = 10**9
        recorded.metadata.seq_lens[rows:] = 10**9
        recorded.metadata.query_start_loc[rows + 1 :] = 10**9
        program.outputs.fill_(7)
        program.replay(rows, sequences=rows)
        assert torch.equal(program.outputs[:rows], plain.step()[:rows])
        assert (program.outputs[rows:] == 7).all()
        assert all(torch.equal(a, b) for a, b in zip(recorded.caches, plain.caches, strict=True))


def test_operations_with_different_numbers_of_rows_take_one_number_each(threads):
    """As the layers have all rows and the head has those that get a token."""
    threads(2)
    recorded, plain, wanted = Decoder(), Decoder(), torch.zeros(ROWS - 1, dtype=torch.int64)

    def step():
        logits = octavo_kernels.embedding(wanted, recorded.step())
        return [logits, *cpu.argmax(logits)]

    program = cpu.record(step)
    for seed in range(1, 9):
        rows = seed % ROWS + 1
        count = max(1, rows // 2)
        recorded.fill(seed, rows)
        plain.fill(seed, rows)
        wanted[:count] = torch.randperm(rows)[:count]
        wanted[count:] = -1
        for output in program.outputs:
            output.fill_(7)
        program.replay(rows, count, sequences=rows)
        expected = plain.step()[wanted[:count]]
        for output, value in zip(program.outputs, [expected, *cpu.argmax(expected)], strict=True):
            assert torch.equal(output[:count], value) and (output[count:] == 7).all()
    for wrong in ((1,), (1, 1, 1)):
        with pytest.raises(ValueError, match=r"rows: . numbers of rows given, the step was recorded with 2"):
            program.replay(*wrong)


def test_intermediate_results_share_memory():
    """The arena holds what is needed at one time, not every layer's results side by side."""
    decoder = Decoder()
    decoder.fill(0)
    program = cpu.record(decoder.step)
    arena = program._memory[0].numel()
    row_bytes = 4 * (2 * INNER + 3 * HIDDEN + (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    assert arena < 2 * ROWS * row_bytes


def test_programs_share_an_arena(threads):
    """Two programs in one arena, replayed in turn, each give what they give alone; their outputs lie in it."""
    threads(2)
    decoders, arena = [Decoder(0), Decoder(1)], cpu.Arena()
    for decoder in decoders:
        decoder.fill(0)
    programs = [cpu.record(decoder.step, arena) for decoder in decoders]
    assert all(p.outputs.untyped_storage().data_ptr() == arena.take(0).data_ptr() for p in programs)
    for seed in range(1, 7):
        decoder, program = decoders[seed % 2], programs[seed % 2]
        decoder.fill(seed)
        program.replay()
        assert torch.equal(program.outputs, decoder.step())


def test_foreign_operations_are_refused_by_name():
    decoder = Decoder()
    decoder.fill(0)
    with pytest.raises(cpu.RecordingError, match="aten::mul"):
        cpu.record(lambda: decoder.step() * 2)
    with pytest.raises(cpu.RecordingError, match="already"):
        cpu.record(lambda: cpu.record(decoder.step).outputs)
    cpu.record(decoder.step)  # an attempt that failed leaves nothing behind
    mine = torch.zeros(3)
    for foreign in (lambda: mine.add_(1), lambda: mine[torch.tensor([10**9])], lambda: mine.view(3, 1) + 1):
        with pytest.raises(cpu.RecordingError):
            cpu.record(foreign)
    assert not mine.any(), "what cannot be recorded is not done either"


@torch.inference_mode()  # as the engine runs: elsewhere torch takes these operations apart first
def test_views_are_told_from_copies_by_their_storage():
    """`to`, `contiguous` and `reshape` have the schemas of views: a copy would be left out of the program."""
    plain, ones = torch.randn(ROWS, 64), torch.ones(64)

    def step(change):
        return octavo_kernels.rms_norm(change(plain), ones, 1e-5)

    program = cpu.record(lambda: step(lambda x: x.float().contiguous().reshape(2, -1, 64).view(ROWS, 64)))
    plain.normal_()
    program.replay()
    assert torch.equal(program.outputs, octavo_kernels.rms_norm(plain, ones, 1e-5))
    for copy in (
        lambda x: x.bfloat16().float(),
        lambda x: x.view(64, ROWS).T.contiguous(),
        lambda x: x.view(64, ROWS).T.reshape(ROWS, 64),
        lambda x: x.to(torch.float64).float(),
    ):
        with pytest.raises(cpu.RecordingError, match=r"torch's own aten::"):
            cpu.record(lambda copy=copy: step(copy))


def test_nothing_is_recorded_without_the_library():
    before = get_library()
    use_library(None)
    try:
        with pytest.raises(cpu.RecordingError, match="unavailable"):
            cpu.record(lambda: torch.empty(1))
    finally:
        use_library(before)


def test_a_program_can_be_taken_apart_by_kind():
    decoder = Decoder()
    decoder.fill(0)
    program = cpu.record(decoder.step)
    parts = program.by_kind()
    assert {"embedding", "quantize", "quantized_linear", "rope_and_cache", "paged_attention", "rms_norm"} <= set(parts)
    assert sum(len(part._words) for part in parts.values()) == len(program._words)
    for part in parts.values():
        part.replay()
    named = program.by_kind(lambda kind, number: f"{kind} {number % 4}" if kind == "quantized_linear" else "other")
    assert set(named) == {"other", *(f"quantized_linear {number}" for number in range(4))}
    assert sum(len(part._words) for part in named.values()) == len(program._words)


def test_recording_does_not_import_the_compiler():
    """torch would, for a second and 150 MB in the middle of the first request."""
    code = """
import sys, torch
from octavo_kernels import cpu
x, weight = torch.randn(2, 64), torch.ones(64)
cpu.record(lambda: cpu.rms_norm(x, weight, 1e-5))
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_follows_is_run_once(threads):
    """Operations given to one replay read what the program has filled; the next replay does without them."""
    x, out = torch.randn(5, 40), torch.zeros(2, 5)
    index = torch.zeros(5, dtype=torch.int64)
    program = cpu.record(lambda: cpu.scale(x, 2.0))
    library = get_library()
    largest = [
        library.pack("argmax", program.outputs.data_ptr(), index.data_ptr(), row.data_ptr(), 5, 40, 40) for row in out
    ]
    program.replay(then=largest[0] + largest[1])
    assert torch.equal(out, (2 * x).amax(1).expand(2, 5)) and torch.equal(index, x.argmax(1))
    out.zero_()
    program.replay(then=largest[1])
    program.replay()
    assert not out[0].any() and out[1].all() and program.kinds == ["scale"]
