"""Memory of a GPU's steps beside weights and KV cache. The engine measures it at start (`worker.gpu.memory_profile`);
before that it is estimated, a little above what is measured."""

from __future__ import annotations

from octavo.interface.engine_config import EngineConfig, ModelConfig
from octavo.interface.kv_cache_spec import DTYPE_BYTES
from octavo.interface.model_config.deepseek import DeepseekConfig
from octavo.memory import capture_sizes
from octavo.memory.images import num_deep

_LOGITS_ROWS = 256  # at least: of prompts' log-probabilities
_CHUNKS_OF_A_SEQUENCE, _MOST_CHUNKS = 256 << 10, 24 << 20  # bytes, about: by the number of a device's processors
_CHUNKS_OF_LATENTS = 48 << 20  # beside these: sums as wide as latents, of many heads at once


def step_bytes(config: EngineConfig) -> int:
    """The largest step: max_num_batched_tokens tokens."""
    rows, tokens = max(config.scheduler.max_num_seqs, _LOGITS_ROWS), config.scheduler.max_num_batched_tokens
    states = 4 if config.speculative.in_worker and config.speculative.method != "draft_model" else 0  # of each token
    if config.model.reads_images:
        deep = num_deep(config.model)
        states += 1 + deep + (2 if deep else 0)  # in the place of placeholders; sums with what is added to them
    beside = states * tokens * DTYPE_BYTES[config.model.dtype] * config.model.hidden_size
    beside += 32 * tokens if config.model.reads_images else 0  # which ones, and where
    turns = 4 * tokens * config.model.head_size if config.model.has_mrope else 0
    return _step(config, tokens, rows) + beside + turns


def graph_bytes(config: EngineConfig) -> int:
    """The bytes of captured steps; 0 with enforce_eager."""
    if config.enforce_eager:
        return 0
    sizes, prefills = capture_sizes.decode_sizes(config, 8), capture_sizes.prefill_sizes(config)
    drafts = capture_sizes.draft_sizes(config, 8)
    most = max(sizes + drafts)
    largest = _step(config, most, most)
    if prefills:
        largest = max(largest, _step(config, prefills[-1], 1))
    return largest + capture_sizes.result_bytes(
        config, sizes + drafts, prefills, capture_sizes.drafter_sizes(config, 8)
    )


def history_bytes(config: EngineConfig) -> int:
    """Tokens of requests with penalties."""
    scheduler = config.scheduler
    return capture_sizes.history_bytes(scheduler.max_num_seqs, config.model.vocab_size, scheduler.max_model_len)


def _step(config: EngineConfig, tokens: int, sampled: int) -> int:
    """``tokens`` tokens, of which ``sampled`` rows get logits and draws: the larger of a layer and the head."""
    model, scheduler, size = config.model, config.scheduler, DTYPE_BYTES[config.model.dtype]
    hidden = model.hidden_size
    sequences = min(scheduler.max_num_seqs, tokens)
    # Block tables; sums of chunks of long sequences; ids, positions and slots.
    beside = sequences * -(-scheduler.max_model_len // config.cache.block_size) * 4
    beside += min(_MOST_CHUNKS, sequences * _CHUNKS_OF_A_SEQUENCE) + tokens * 32
    beside += _CHUNKS_OF_LATENTS if isinstance(model.text, DeepseekConfig) else 0
    if config.lora is not None:  # what a layer's adapters make of a row first
        beside += tokens * 4 * max(512, 3 * config.lora.max_lora_rank)
    layer = tokens * size * (4 * hidden + max(_attention_size(model), 3 * model.text.inner_size))
    logits = tokens * size * 2 * hidden + sampled * size * (hidden + model.vocab_size)
    return max(layer, logits) + beside


def _attention_size(model: ModelConfig) -> int:
    """Numbers of a token in attention: queries, keys, values and results."""
    text, heads = model.text, model.num_heads
    if not isinstance(text, DeepseekConfig):
        return (3 * heads + 2 * model.num_kv_heads) * max(model.head_sizes)
    # Queries as projected and as latents, of which each head attends to sums, and values made of these.
    kept = text.kv_lora_rank + model.head_size
    own = text.qk_nope_head_dim + model.head_size + kept + text.kv_lora_rank + text.v_head_dim
    return heads * own + kept + model.hidden_size
