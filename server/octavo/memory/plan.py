"""Plan a device's memory: whether a model fits, how much the KV cache gets, and what to change when it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.interface.engine_config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from octavo.interface.kv_cache_layout import NO_BOUND, KVCacheLayout, make_layout
from octavo.interface.kv_cache_spec import DTYPE_BYTES, KVCacheSpec
from octavo.interface.quantizations import PER_CHANNEL, has_int8_rows
from octavo.interface.ranks import ONE_STAGE, Stage
from octavo.interface.state_spec import StateSpec
from octavo.memory.images import encoder_bytes, encoder_cache_bytes, recorded_bytes, with_images
from octavo.memory.ledger import MIB, DeviceMemory, MemoryLedger, ModelMemory, gib
from octavo.memory.lora import adapter_bytes, slot_bytes
from octavo.memory.states import pending_bytes
from octavo.memory.too_long import TooLongError
from octavo.system import limits

# Of a CPU's memory limit, for prefixes of requests that have ended. The rest of a KV cache is touched only when running
# sequences need it, so a machine that does other things as well does not slowly lose all its memory to the cache.
PREFIX_CACHE_SHARE = 1 / 8
PROCESS_BYTES = 256 << 20  # of a CPU engine beside weights and KV cache: libraries, a step's tensors
MAPPED_BYTES = (8 << 20) + (16 << 10)  # that a GPU lets others read, see octavo_kernels.triton.exchange.region_bytes
NCCL_BYTES = 300 << 20  # about: its buffers for each pair of GPUs; they are measured at start
EXCHANGED_BYTES = 4 << 20  # that a rank on a CPU hands to others, see octavo_kernels.cpu.shared_memory_bytes
# On a CUDA device, for what profiling does not see: workspaces of libraries, kernels loaded later, fragmentation.
DEVICE_SLACK = 256 << 20
# Default max_num_batched_tokens. A CPU takes half a millisecond for each token of a small model, and more of them at a
# time are no faster: they only keep the decodes beside them waiting. A GPU's step of prompts takes the host some
# milliseconds to launch, longer than the device needs for few tokens of a small model.
MAX_NUM_BATCHED_TOKENS = {"cpu": 192, "cuda": 8192}
# Matrix units take a third of the time for a token, and less for each of many: as long as 192 tokens take without them.
MATRIX_TOKENS = 512


def available_for_weights(cache: CacheConfig, total: int, in_use: int = 0, on_device: bool = False) -> int:
    """Bytes that weights and a minimal KV cache may take of ``total``, of which others use ``in_use``."""
    return int(total * cache.gpu_memory_utilization) - in_use - (DEVICE_SLACK if on_device else PROCESS_BYTES)


def available_on(device: DeviceMemory, cache: CacheConfig) -> int:
    """`available_for_weights` of a device."""
    in_use = device.in_use + device.communication
    return available_for_weights(cache, device.total, in_use, device.kind != "cpu")


def fits(cache: CacheConfig, memory: ModelMemory, available: int) -> bool:
    """True if ``available`` bytes hold the weights and the smallest KV cache: the null block and one more."""
    state = 0 if memory.state is None else memory.state.num_bytes
    least = 2 * cache.block_size * sum(spec.bytes_per_token() for spec in memory.specs) + state
    return memory.weights + least <= available


def check_weights_fit(cache: CacheConfig, memory: ModelMemory, device: DeviceMemory) -> None:
    """Raises ConfigError when not even a minimal KV cache fits beside the weights, with the figures."""
    available = available_on(device, cache)
    if not fits(cache, memory, available):
        raise ConfigError(
            f"{memory.model} needs {gib(memory.weights)} for its weights ({memory.weight_dtype}) and a KV cache beside "
            f"them; of the {gib(device.total)} of {device.where}, {gib(max(available, 0))} are available"
        )


def with_token_budget(config: EngineConfig, kind: str, has_matrix_units: bool = False) -> SchedulerConfig:
    """The scheduler's config with what suits the kind of device where it leaves max_num_batched_tokens open.

    ``has_matrix_units``: of a CPU whose kernels multiply by them (`limits.has_matrix_units`): plain bfloat16, and int8
    with a scale a row, which experts never have. Ranks may run on unlike machines and must agree, so that they take the
    same number everywhere.
    """
    asked, model = config.scheduler, config.model
    stored = model.hf_config.get("quantization_config") or {}
    if model.quantization == PER_CHANNEL or (has_int8_rows(stored) and model.quantization != "none"):
        suits_units = model.num_experts == 0 and _has_units_alone(config, kind, has_matrix_units)
    else:
        is_plain = model.dtype == "bfloat16" and model.weight_dtype is None and model.quantization in (None, "none")
        suits_units = is_plain and _may_suit_units(config, kind, has_matrix_units)
    tokens = MATRIX_TOKENS if suits_units else MAX_NUM_BATCHED_TOKENS[kind]
    return replace(asked, max_num_batched_tokens=asked.max_num_batched_tokens or max(tokens, asked.max_num_seqs))


def with_int8_kind(config: EngineConfig, kind: str, has_matrix_units: bool = False) -> EngineConfig:
    """``config`` with the fastest kind of weights where it asks for int8: with a scale for each channel, which matrix
    units multiply. For ``has_matrix_units`` and ranks see `with_token_budget`."""
    if config.model.is_encoder or not _may_suit_units(config, kind, has_matrix_units):
        return config
    speculative, draft = config.speculative, config.speculative.draft
    if draft is not None and draft.quantization == "int8" and draft.files.format != "gguf":
        speculative = replace(speculative, draft=replace(draft, quantization=PER_CHANNEL))
    own = PER_CHANNEL if config.model.quantization == "int8" else config.model.quantization
    return replace(config, model=replace(config.model, quantization=own), speculative=speculative)


def _may_suit_units(config: EngineConfig, kind: str, has_matrix_units: bool) -> bool:
    """True for weights that are stored as values, for one rank on a CPU that has matrix units."""
    is_packed = config.model.files.format == "gguf" or "quantization_config" in config.model.hf_config
    return not is_packed and _has_units_alone(config, kind, has_matrix_units)


def _has_units_alone(config: EngineConfig, kind: str, has_matrix_units: bool) -> bool:
    """True for one rank on a CPU that has matrix units."""
    return kind == "cpu" and has_matrix_units and config.parallel.world_size == 1


def with_step_limits(config: EngineConfig, kind: str, has_matrix_units: bool = False) -> EngineConfig:
    """``config`` with what it leaves open of a step on that kind of device, see `with_token_budget`. Raises ConfigError
    where images have no room."""
    limited = with_token_budget(config, kind, has_matrix_units)
    return replace(config, scheduler=with_images(config, limited))


def kv_cache_layout(
    specs: Sequence[KVCacheSpec],
    config: EngineConfig,
    max_in_flight: int,
    part_of: tuple[Sequence[KVCacheSpec], int] | None = None,
    state: StateSpec | None = None,
) -> KVCacheLayout:
    """The layout of ``config``'s cache for the layers ``specs``, with up to ``max_in_flight`` steps under way, or one
    on each stage of a pipeline. ``part_of`` and ``state``: see `make_layout`."""
    max_in_flight = max(max_in_flight, config.parallel.pipeline_parallel_size)
    scheduler, cache = config.scheduler, config.cache
    step = min(scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold or NO_BOUND)
    grouped = not cache.disable_hybrid_kv_cache_manager
    beyond = config.speculative.num_speculative_tokens if config.speculative.in_worker else 0
    tokens = max_in_flight * step + beyond
    return make_layout(specs, scheduler.max_model_len, cache.block_size, tokens, grouped, part_of, state)


def check_fits(config: EngineConfig, memory: ModelMemory, device: DeviceMemory) -> int:
    """The longest sequence that fits on ``device``, as far as can be known before anything is read. Raises ConfigError
    when the weights, or one sequence of the length that is asked for beside them, do not fit."""
    check_weights_fit(config.cache, memory, device)
    if config.model.is_encoder:
        return config.scheduler.max_model_len
    config = with_step_limits(config, device.kind, device.has_matrix_units)
    layout = kv_cache_layout(memory.specs, config, device.steps_in_flight, state=memory.state)
    # The memory of a device's step is known later.
    return plan_memory(config, layout, memory.weights, device, stage=memory.stage).max_model_len


def plan_memory(
    config: EngineConfig,
    layout: KVCacheLayout,
    weights: int,
    device: DeviceMemory,
    *,
    activations: int = 0,
    graphs: int = 0,
    histories: int = 0,
    adapters: int | None = None,
    encoder: int | None = None,
    stage: Stage = ONE_STAGE,
) -> MemoryLedger:
    """The ledger of ``weights`` bytes on ``device``; see `plan_cpu_memory` and `plan_device_memory`. ``adapters``:
    bytes of a GPU's slots, ``encoder``: of the largest image there, where they are known. ``stage``: of a pipeline, of
    which the first one encodes images."""
    asked = config.scheduler.max_model_len, config.fit_max_model_len
    images = (0, 0)
    if stage.is_first:
        images = encoder_bytes(config) if encoder is None else encoder, encoder_cache_bytes(config)
    if device.kind == "cpu":
        exchanged = communication_bytes(config.parallel.tensor_parallel_size) + handed_on_bytes(config)
        encoder = images[0] + (recorded_bytes(config) if stage.is_first else 0)
        others = exchanged, adapter_bytes(config), encoder, images[1], pending_bytes(config, layout.state)
        return plan_cpu_memory(config.cache, layout, weights, *asked, device.total, *others)
    adapters = slot_bytes(config) if adapters is None else adapters
    in_use = device.in_use + device.communication + weights + adapters
    return plan_device_memory(
        config.cache,
        layout,
        weights,
        *asked,
        device_total=device.total,
        in_use=in_use,
        activations=activations,
        graphs=graphs,
        histories=histories,
        communication=device.communication,
        adapters=adapters,
        encoder=images[0],
        encoder_cache=images[1],
    )


def communication_bytes(ranks: int) -> int:
    """The bytes of each CPU rank's part of the memory through which ranks exchange tensors."""
    return 0 if ranks == 1 else EXCHANGED_BYTES


def handed_on_bytes(config: EngineConfig) -> int:
    """The approximate bytes of the states that a pipeline's stages on CPUs hand on: of one step for each stage."""
    stages, width = config.parallel.pipeline_parallel_size, 2 * config.model.hidden_size  # hidden states and residual
    row = width * DTYPE_BYTES[config.model.dtype]
    return 0 if stages == 1 else stages * config.scheduler.max_num_batched_tokens * row


def device_communication_bytes(parallel: ParallelConfig) -> int:
    """The bytes of each rank's GPU for the memory through which ranks exchange tensors."""
    if parallel.tensor_parallel_size == 1:
        return 0
    return NCCL_BYTES if parallel.disable_custom_all_reduce else MAPPED_BYTES


def plan_without_cache(cache: CacheConfig, weights: int, max_model_len: int, total: int) -> MemoryLedger:
    """The ledger of an encoder, which has no KV cache, on a device with ``total`` bytes."""
    return MemoryLedger(
        total=total,
        weights=weights,
        kv_cache=0,
        num_blocks=1,
        block_bytes=0,
        max_model_len=max_model_len,
        layout=make_layout([], max_model_len, cache.block_size, 0, grouped=False),
        parts=(("left free", total - int(total * cache.gpu_memory_utilization)),),
    )


def plan_cpu_memory(
    cache: CacheConfig,
    layout: KVCacheLayout,
    weights: int,
    max_model_len: int,
    fit_max_model_len: bool,
    limit: int | None = None,
    communication: int = 0,
    adapters: int = 0,
    encoder: int = 0,
    encoder_cache: int = 0,
    pending: int = 0,
) -> MemoryLedger:
    """Size the KV cache of a CPU engine: what the weights and the process itself leave of ``gpu_memory_utilization`` of
    the memory that it may use, ``limit`` bytes (None: as this process). ``communication``: bytes that a rank shares
    with others; ``adapters``: that are kept for LoRA adapters; ``encoder``: that the largest image takes while it is
    encoded; ``encoder_cache``: that are kept of images; ``pending``: of rows of recurrent layers that are not yet in a
    state. Raises ConfigError when one sequence of ``max_model_len`` does
    not fit, unless ``fit_max_model_len`` lets it be lowered."""
    total = limits.memory_limit() if limit is None else limit
    room = available_for_weights(cache, total) - weights - communication - adapters - encoder - encoder_cache - pending
    hint = (
        f"; of {gib(total)}, gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves {gib(max(room, 0))} beside "
        f"weights ({gib(weights)}){_images_hint(encoder, encoder_cache)} and the process ({gib(PROCESS_BYTES)})"
    )
    left = total - int(total * cache.gpu_memory_utilization)
    further = (
        ("communication", communication),
        ("adapters", adapters),
        ("encoder", encoder),
        ("encoder cache", encoder_cache),
        ("pending rows", pending),
    )
    parts = (("process", PROCESS_BYTES), *((name, size) for name, size in further if size), ("left free", left))
    ledger = _plan(cache, layout, weights, max_model_len, fit_max_model_len, total, room, hint, parts)
    if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None and cache.enable_prefix_caching:
        most = int(total * PREFIX_CACHE_SHARE) // ledger.block_bytes
        ledger = replace(ledger, prefix_cache_blocks=min(most, ledger.num_blocks - 1))
    if weights + ledger.kv_cache > total and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"weights ({gib(weights)}) and KV cache ({gib(ledger.kv_cache)}) are more than the {gib(total)} that this "
            "process may use; lower --kv-cache-memory-bytes to at most "
            f"{max(available_for_weights(cache, total) - weights, 0)}"
        )
    return ledger


def plan_device_memory(
    cache: CacheConfig,
    layout: KVCacheLayout,
    weights: int,
    max_model_len: int,
    fit_max_model_len: bool,
    *,
    device_total: int,
    in_use: int,
    activations: int,
    graphs: int,
    histories: int = 0,
    communication: int = 0,
    adapters: int = 0,
    encoder: int = 0,
    encoder_cache: int = 0,
) -> MemoryLedger:
    """Size the KV cache of a device with memory of its own.

    All in bytes: ``in_use`` is what is used once the weights are loaded (weights, CUDA context, other processes,
    ``communication``, by which ranks exchange tensors, and ``adapters``, the slots of LoRA adapters),
    ``activations`` the peak of the largest step, ``graphs`` is reserved for captured steps, ``histories`` for the
    tokens of requests with penalties, ``encoder`` for the largest image in the encoder, whose tensors are of other
    sizes than a step's, ``encoder_cache`` for what is kept of images. The cache gets the rest of
    ``gpu_memory_utilization`` of the device. Raises ConfigError when that is too little, with the figure to change.
    """
    total = int(device_total * cache.gpu_memory_utilization)
    room = total - in_use - activations - graphs - histories - encoder - encoder_cache - DEVICE_SLACK
    slots = f", adapters ({adapters / MIB:,.0f} MiB; lower max_loras or max_lora_rank)" if adapters else ""
    hint = (
        f"; of {device_total / MIB:,.0f} MiB, gpu_memory_utilization={cache.gpu_memory_utilization:g} leaves "
        f"{max(room, 0) / MIB:,.0f} MiB beside weights ({weights / MIB:,.0f} MiB), a step ({activations / MIB:,.0f} "
        f"MiB; lower max_num_batched_tokens or max_num_seqs), graphs ({graphs / MIB:,.0f} MiB; enforce_eager), token "
        f"histories ({histories / MIB:,.0f} MiB; lower max_num_seqs){slots}{_images_hint(encoder, encoder_cache)} and "
        f"other uses ({max(in_use - weights - adapters, 0) / MIB:,.0f} MiB)"
    )
    parts = (
        ("others, context", max(in_use - weights - communication - adapters, 0)),
        *((name, size) for name, size in (("communication", communication), ("adapters", adapters)) if size),
        ("activations", activations),
        ("graphs", graphs),
        ("histories", histories),
        *((name, size) for name, size in (("encoder", encoder), ("encoder cache", encoder_cache)) if size),
        ("slack", DEVICE_SLACK),
    )
    ledger = _plan(cache, layout, weights, max_model_len, fit_max_model_len, total, room, hint, parts)
    if in_use + ledger.kv_cache > device_total and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"weights ({gib(weights)}) and KV cache ({gib(ledger.kv_cache)}) are more than the {gib(device_total)} of "
            f"the device; lower --kv-cache-memory-bytes to at most {max(room, 0)}"
        )
    return ledger


def _images_hint(encoder: int, encoder_cache: int) -> str:
    if not encoder and not encoder_cache:
        return ""
    return (
        f", images ({gib(encoder + encoder_cache)}; lower mm_encoder_cache_tokens, make images smaller by "
        'mm_processor_kwargs, or give limit_mm_per_prompt {"image": 0})'
    )


def _plan(
    cache: CacheConfig,
    layout: KVCacheLayout,
    weights: int,
    max_model_len: int,
    fit_max_model_len: bool,
    total: int,
    room: int,
    hint: str,
    parts: tuple[tuple[str, int], ...] = (),
) -> MemoryLedger:
    """``room``: bytes for the KV cache unless the configuration sets them; ``hint`` ends the error's sentence."""
    block_bytes, needed = layout.block_bytes, layout.most_blocks(max_model_len)
    if cache.num_gpu_blocks_override is not None:
        usable = cache.num_gpu_blocks_override
    else:
        usable = (cache.kv_cache_memory_bytes or max(room, 0)) // block_bytes - 1
    longest = layout.longest(usable, max_model_len)
    if usable < needed and fit_max_model_len and longest > 0:
        max_model_len, needed = longest, layout.most_blocks(longest)
    if usable < needed:
        raise TooLongError(
            f"one sequence of max_model_len={max_model_len} needs {needed} KV cache blocks "
            f"({gib(needed * block_bytes)}), there is room for {max(usable, 0)}; ",
            longest,
            f"enlarge the cache: --kv-cache-memory-bytes {(needed + 1) * block_bytes}{hint}",
        )
    return MemoryLedger(
        total=total,
        weights=weights,
        kv_cache=(usable + 1) * block_bytes,
        num_blocks=usable + 1,
        block_bytes=block_bytes,
        max_model_len=max_model_len,
        layout=layout,
        parts=parts,
    )
