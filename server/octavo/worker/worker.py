"""One device's share of the engine: loads the model, sizes and allocates the KV cache, runs steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

import octavo_kernels
from octavo.errors import ConfigError
from octavo.interface.engine_config import DEFAULT_ON_CPU, EngineConfig, SpeculativeConfig, num_sampled_rows
from octavo.interface.kv_cache_layout import KVCacheGroup, KVCacheLayout
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.step import PendingOutput, SchedulerOutput
from octavo.layers.parallel import TensorParallel
from octavo.loader.load_model import load_model
from octavo.memory.advice import out_of_memory, refusal, remembered
from octavo.memory.capture_sizes import history_bytes
from octavo.memory.dry_run import make_plan
from octavo.memory.ledger import MIB, DeviceMemory, MemoryLedger, this_machine
from octavo.memory.plan import (
    check_fits,
    kv_cache_layout,
    plan_memory,
    plan_without_cache,
    with_int8_kind,
    with_step_limits,
)
from octavo.memory.states import check_recurrent_on, pending_rows
from octavo.models.base import CausalLM, Model
from octavo.models.encoder import Encoder
from octavo.models.image_reader import ReadsImages
from octavo.models.state_reader import StateReader
from octavo.system import limits
from octavo.worker.cpu.runner import CPURunner
from octavo.worker.device import check_ranks_on_gpus, choose_device, choose_kernels, resolve_dtype
from octavo.worker.encoder_runner import EncoderRunner
from octavo.worker.gpu.graphs import CudaCapture, run_eagerly
from octavo.worker.gpu.memory_profile import StepModels, measure_peaks
from octavo.worker.gpu.runner import GPURunner
from octavo.worker.gpu.warm_up import warm_up
from octavo.worker.grammars.sequences import SequenceGrammars
from octavo.worker.grammars.shared_masks import MakeGrammars
from octavo.worker.image_encoder import ImageEncoder
from octavo.worker.kv_cache import KVCache, allocate_kv_cache, kv_cache_specs
from octavo.worker.lora import AdapterManager, make_adapters
from octavo.worker.model_memory import measure_built
from octavo.worker.model_runner import ModelRunner
from octavo.worker.pooler import PoolingHead, classify
from octavo.worker.request_states import RequestStates
from octavo.worker.spec_decode.draft_model import DraftModel
from octavo.worker.spec_decode.prediction_drafter import PredictionDrafter
from octavo.worker.stage import Pipes
from octavo.worker.stage_runner import StageRunner

logger = logging.getLogger(__name__)

# Takes this rank's KV cache blocks and max_model_len, and returns the smallest of all ranks'.
Agree = Callable[[Sequence[int]], Sequence[int]]

# Default max_num_batched_tokens of encoders, or the longest text if that is more: nobody waits beside them.
ENCODER_TOKENS = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True)
class _Loaded:
    """The models, and the specs of what their layers keep of a token."""

    config: EngineConfig
    model: Model
    specs: list[KVCacheSpec] = field(default_factory=list)
    draft_model: Model | None = None
    draft_specs: list[KVCacheSpec] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """The division of the device's memory."""

    config: EngineConfig  # with max_model_len as all ranks have it
    layout: KVCacheLayout
    ledger: MemoryLedger
    images: ImageEncoder | None


@dataclass(frozen=True)
class _Memory:
    """The memory of requests: the KV cache's blocks and the rows."""

    kv_cache: KVCache
    requests: RequestStates


class Worker:
    """One device with its model, or a rank's part of it, KV cache and runner."""

    def __init__(
        self,
        config: EngineConfig,
        overlap: bool = False,
        tp: TensorParallel = TensorParallel(),
        agree: Agree = lambda own: own,
        make_grammars: MakeGrammars = SequenceGrammars,
        pipes: Pipes = Pipes(),
    ) -> None:
        """``overlap``: let steps overlap on a CPU too, with the runner of GPUs. ``agree`` is called before the KV cache
        is allocated, as often on all ranks. Raises ConfigError when the engine cannot run."""
        self.runner: ModelRunner | EncoderRunner
        self.tp, self._agree, self._make_grammars, self._pipes = tp, agree, make_grammars, pipes
        self.adapters: AdapterManager | None = None
        self.device = choose_device(config.device)
        try:
            self._start(config, overlap)
        except (MemoryError, RuntimeError) as error:  # torch's own is one of these
            advice = out_of_memory(error, config, self.device.type)
            if advice is None:
                raise
            raise ConfigError(f"{config.model.model}: {advice}") from error

    def _start(self, config: EngineConfig, overlap: bool) -> None:
        config = self._choose(config, overlap)
        own_len = config.scheduler.max_model_len
        config = config.with_max_model_len(self._longest(config))  # tables of the model are as long as that
        loaded = self._load(config)
        self.model = loaded.model
        if isinstance(loaded.model, Encoder):
            self._start_encoder(config, loaded.model)
            return
        plan = self._plan(loaded, own_len)
        self.config, self.ledger = plan.config, plan.ledger
        memory = self._allocate(plan)
        self.runner = self._build(loaded, plan, memory)

    def _choose(self, config: EngineConfig, overlap: bool) -> EngineConfig:
        """Decide what ``config`` leaves to the device."""
        config = resolve_dtype(replace(config, device=self.device.type), self.device)
        choose_kernels(config, self.device)
        asked = config.model.quantization
        config = with_int8_kind(config, self.device.type, limits.has_matrix_units())
        if config.model.quantization != asked:
            logger.info(
                "quantization int8: a scale for each channel, which is the fastest on this CPU's matrix units; "
                "--quantization int8_per_group keeps one for every 32 weights, which is closer to the checkpoint"
            )
        on_cpu = self.device.type == "cpu"
        self._num_processes = config.parallel.num_processes
        if not on_cpu:
            check_ranks_on_gpus(config.parallel)
        self._use_gpu_runner = overlap or not on_cpu
        check_recurrent_on(config.model, "cuda" if self._use_gpu_runner else "cpu")
        config = _with_speculation(config, self._use_gpu_runner)
        self.max_in_flight = 2 if self._use_gpu_runner else 1
        self.steps_in_flight = max(self.max_in_flight, self.tp.stage.size)  # of the whole pipeline
        if on_cpu:
            torch.set_num_threads(max(1, limits.cpu_count() // self._num_processes))
        elif not octavo_kernels.can_be_captured(self.device):
            config = replace(config, enforce_eager=True)
        self._captures = not (on_cpu or config.enforce_eager)
        return config

    def _load(self, config: EngineConfig) -> _Loaded:
        """Load the model and, if there is one, the draft model."""
        started = time.perf_counter()
        model = load_model(config.model, config.load_format, self.device, self.tp)
        limits.trim_memory()  # give back what only loading needed
        logger.info("loaded %s in %.2f s", config.model.model, time.perf_counter() - started)
        if isinstance(model, Encoder):
            return _Loaded(config, model)
        return _Loaded(
            with_step_limits(config, self.device.type, limits.has_matrix_units()),
            model,
            kv_cache_specs(model, config, self.device),
            *self._load_drafter(config.drafter),
        )

    def _plan(self, loaded: _Loaded, own_len: int) -> _Plan:
        """Divide the device's memory. ``own_len``: max_model_len as it was asked for."""
        model, num_layers = loaded.model, len(loaded.specs)
        assert isinstance(model, CausalLM)
        specs = loaded.specs + loaded.draft_specs
        state = model.state_spec()
        layout = kv_cache_layout(specs, loaded.config, self.max_in_flight, model.specs_of_all, state)
        model.set_groups(layout.groups_of(range(num_layers)))
        draft_bytes = 0
        if loaded.draft_model is not None:
            groups = layout.groups_of(range(num_layers, len(specs)))
            draft_bytes = _attach(loaded.draft_model, model, groups, self._use_gpu_runner)
        self.adapters = make_adapters(model, loaded.config, self.device if self._use_gpu_runner else None)
        images = _image_encoder(model, self.device)
        ledger = self._plan_memory(loaded.config, layout, num_layers, loaded.draft_model, draft_bytes, images)
        for line in ledger.lines(model.weight_bytes_by_kind()):
            logger.info(line)
        if shortened := ledger.shortened(own_len, loaded.config.cache):
            logger.warning(shortened)
        ledger = ledger.cut_to(*self._agree(ledger.limits()))
        return _Plan(loaded.config.with_max_model_len(ledger.max_model_len), layout, ledger, images)

    def _allocate(self, plan: _Plan) -> _Memory:
        """Allocate the KV cache and the rows of requests."""
        config = plan.config
        assert isinstance(self.model, CausalLM)
        sizes = plan.ledger.num_blocks, self.device, config.scheduler.max_num_seqs, pending_rows(config)
        kv_cache = allocate_kv_cache(plan.layout, *sizes)
        head = PoolingHead(config.model, self.device, partial(classify, self.model, config.model.pooler.token_ids))
        groups = len(plan.layout.groups)
        rest = groups, self._make_grammars, plan.layout.state_blocks
        requests = RequestStates(config, self.device, self._use_gpu_runner, head, *rest)
        return _Memory(kv_cache, requests)

    def _build(self, loaded: _Loaded, plan: _Plan, memory: _Memory) -> ModelRunner:
        """Build the runner of steps, and prepare its device."""
        model, config, images = loaded.model, plan.config, plan.images
        assert isinstance(model, CausalLM)
        kv_cache, requests, draft_model = memory.kv_cache, memory.requests, loaded.draft_model
        # The drafter's part of the blocks; pages are touched for both at once.
        part = KVCache(kv_cache.blocks[:0], kv_cache.layers[len(loaded.specs) :])
        if self._use_gpu_runner:
            capture = CudaCapture() if self._captures else run_eagerly
            drafter = (draft_model, part.layers) if draft_model else None
            on_gpu = GPURunner(config, model, requests, kv_cache.layers, capture, drafter, self.adapters)
            runner = ModelRunner(model, requests, on_gpu, kv_cache, adapters=self.adapters, images=images)
            if self.device.type != "cpu":
                self._prepare(runner, on_gpu, config)
            return runner
        rows = config.scheduler.max_num_batched_tokens
        logits = num_sampled_rows(config.scheduler.max_num_seqs, config.speculative.num_speculative_tokens)
        reader = draft_model if isinstance(draft_model, StateReader) else None
        on_cpu = CPURunner(model, requests, kv_cache, rows, logits, self._pipes.before, reader, self.adapters)
        if not self.tp.stage.is_last:
            return StageRunner(model, requests, on_cpu, kv_cache, self._pipes, images)
        windows = [group.window for group in plan.layout.groups if group.window is not None]
        host_drafter = _drafter(draft_model, requests, part, (rows, logits), min(windows, default=None))
        return ModelRunner(model, requests, on_cpu, kv_cache, host_drafter, self.adapters, images)

    def _load_drafter(self, config: EngineConfig | None) -> tuple[Model | None, list[KVCacheSpec]]:
        """Load the draft model; returns it with the specs of its layers. Without ``config`` there is none."""
        if config is None:
            return None, []
        config = resolve_dtype(config, self.device)
        choose_kernels(config, self.device)
        started = time.perf_counter()
        model = load_model(config.model, config.load_format, self.device)
        limits.trim_memory()
        logger.info("loaded the draft model %s in %.2f s", config.model.model, time.perf_counter() - started)
        return model, kv_cache_specs(model, config, self.device)

    def _start_encoder(self, config: EngineConfig, model: Encoder) -> None:
        """Start an encoder: it has no KV cache, and computes each text in one step."""
        asked, longest = config.scheduler, config.model.max_model_len
        budget = asked.max_num_batched_tokens or max(ENCODER_TOKENS[self.device.type], longest)
        self.config = replace(config, scheduler=replace(asked, max_num_batched_tokens=budget))
        on_cpu = self.device.type == "cpu"
        total = limits.memory_limit() if on_cpu else torch.cuda.mem_get_info(self.device)[1]
        self.ledger = plan_without_cache(config.cache, model.num_weight_bytes(), longest, total)
        for line in self.ledger.lines(model.weight_bytes_by_kind()):
            logger.info(line)
        self._agree((self.ledger.num_blocks, longest))
        self.max_in_flight = self.steps_in_flight = 1 if on_cpu else 2
        self.runner = EncoderRunner(model, self.config, self.device)
        self.runner.warm_up()

    def _longest(self, config: EngineConfig) -> int:
        """The longest sequence that fits on every stage, as far as is known before anything is read: they have other
        weights each, and all make the same groups of layers of it."""
        own = self._check_fits(config)
        return self._agree((own,))[0] if self.tp.stage.size > 1 else own

    def _check_fits(self, config: EngineConfig) -> int:
        """See `octavo.memory.plan.check_fits`."""
        measure, device = remembered(partial(measure_built, stage=self.tp.stage)), self._device_memory()
        memory = measure(config, self.tp.size)
        try:
            return check_fits(config, memory, device)
        except ConfigError as error:
            host = None if device.kind == "cpu" else this_machine()
            of_all = self.tp.size * config.parallel.data_parallel_size
            whole = replace(device, total=device.total * of_all) if device.kind == "cpu" else device
            plan = make_plan(config, whole, measure, self.tp.size)
            raise ConfigError(refusal(config, plan, measure, host)) from error

    def _device_memory(self) -> DeviceMemory:
        if self.device.type == "cpu":
            machine = this_machine()  # whose memory they share
            return replace(machine, total=machine.total // self._num_processes, overlap=self.max_in_flight > 1)
        free, total = torch.cuda.mem_get_info(self.device)
        has_float8 = torch.cuda.get_device_capability(self.device) >= (8, 9)
        communication = self.tp.group.device_bytes if self.tp.group is not None else 0  # which it has by now
        in_use = total - free - communication
        return DeviceMemory(self.device.type, total, in_use, has_float8=has_float8, communication=communication)

    def _prepare(self, runner: ModelRunner, on_gpu: GPURunner, config: EngineConfig) -> None:
        """Capture graphs and compile kernels, so that no request waits for them."""
        started = time.perf_counter()
        if self._captures:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            num_sizes = on_gpu.capture_all()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # of the captures' stream, which is not used again
            taken, seconds = free - torch.cuda.mem_get_info(self.device)[0], time.perf_counter() - started
            planned = self.ledger.shares().get("graphs", 0)
            size = f"{taken / MIB:,.0f} MiB, planned were {planned / MIB:,.0f}"
            logger.info("captured steps of %d sizes in %.2f s: they take %s", num_sizes, seconds, size)
            started = time.perf_counter()
        warm_up(runner, config.scheduler)
        logger.info("warmed up in %.2f s", time.perf_counter() - started)

    def _plan_memory(
        self,
        config: EngineConfig,
        layout: KVCacheLayout,
        num_layers: int,
        drafter: Model | None,
        draft_bytes: int,
        images: ImageEncoder | None,
    ) -> MemoryLedger:
        """``num_layers``: of the model; ``draft_bytes``: of the draft model's weights."""
        weights, scheduler = self.model.num_weight_bytes() + draft_bytes, config.scheduler
        if self.device.type == "cpu":
            ledger = plan_memory(config, layout, weights, self._device_memory(), stage=self.tp.stage)
            return replace(ledger, drafter=draft_bytes)
        assert isinstance(self.model, CausalLM)
        adapters = self.adapters.model_adapters if self.adapters else None
        parts = StepModels(self.model, layout, num_layers, drafter, adapters, images)
        peaks = measure_peaks(config, parts, self.device, self._captures)
        slots = 0 if adapters is None else adapters.num_bytes
        device = self._device_memory()
        ledger = plan_memory(
            config,
            layout,
            weights,
            replace(device, in_use=device.in_use - weights - slots),  # which are there
            activations=peaks.activations,
            graphs=peaks.graphs,
            histories=history_bytes(scheduler.max_num_seqs, config.model.vocab_size, scheduler.max_model_len),
            adapters=slots,
            encoder=peaks.encoder,
        )
        return replace(ledger, drafter=draft_bytes)

    def cut_drafts(self, step: SchedulerOutput) -> None:
        """See `SequenceGrammars.cut`; on rank 0, before any other has the step."""
        if step.scheduled_spec_decode_tokens and isinstance(self.runner, ModelRunner):
            grammars = self.runner.requests.grammars
            if isinstance(grammars, SequenceGrammars):
                grammars.cut(step)

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start a step; what is returned waits for its results."""
        return self.runner.execute_model(step)

    def when_done(self) -> Callable[[], bool]:
        """Return a function that tells, without waiting, if the device has done all that was started before."""
        if self.device.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()
        event.record()

        def done() -> bool:
            try:
                is_done: bool = event.query()
            except RuntimeError:  # of a step: whoever waits for its results is told
                return True
            return is_done

        return done


def _image_encoder(model: CausalLM, device: torch.device) -> ImageEncoder | None:
    """None: images change nothing here."""
    if not isinstance(model, ReadsImages) or not model.config.reads_images:
        return None
    encoder = ImageEncoder(model.vision, device, model.config, model.rotary_of_images)
    return encoder if encoder.matters else None


def _with_speculation(config: EngineConfig, use_gpu_runner: bool) -> EngineConfig:
    """``config`` with what it leaves to the device decided. Raises ConfigError for what that cannot do."""
    if config.speculative.method == "auto":
        fits = not config.model.is_encoder and config.model.max_model_len > DEFAULT_ON_CPU.num_speculative_tokens
        default = DEFAULT_ON_CPU if fits and not use_gpu_runner else SpeculativeConfig()
        config = replace(config, speculative=default)
    return config


def _drafter(
    model: Model | None, requests: RequestStates, part: KVCache, sizes: tuple[int, int], window: int | None
) -> DraftModel | PredictionDrafter | None:
    """Create the drafter around ``model`` on a CPU, if there is one. ``sizes``: tokens of a step and rows of logits at
    most; ``window``: the shortest of any layer, if there are windows."""
    if isinstance(model, StateReader):
        return PredictionDrafter(model, requests, part.layers, max(sizes))
    return DraftModel(model, requests, part, sizes[0], window) if isinstance(model, CausalLM) else None


def _attach(model: Model, target: CausalLM, groups: list[KVCacheGroup], on_gpu: bool) -> int:
    """Have ``model`` guess for ``target``, with ``groups`` of its layers. Returns the bytes of its weights. Raises
    ConfigError where a draft model on a GPU, which reads the last two tokens, would write what a window has passed."""
    model.set_groups(groups)
    size = model.num_weight_bytes()
    if isinstance(model, StateReader):
        model.attach(target)
    elif on_gpu and any(group.layers and group.window == 1 for group in groups):
        raise ConfigError(
            f"speculative_config: method draft_model needs windows of 2 positions or more on GPUs, and model "
            f"{model.config.model} has layers with a window of 1; give another method"
        )
    return size
