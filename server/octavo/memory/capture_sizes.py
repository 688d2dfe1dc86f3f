"""Sizes at which a GPU's steps are captured, and the memory reserved for them. No torch: plans are made without."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.interface.engine_config import EngineConfig, num_sampled_rows
from octavo.interface.model_config.medusa import MedusaConfig

# Bytes that the driver takes for a captured graph: of a model, some 300 kernels; of sampling; of what a drafter reads
# and guesses.
MODEL_GRAPH_BYTES, SAMPLER_GRAPH_BYTES, DRAFTER_GRAPH_BYTES = 6 << 20, 1 << 20, 2 << 20
# Numbers of tokens that steps with prompts are captured for. Padding is at most a third from 33 tokens on; below, a
# step takes as long as reading the weights. Steps of more than 512 tokens keep a GPU busy for as long as the host takes
# to launch the next one.
PREFILL_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)

# Numbers of tokens that decodes with drafts are captured for: of each kind of step there may be few.
DRAFT_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_CAPTURED_DRAFTS = DRAFT_SIZES[-1]


def capture_sizes(max_num_seqs: int, multiple: int = 1) -> list[int]:
    """Numbers of sequences that steps are captured for, ascending: padding costs at most 7 rows up to 256, 15 above.

    All of them are multiples of ``multiple``.
    """
    largest = -(-min(max_num_seqs, 512) // multiple) * multiple
    sizes = [*(1, 2, 4), *range(8, 257, 8), *range(272, 513, 16)]
    return sorted({size for size in sizes if size < largest and size % multiple == 0} | {largest})


def decode_sizes(config: EngineConfig, row_multiple: int) -> list[int]:
    """Numbers of sequences that decode steps are captured for, ascending.

    In float32 a row's bits shall not depend on how many rows are beside it. A CPU's GEMM promises that for multiples of
    ``row_multiple``; cuBLAS does not, it chooses by the number of rows how it sums.
    """
    exact = config.model.dtype == "float32"
    return capture_sizes(config.scheduler.max_num_seqs, row_multiple if exact else 1)


def draft_sizes(config: EngineConfig, row_multiple: int) -> list[int]:
    """Numbers of tokens that decode steps with drafts are captured for, ascending; none without speculation."""
    num_drafts = config.speculative.num_speculative_tokens
    if not config.speculative.is_on:
        return []
    multiple = row_multiple if config.model.dtype == "float32" else 1
    most = min(num_sampled_rows(config.scheduler.max_num_seqs, num_drafts), MOST_CAPTURED_DRAFTS)
    largest = -(-most // multiple) * multiple
    return sorted({size for size in DRAFT_SIZES if size < largest and size % multiple == 0} | {largest})


def drafter_sizes(config: EngineConfig, row_multiple: int) -> list[int]:
    """Numbers of sequences that a drafter's steps are captured for, ascending; none without one."""
    if not config.speculative.in_worker:
        return []
    multiple = row_multiple if config.model.dtype == "float32" else 1
    largest = -(-config.scheduler.max_num_seqs // multiple) * multiple
    return sorted({size for size in (1, *DRAFT_SIZES) if size < largest and size % multiple == 0} | {largest})


def prefill_sizes(config: EngineConfig) -> list[int]:
    """Numbers of tokens that steps with prompts are captured for, ascending."""
    most = 0 if config.enforce_eager else config.scheduler.max_num_batched_tokens
    return [size for size in PREFILL_SIZES if size <= most]


def result_bytes(config: EngineConfig, sizes: list[int], prefills: list[int], drafter: Sequence[int] = ()) -> int:
    """The bytes that captured graphs of those sizes keep: the driver's part, and the results of each. ``drafter``:
    sizes of a drafter's graphs."""
    model = config.model
    deferred = model.text.deferred_size
    deferred += model.num_heads * max(model.head_sizes)
    reads, kinds = _readings(config)
    ways = 1 if config.lora is None else 2  # of steps: with and without adapters
    states = 4 * model.hidden_size if config.speculative.method == "eagle3" else 0  # others are the results themselves
    kept = sum(sizes) * (4 * model.hidden_size + states + 40) + sum(prefills) * 4 * deferred
    models, samplers = len(sizes) + len(prefills), 2 * len(sizes)
    graphs = ways * (models * MODEL_GRAPH_BYTES + samplers * SAMPLER_GRAPH_BYTES)
    drafters = ways * reads * len(sizes) + 2 * kinds * len(drafter)
    return graphs + drafters * DRAFTER_GRAPH_BYTES + ways * kept


def _readings(config: EngineConfig) -> tuple[int, int]:
    """The number of graphs of each size in which a drafter reads the step, and the number of kinds of guesses it
    makes."""
    speculative = config.speculative
    if speculative.draft is None or speculative.method == "draft_model":
        return 0, 2
    if isinstance(speculative.draft.text, MedusaConfig):
        return 1, speculative.draft.text.num_heads
    layers = speculative.draft.num_layers if speculative.method == "mtp" else 1
    return layers, layers + 1


def history_bytes(max_slots: int, vocab_size: int, max_model_len: int) -> int:
    """The maximum number of bytes of a `octavo.sample.token_pool.TokenPool`: every request has penalties and the
    maximum length, while the pool grows and the one before, half as large, is still there."""
    history, counts, seen = max_model_len + 1, vocab_size, -(-vocab_size // 32)
    return 4 * max_slots * (2 * history + counts + seen) * 3 // 2
