"""Inputs of a decoding step: what plain indexing makes of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import emulated_amx

from octavo_kernels import AttentionMetadata
from octavo_kernels.attention_metadata import for_groups
from octavo_kernels.cpu import DecodeInputs, compiler, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="needs the C kernels")


@pytest.mark.parametrize("isa", [*compiler.supported_isas(), *emulated_amx.names()], indirect=True)
@given(data=st.data())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_inputs_are_those_of_the_rows_asked_for(isa, data):
    sequences, block_size, length = 6, data.draw(st.sampled_from([1, 3, 16])), 50
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    max_blocks = -(-length // block_size)
    computed, in_cache = rng.integers(0, length, (2, sequences))
    tokens = rng.integers(0, 1000, (sequences, length + 1)).astype(np.int32)
    groups = data.draw(st.integers(1, 3))
    blocks = rng.integers(0, 99, (groups, sequences, max_blocks)).astype(np.int32)
    tables = torch.full((groups, sequences, max_blocks), -7, dtype=torch.int32)
    slot_mappings = torch.full((groups, 9), -7)
    ids, positions = torch.full((9,), -7), torch.full((9,), -7)
    metadata = AttentionMetadata(
        query_start_loc=torch.full((sequences + 1,), -7, dtype=torch.int32),
        seq_lens=torch.full((sequences,), -7, dtype=torch.int32),
        block_table=tables[0],
        slot_mapping=slot_mappings[0],
        max_query_len=9,
        max_seq_len=length,
        num_actual_tokens=9,
    )
    step = for_groups(metadata, tables, slot_mappings)
    inputs = DecodeInputs(computed, in_cache, tokens, blocks, block_size, ids, positions, step)
    for _ in range(2):
        rows = rng.permutation(sequences)[: data.draw(st.integers(1, sequences))]
        inputs.fill(rows)
        n, at = len(rows), computed[rows]
        slots = blocks[:, rows, at // block_size].astype(np.int64) * block_size + at % block_size
        assert ids[:n].tolist() == tokens[rows, at].tolist() and positions[:n].tolist() == at.tolist()
        for group, own in zip(step, slots, strict=True):
            assert group.slot_mapping[:n].tolist() == np.where(at < in_cache[rows], -1, own).tolist()
        assert metadata.query_start_loc[: n + 1].tolist() == list(range(n + 1))
        assert metadata.seq_lens[:n].tolist() == (at + 1).tolist()
        for i, row in enumerate(rows):
            used = at[i] // block_size + 1
            for group, table in zip(step, blocks, strict=True):
                assert group.block_table[i, :used].tolist() == table[row, :used].tolist()
        computed[rows] = rng.integers(0, length, n)
    assert ids[sequences:].tolist() == [-7] * 3, "rows beyond those asked for are left alone"
