"""Inputs of recorded steps with drafts: what `StepInputs` makes of the same rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.cpu.recorded_steps import RecordedInputs
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo_kernels.cpu import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="needs the C kernels")

SEQUENCES, LENGTH = 6, 50


@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([1, 3, 16]), st.integers(1, SEQUENCES))
def test_rows_are_filled_as_step_inputs_have_them(seed: int, groups: int, block_size: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    batch = InputBatch(SEQUENCES, LENGTH, block_size, groups)
    batch.token_ids[:] = rng.integers(0, 999, batch.token_ids.shape)
    batch.block_tables[:] = rng.integers(0, 99, batch.block_tables.shape)
    ours, theirs = (RecordedInputs(SEQUENCES * 8, batch) for _ in range(2))
    for _ in range(2):
        batch.num_computed[:] = rng.integers(0, LENGTH - 8, SEQUENCES)
        batch.num_kv_tokens[:] = rng.integers(0, LENGTH, SEQUENCES)
        rows, counts = rng.permutation(SEQUENCES)[:count], rng.integers(1, 8, count)
        ours.fill_rows(rows, counts)
        theirs.fill(StepInputs(batch, rows, counts, 1))
        total = int(counts.sum())
        for name, used in (("input_ids", total), ("positions", total)):
            assert getattr(ours, name)[:used].tolist() == getattr(theirs, name)[:used].tolist()
        for mine, other in zip(ours.metadata, theirs.metadata, strict=True):
            assert mine.query_start_loc[: count + 1].tolist() == other.query_start_loc[: count + 1].tolist()
            assert mine.seq_lens[:count].tolist() == other.seq_lens[:count].tolist()
            assert mine.slot_mapping[:total].tolist() == other.slot_mapping[:total].tolist()
            for i, end in enumerate((batch.num_computed[rows] + counts).tolist()):
                used = -(-end // block_size)
                assert mine.block_table[i, :used].tolist() == other.block_table[i, :used].tolist()
        at = ours.positions[:total].numpy()
        ours.fill_rows(rows, counts, 2)
        ahead = batch.token_ids[rows.repeat(counts), np.minimum(at + 2, LENGTH)]
        assert ours.input_ids[:total].tolist() == ahead.tolist()
        assert ours.positions[:total].tolist() == theirs.positions[:total].tolist(), "of the tokens before those"
