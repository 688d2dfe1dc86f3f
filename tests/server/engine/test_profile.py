"""The step that is run at start for its memory and its kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.overlapped import tiny

from octavo.config import SchedulerConfig
from octavo.worker.profile import largest_step


@pytest.mark.parametrize("tokens", [1, 2, 3, 40, 41, 100])
def test_the_largest_step_is_a_mixed_one_of_all_tokens(
    tokens: int, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of tokens makes a step that runs, and whose first sequence is a decode as long as may be."""
    model = tiny(tiny_checkpoints["llama"]).engine.executor.worker.model  # type: ignore[attr-defined]
    seen: list[Any] = []
    begin = model.begin
    monkeypatch.setattr(
        model, "begin", lambda ids, positions, context: seen.append(context) or begin(ids, positions, context)
    )
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=tokens, max_model_len=40)
    largest_step(model, model.kv_cache_specs(), scheduler, 16, torch.device("cpu"))
    (context,) = seen
    metadata = context.metadata
    lengths = metadata.query_start_loc.diff().tolist()
    assert sum(lengths) == metadata.num_actual_tokens == tokens
    assert lengths[0] == 1 and metadata.seq_lens[0] == metadata.max_seq_len == 40
    assert metadata.seq_lens.tolist()[1:] == lengths[1:] and max(lengths) <= metadata.max_query_len
