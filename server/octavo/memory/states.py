"""The memory of recurrent layers: blocks of the KV cache for states, and rows that are not in one yet."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig, ModelConfig
from octavo.interface.kv_cache_layout import KVCacheLayout
from octavo.interface.state_spec import StateSpec

_MIB = 1 << 20


def check_recurrent_on(model: ModelConfig, kind: str) -> None:
    """Raise ConfigError for a model with recurrent layers on another kind of device than a CPU."""
    if kind != "cpu" and model.is_recurrent:
        raise ConfigError(f"device: {model.model} has recurrent layers, which run on CPUs alone yet: use --device cpu")


def pending_rows(config: EngineConfig) -> int:
    """Rows of a sequence that may be pending: its last known token's, and those of drafts."""
    return 1 + config.speculative.num_speculative_tokens


def pending_bytes(config: EngineConfig, state: StateSpec | None) -> int:
    """Bytes of the rows of all sequences that are not yet in a state; 0 without recurrent layers."""
    return 0 if state is None else config.scheduler.max_num_seqs * pending_rows(config) * state.row_bytes


def state_line(layout: KVCacheLayout) -> list[str]:
    """One log line for the ledger; none without recurrent layers."""
    if layout.state is None:
        return []
    count, tokens = layout.state_blocks, layout.state_blocks * layout.block_size // len(layout.groups)
    size = layout.state.num_bytes / _MIB
    return [f"{'state':14} {size:10,.1f} MiB  a sequence: {count:,} blocks of the KV cache, as {tokens:,} tokens have"]
