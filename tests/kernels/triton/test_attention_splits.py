"""How a decode step is split: no more programs and memory than the work can use, and even parts."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import AttentionOptions, reference
from octavo_kernels.triton import INTERPRETED, attention
from octavo_kernels.triton import attention_configs as configs

SHAPES = [(150, 1), (0, 1), (30, 3), (15, 12), (0, 17)]  # keys before, new tokens


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tiles and chunks: short sequences have many of them."""
    monkeypatch.setattr(configs, "splits", lambda device: configs.Splits(12, 32))
    monkeypatch.setattr(configs, "EXACT_CHUNK", 64)
    monkeypatch.setattr(configs, "decode_config", lambda *a, **k: configs.Config(16, 16, 4, 1))
    monkeypatch.setattr(configs, "prefill_config", lambda *a, **k: configs.Config(32, 16, 4, 1))


@pytest.fixture
def grids(monkeypatch) -> dict[str, tuple[int, ...]]:
    """The grids of the last step by kernel."""
    found: dict[str, tuple[int, ...]] = {}

    class Watched:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(attention, name)

        def __getitem__(self, grid):
            found[self.name] = grid
            return self.kernel[grid]

    for name in ("prefill_attention", "decode_attention", "reduce_chunks"):
        monkeypatch.setattr(attention, name, Watched(name))
    return found


def attend(device, q, kv_cache, metadata, *options):
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        setattr(metadata, name, getattr(metadata, name).to(device))
    return attention.paged_attention(q.to(device), kv_cache.to(device), metadata, AttentionOptions(*options)).cpu()


def parts_of(sequence_type, shapes, dtype):
    return [(sequence_type.random(a + b, 4, 2, 16, i, dtype), a, b) for i, (a, b) in enumerate(shapes)]


@pytest.mark.skipif(not INTERPRETED, reason="the tiles are the interpreter's")
@pytest.mark.parametrize("window", [None, 40])
def test_float32_in_little_memory_gives_the_same_bits(device, monkeypatch, sequence_type, lay_out, grids, window):
    """Where the sums of chunks would need more than is allowed, nothing is split, and no bit changes."""
    parts = parts_of(sequence_type, SHAPES, torch.float32)
    split = attend(device, *lay_out(parts, 16, padding=2), 0.25, window)
    assert grids.pop("decode_attention")
    q, kv_cache, metadata = lay_out(parts, 16, padding=2)
    metadata.max_seq_len = 2**17  # as in a captured graph
    monkeypatch.setattr(configs, "EXACT_SCRATCH", 1 << 20)
    assert torch.equal(attend(device, q, kv_cache, metadata, 0.25, window), split)
    assert "decode_attention" not in grids
    alone = lay_out(parts[:1], 16)
    alone[2].max_seq_len = 2**17
    assert torch.equal(attend(device, *alone, 0.25, window), split[:1])


@pytest.mark.parametrize("lengths", [[5], [33, 100], [200, 1, 64, 65]], ids=str)
def test_short_sequences_ask_for_few_programs(device, sequence_type, lay_out, assert_close, grids, lengths):
    """No more than their chunks of the smallest size, however many the device could hold."""
    parts = parts_of(sequence_type, [(length - 1, 1) for length in lengths], torch.float16)
    q, kv_cache, metadata = lay_out(parts, 16)
    out = attend(device, q, kv_cache, metadata, 0.25)
    exact = reference.paged_attention(q.double(), kv_cache.double(), metadata, AttentionOptions(0.25))
    assert_close(out, exact, reference.paged_attention(q, kv_cache, metadata, AttentionOptions(0.25)), slack=1e-6)
    chunks = -(-max(lengths) // 32)
    assert grids["decode_attention"] == (2 * min(len(lengths) * chunks, len(lengths) + 12 // 2),)


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("length", [33, 500, 2100])
def test_a_long_sequence_has_its_many_chunks_summed(device, monkeypatch, sequence_type, lay_out, assert_close, length):
    """Several times what is summed at once, where few programs sum it and where many do."""
    monkeypatch.setattr(configs, "splits", lambda device: configs.Splits(200, 16))
    wide = configs.reduction(4 * 128, 8, configs.Splits(792, 64))
    assert wide == (32, 8)
    assert configs.reduction(4 * 128, 800, configs.Splits(792, 64)) == (16, 4)
    for shapes in ([(length - 1, 1)], [(length - 1, 1), (40, 1), *[(0, 1)] * 60]):
        parts = [(sequence_type.random(a + b, 4, 2, 128, i, torch.float16), a, b) for i, (a, b) in enumerate(shapes)]
        q, kv_cache, metadata = lay_out(parts, 16)
        out = attend(device, q, kv_cache, metadata, 0.1)
        exact = reference.paged_attention(q.double(), kv_cache.double(), metadata, AttentionOptions(0.1))
        assert_close(out, exact, reference.paged_attention(q, kv_cache, metadata, AttentionOptions(0.1)), slack=1e-6)


@pytest.mark.parametrize("lengths", [[33], [200, 130], [150, 90, 65]], ids=str)
def test_chunks_of_a_sequence_are_even(device, monkeypatch, sequence_type, lay_out, lengths):
    """Queries of 0 give every key the weight 1, so the weights of a chunk count its keys."""
    monkeypatch.setattr(configs, "splits", lambda device: configs.Splits(5, 32))
    found = {}
    kernel = attention.decode_attention

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                args[5].zero_()
                kernel[grid](*args, **kwargs)
                found["keys"] = args[5][:, 0, 0].tolist()

            return launch

    monkeypatch.setattr(attention, "decode_attention", Watched())
    q, kv_cache, metadata = lay_out(parts_of(sequence_type, [(length - 1, 1) for length in lengths], torch.float16), 16)
    attend(device, q * 0, kv_cache, metadata, 0.25)
    keys = iter(found["keys"])
    chunk = max(32, -(-2 * sum(lengths) // (5 * 16)) * 16)  # of two heads over five programs
    for length in lengths:
        chunks = -(-length // chunk)
        mine = [next(keys) for _ in range(chunks)]
        assert chunks == 1 or sum(mine) == length
        assert max(mine) < length / chunks + 16
