"""The inputs of a decode step in Triton, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_kernels import AttentionOptions, reference
from octavo_kernels import triton as backend
from octavo_kernels.triton import attention_configs as configs
from octavo_kernels.triton import decode_step

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
NUMBERS = ("token_ids", "positions", "next_positions", "seq_lens", "slots")
NOWHERE = 2**31 - 1  # a page that no cache has


def state_of(data, sequences: int, block_size: int, width: int, device: str) -> list[torch.Tensor]:
    """Tokens, counts and tables of some groups for as many sequences, and the row that is nobody's. Pages past a
    sequence's next token are NOWHERE."""
    limit = width * block_size - 2  # two steps are counted
    edges = st.integers(0, width).flatmap(lambda n: st.integers(-2, 2).map(lambda away: n * block_size + away))
    counts = st.one_of(edges, st.integers(0, limit)).map(lambda n: min(max(n, 0), limit))
    computed = torch.tensor([data.draw(counts) for _ in range(sequences + 1)])
    written = (computed + torch.tensor([data.draw(st.integers(-3, 3)) for _ in range(sequences + 1)])).clamp(min=0)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tokens = torch.randint(0, 10**12, (sequences + 1,), generator=generator)
    shape = (data.draw(st.integers(1, 3)), sequences + 1, width)
    tables = torch.randint(0, 2**27, shape, generator=generator, dtype=torch.int32)
    tables[:, torch.arange(width) > (computed // block_size)[:, None] + 1] = NOWHERE
    return [tensor.to(device) for tensor in (tokens, computed, written, tables)]


@given(data=st.data())
@settings(max_examples=60, **FIXTURES)
def test_inputs_of_a_step(device, data, monkeypatch):
    """Every number of every row, the pages that lengths ask for, and what is counted, for two steps on end."""
    monkeypatch.setattr(decode_step, "CHUNK", 128)
    block_size, width = data.draw(st.sampled_from([1, 16, 48])), data.draw(st.sampled_from([3, 128, 301, 512]))
    sequences = data.draw(st.integers(1, 6))
    ours = state_of(data, sequences, block_size, width, device)
    plain = [tensor.clone() for tensor in ours]
    for _ in range(2):
        order = data.draw(st.permutations(range(sequences)))[: data.draw(st.integers(0, sequences))]
        rows = data.draw(st.permutations([*order, *[-1] * data.draw(st.integers(0, 3))]))
        rows = torch.tensor(rows, dtype=torch.int64, device=device)
        step, expected = (
            f(rows, *state, block_size)
            for f, state in ((backend.decode_inputs, ours), (reference.decode_inputs, plain))
        )
        for name in NUMBERS:
            number, wanted = getattr(step, name), getattr(expected, name)
            assert number.dtype == wanted.dtype and number.tolist() == wanted.tolist(), name
        assert step.block_tables.shape == expected.block_tables.shape and step.block_tables.dtype == torch.int32
        needed = (expected.seq_lens + block_size - 1) // block_size
        for i, count in enumerate(needed.tolist()):
            assert torch.equal(step.block_tables[:, i, :count], expected.block_tables[:, i, :count])
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_reference_makes_a_steps_inputs_as_written_out(device):
    """In numbers: the plain version is what the other one is held against."""
    tokens, computed, written = (torch.tensor(x, device=device) for x in ([5, 6, 7, 8], [3, 4, 9, 2], [0, 5, 0, 0]))
    table = torch.tensor([[1, 0, 0], [2, 3, 0], [4, 5, 6], [9, 9, 9]], dtype=torch.int32, device=device)
    tables = torch.stack([table, table + 10])
    step = reference.decode_inputs(torch.tensor([2, -1, 0, 1, -1], device=device), tokens, computed, written, tables, 4)
    assert [getattr(step, name).tolist() for name in NUMBERS] == [
        [7, 0, 5, 6, 0],
        [9, 0, 3, 4, 0],
        [10, 0, 4, 5, 0],
        [10, 0, 4, 5, 0],
        [[25, -1, 7, -1, -1], [65, -1, 47, -1, -1]],
    ]
    assert computed.tolist() == [4, 5, 10, 2], "padding counts nothing"
    assert step.block_tables[:, [0, 2, 3], :2].tolist() == [[[4, 5], [1, 0], [2, 3]], [[14, 15], [11, 10], [12, 13]]]


@pytest.mark.parametrize("scratch", [configs.EXACT_SCRATCH, 0], ids=["decodes", "as prompts"])
def test_attention_looks_at_no_other_page(device, dtype, scratch, lay_out, sequence_type, assert_close, monkeypatch):
    """The rest of a step's table is memory as it was found: here pages that would lie far outside the cache."""
    monkeypatch.setattr(configs, "EXACT_SCRATCH", scratch)  # without any, exact ones go to the prompts' kernel
    parts = [(sequence_type.random(length, 4, 2, 64, seed=length), length - 1, 1) for length in (1, 16, 17, 70)]
    parts = [(sequence_type(*(t.to(dtype) for t in (s.q, s.k, s.v))), *rest) for s, *rest in parts]
    q, cache, metadata = lay_out(parts, 16)
    plain = reference.paged_attention(q, cache, metadata, AttentionOptions(0.125))
    exact = reference.paged_attention(q.double(), cache.double(), metadata, AttentionOptions(0.125))
    for r, length in enumerate(metadata.seq_lens.tolist()):
        metadata.block_table[r, -(-length // 16) :] = NOWHERE
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        setattr(metadata, name, getattr(metadata, name).to(device))
    for window in (None, 1000):
        out = backend.paged_attention(q.to(device), cache.to(device), metadata, AttentionOptions(0.125, window))
        assert_close(out.cpu(), exact, plain)
