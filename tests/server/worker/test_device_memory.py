"""What is set aside on a device covers what requests can make the engine take there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import FAMILY_CASES
from support.overlapped import overlapped, tiny
from support.paged import load, logits_of
from support.tiny_models import FAMILIES, make_model

from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.interface.engine_config import CacheConfig
from octavo.interface.kv_cache_layout import make_layout
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.memory.capture_sizes import decode_sizes, history_bytes, prefill_sizes, result_bytes
from octavo.memory.ledger import MemoryLedger
from octavo.memory.plan import plan_device_memory
from octavo.sample.token_pool import TokenPool
from octavo.worker.gpu.memory_profile import DummySteps

MIB = 1 << 20


def pool_bytes(pool: TokenPool) -> int:
    assert pool.seen is not None
    return sum(tensor.numel() * tensor.element_size() for tensor in (pool.history, pool.counts, pool.seen))


@pytest.mark.parametrize("max_slots", [1, 3, 4, 21])
def test_token_histories_stay_below_their_bound(max_slots: int) -> None:
    vocab, length = 500, 300
    pool, before = TokenPool(max_slots, vocab, torch.device("cpu"), keep_seen=True), 0
    for _ in range(max_slots):
        pool.add(torch.arange(200), torch.arange(length - 200), count=True)
        pool.reserve(length + 1)
        both = pool_bytes(pool) + (before if before < pool_bytes(pool) else 0)
        assert both <= history_bytes(max_slots, vocab, length)
        before = pool_bytes(pool)


def test_the_cache_gets_what_the_rest_leaves() -> None:
    spec = KVCacheSpec(num_kv_heads=1, head_size=64, dtype="float16")

    def plan(**given: int) -> MemoryLedger:
        parts = {"device_total": 4096 * MIB, "in_use": 1024 * MIB, "activations": 0, "graphs": 0} | given
        return plan_device_memory(CacheConfig(), make_layout([spec], 64, 16, 8), 1000 * MIB, 64, False, **parts)

    whole = plan()
    for part in ("activations", "graphs", "histories"):
        less = plan(**{part: 512 * MIB})
        assert abs(whole.kv_cache - less.kv_cache - 512 * MIB) <= less.block_bytes
        assert any(name == part and size == 512 * MIB for name, size in less.parts)
    with pytest.raises(ConfigError, match=r"token histories \(4,096 MiB; lower max_num_seqs\)"):
        plan(histories=4096 * MIB)


def test_a_cache_of_bytes_has_twice_the_blocks() -> None:
    plain, fp8 = (KVCacheSpec(num_kv_heads=2, head_size=64, dtype=name) for name in ("bfloat16", "float8_e4m3fn"))
    assert (plain.bytes_per_token(), fp8.bytes_per_token()) == (512, 256)
    assert fp8.block_shape(16) == plain.block_shape(16) == (2, 2, 16, 64)
    cache = CacheConfig(kv_cache_memory_bytes=MIB)
    device = {"device_total": 64 * MIB, "in_use": 0, "activations": 0, "graphs": 0}
    blocks = [
        plan_device_memory(cache, make_layout([spec], 64, 16, 8), 0, 64, False, **device) for spec in (plain, fp8)
    ]
    assert blocks[1].num_blocks == 2 * blocks[0].num_blocks and blocks[0].kv_cache == blocks[1].kv_cache == MIB


def test_the_profiled_steps_are_as_large_as_steps_get(tiny_checkpoints: dict[str, Path], monkeypatch) -> None:
    """The tokens, the logits and, for attention's scratch, the sequences and their length."""
    worker = overlapped(
        tiny(tiny_checkpoints["llama"], max_num_seqs=16, max_num_batched_tokens=200, max_model_len=96)
    ).engine.executor.worker  # type: ignore[attr-defined]
    seen, begin = [], type(worker.model).begin

    def noted(self, ids, positions, context):
        seen.append(context)
        return begin(self, ids, positions, context)

    monkeypatch.setattr(type(worker.model), "begin", noted)
    layout = make_layout(worker.model.kv_cache_specs(), 96, 16, 200)
    steps = DummySteps(worker.model, layout, worker.config.scheduler, torch.device("cpu"))
    steps.run_largest()
    steps.run_decode(16)
    mixed, decode = (context.metadata[0] for context in seen)
    assert mixed.num_actual_tokens == 200 and mixed.max_query_len == 96 and mixed.max_seq_len == 96
    assert len(mixed.seq_lens) == 15 + 2 and mixed.query_start_loc[-1] == 200
    assert decode.num_actual_tokens == len(decode.seq_lens) == 16 and decode.max_seq_len == 96
    assert decode.max_query_len == 1 and decode.block_table.shape[1] == 6


@pytest.mark.parametrize("case", ["llama-gqa-tied", "gemma3n", "gemma4"])
def test_memory_kept_by_graphs_of_prompts_is_counted(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each row all that lies between the halves of the last layer, which streams and embeddings of layers are."""
    make_model(*FAMILY_CASES[case]).save_pretrained(tmp_path)
    model, widths = load(tmp_path), []
    begin = model.model.begin

    def noted(*args: Any) -> Any:
        deferred = begin(*args)
        widths.append(sum(part.shape[1] for part in deferred))
        return deferred

    monkeypatch.setattr(model.model, "begin", noted)
    logits_of(model, [[5, 6, 7]])
    config = EngineArgs(model=str(tmp_path), dtype="float32").create_engine_config(progress=False)
    assert result_bytes(config, [], [100]) - result_bytes(config, [], [0]) == 400 * widths[0]


def test_a_models_graphs_are_reserved_as_large_as_they_are(tmp_path: Path) -> None:
    """5 to 7 MiB for some 300 kernels, and two samplers beside each: 140 MiB were too little for 128 sequences."""
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    config = EngineArgs(model=str(tmp_path), max_num_seqs=128, max_num_batched_tokens=512).create_engine_config(
        progress=False
    )
    sizes, prefills = decode_sizes(config, 1), prefill_sizes(config)
    assert (len(sizes), len(prefills)) == (19, 13)
    assert 190 << 20 <= result_bytes(config, sizes, prefills) <= 260 << 20
