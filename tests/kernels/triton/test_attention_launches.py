"""What is launched for a step whose lengths the host knows: nothing for sequences that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo_kernels import AttentionOptions
from octavo_kernels.triton import attention


@pytest.fixture
def poisoned_memory():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Launches:
    """Stands for a kernel and notes its grids."""

    def __init__(self, kernel) -> None:
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)

        def launch(*args, **options):
            self.kernel_options = options
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize(
    "shapes, reduced",
    [
        ([(0, 20)], 0),
        ([(0, 20), (30, 9)], 0),
        ([(70, 1), (3, 2), (0, 20)], 3),  # decoding sequences come first
        ([(0, 20), (40, 8), (0, 12)], 28),
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_prompts_have_no_chunks_reduced(
    device, sequence_type, lay_out, monkeypatch, poisoned_memory, shapes, reduced, padding
):
    """The result is the same bit for bit as when the host knows nothing."""
    parts = [
        (sequence_type.random(computed + new, 4, 2, 64, i, torch.float32), computed, new)
        for i, (computed, new) in enumerate(shapes)
    ]
    q, kv_cache, metadata = lay_out(parts, 16, padding=padding)
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        setattr(metadata, name, getattr(metadata, name).to(device))
    q, kv_cache = q.to(device), kv_cache.to(device)
    expected = attention.paged_attention(q, kv_cache, metadata, AttentionOptions(0.125))
    assert not expected.isnan().any()
    reduce, decode = Launches(attention.reduce_chunks), Launches(attention.decode_attention)
    prefill = Launches(attention.prefill_attention)
    monkeypatch.setattr(attention, "prefill_attention", prefill)
    monkeypatch.setattr(attention, "reduce_chunks", reduce)
    monkeypatch.setattr(attention, "decode_attention", decode)
    known = replace(metadata, query_start_loc_cpu=metadata.query_start_loc.cpu().numpy())
    assert torch.equal(attention.paged_attention(q, kv_cache, known, AttentionOptions(0.125)), expected)
    assert [grid[0] for grid in reduce.grids] == [reduced][: bool(reduced)]
    assert len(decode.grids) == bool(reduced)
    rows = prefill.kernel_options["BLOCK_M"]
    assert [grid[1] for grid in prefill.grids] == [sum(-(-new // rows) for _, new in shapes if new > 8)]
