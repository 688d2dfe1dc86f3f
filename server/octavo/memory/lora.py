"""Memory of LoRA adapters."""

from __future__ import annotations

from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_spec import DTYPE_BYTES


def adapter_bytes(config: EngineConfig) -> int:
    """The most bytes that LoRA adapters take on a CPU: those in memory, and those in slots that have left it since."""
    if config.lora is None:
        return 0
    size = 4 if config.model.is_all_float32 else 2
    return _adapter_numbers(config, 1) * size * (config.lora.max_loras + config.lora.max_cpu_loras)


def slot_bytes(config: EngineConfig) -> int:
    """The bytes of the slots of LoRA adapters on each GPU."""
    if config.lora is None:
        return 0
    numbers = _adapter_numbers(config, config.parallel.tensor_parallel_size)
    aligned = 3 * 256 * (4 * config.model.num_layers + 2)  # A, B and rank of each layer begin at a multiple
    return (numbers * DTYPE_BYTES[config.model.dtype] + aligned) * config.lora.max_loras


def _adapter_numbers(config: EngineConfig, ranks: int) -> int:
    """The number of values of one adapter of the highest rank for every layer but experts, on each of ``ranks``; from
    config.json's sizes."""
    assert config.lora is not None
    model = config.model
    hidden, inner = model.hidden_size, model.text.intermediate_size
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    whole = model.num_layers * (4 + 3) * hidden + 2 * hidden  # A of q, k, v, gate, up and the head; B of the others
    split = model.num_layers * (2 * queries + 2 * keys + 3 * inner) + 2 * model.vocab_size
    return (whole + -(-split // ranks)) * config.lora.max_lora_rank
