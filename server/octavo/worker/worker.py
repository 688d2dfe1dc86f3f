"""One device's share of the engine: loads the model, sizes and allocates the KV cache, runs steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from octavo.memory.capture_sizes import (
    decode_sizes,
    draft_sizes,
    drafter_sizes,
    history_bytes,
    prefill_sizes,
    result_bytes,
)
from octavo.memory.images import largest_image
from octavo.memory.ledger import (
    DeviceMemory,
    MemoryLedger,
    check_fits,
    kv_cache_layout,
    plan_memory,
    plan_without_cache,
    this_machine,
    with_step_limits,
)
from octavo.memory.plan import make_plan
from octavo.models.base import CausalLM, Model
from octavo.models.encoder import Encoder
from octavo.models.image_reader import ReadsImages
from octavo.models.state_reader import StateReader
from octavo.system import limits
from octavo.worker.cpu.runner import CPURunner
from octavo.worker.device import check_ranks_on_gpus, choose_device, choose_kernels, resolve_dtype
from octavo.worker.encoder_runner import EncoderRunner
from octavo.worker.gpu.graphs import CudaCapture, run_eagerly
from octavo.worker.gpu.memory_profile import DummySteps, peak_of
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
        config = resolve_dtype(replace(config, device=self.device.type), self.device)
        choose_kernels(config, self.device)
        on_cpu = self.device.type == "cpu"
        self._num_processes = config.parallel.num_processes
        if not on_cpu:
            check_ranks_on_gpus(config.parallel)
        use_gpu_runner = overlap or not on_cpu
        config = _with_speculation(config, use_gpu_runner)
        self.max_in_flight = 2 if use_gpu_runner else 1
        self.steps_in_flight = max(self.max_in_flight, self.tp.stage.size)  # of the whole pipeline
        if on_cpu:
            torch.set_num_threads(max(1, limits.cpu_count() // self._num_processes))
        elif not octavo_kernels.can_be_captured(self.device):
            config = replace(config, enforce_eager=True)
        self._captures = not (on_cpu or config.enforce_eager)
        own_len = config.scheduler.max_model_len
        config = config.with_max_model_len(self._longest(config))  # tables of the model are as long as that
        started = time.perf_counter()
        self.model = load_model(config.model, config.load_format, self.device, self.tp)
        limits.trim_memory()  # give back what only loading needed
        logger.info("loaded %s in %.2f s", config.model.model, time.perf_counter() - started)
        if isinstance(self.model, Encoder):
            self._start_encoder(config, self.model)
            return
        assert isinstance(self.model, CausalLM)
        specs = kv_cache_specs(self.model, config, self.device)
        num_layers = len(specs)
        draft_model, draft_specs = self._load_drafter(config.drafter)
        specs += draft_specs
        config = with_step_limits(config, self.device.type)
        layout = kv_cache_layout(specs, config, self.max_in_flight, self.model.specs_of_all)
        self.model.set_groups(layout.groups_of(range(num_layers)))
        groups = layout.groups_of(range(num_layers, len(specs)))
        draft_bytes = _attach(draft_model, self.model, groups, use_gpu_runner) if draft_model else 0
        self.adapters = make_adapters(self.model, config, self.device if use_gpu_runner else None)
        images = _image_encoder(self.model, device := self.device)
        self.ledger = self._plan_memory(config, layout, num_layers, draft_model, draft_bytes, images)
        for line in self.ledger.lines(self.model.weight_bytes_by_kind()):
            logger.info(line)
        shortened = self.ledger.shortened(own_len, config.cache)
        if shortened:
            logger.warning(shortened)
        self.ledger = self.ledger.cut_to(*self._agree(self.ledger.limits()))
        longest = self.ledger.max_model_len
        self.config = config = config.with_max_model_len(longest)
        scheduler = self.config.scheduler
        ledger = self.ledger
        kv_cache = allocate_kv_cache(layout, ledger.num_blocks, device)
        head = PoolingHead(self.config.model, device, partial(classify, self.model, self.config.model.pooler.token_ids))
        requests = RequestStates(self.config, device, use_gpu_runner, head, len(layout.groups), self._make_grammars)
        part = KVCache(kv_cache.blocks[:0], kv_cache.layers[num_layers:])  # pages are touched for both at once
        gpu_runner = None
        if use_gpu_runner:
            capture = CudaCapture() if self._captures else run_eagerly
            guessing = (draft_model, part.layers) if draft_model else None
            gpu_runner = GPURunner(self.config, self.model, requests, kv_cache.layers, capture, guessing, self.adapters)
            self.runner = ModelRunner(self.model, requests, gpu_runner, kv_cache, adapters=self.adapters, images=images)
            if not on_cpu:
                self._prepare(gpu_runner)
            return
        max_rows = scheduler.max_num_batched_tokens
        max_logits = num_sampled_rows(scheduler.max_num_seqs, config.speculative.num_speculative_tokens)
        reader = draft_model if isinstance(draft_model, StateReader) else None
        runner = CPURunner(
            self.model, requests, kv_cache, max_rows, max_logits, self._pipes.before, reader, self.adapters
        )
        windows = [group.window for group in layout.groups if group.window is not None]
        drafter = _drafter(draft_model, requests, part, (max_rows, max_logits), min(windows, default=None))
        self.runner = (
            ModelRunner(self.model, requests, runner, kv_cache, drafter, self.adapters, images)
            if self.tp.stage.is_last
            else StageRunner(self.model, requests, runner, kv_cache, self._pipes, images)
        )

    def _load_drafter(self, config: EngineConfig | None) -> tuple[Model | None, list[KVCacheSpec]]:
        """The draft model, and what its layers keep of a token; without ``config`` there is none."""
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
        """No KV cache is made, and each text is computed in one step."""
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
        """See `octavo.memory.ledger.check_fits`."""
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

    def _prepare(self, runner: GPURunner) -> None:
        """Capture graphs and compile kernels, so that no request waits for them."""
        assert isinstance(self.runner, ModelRunner)
        started = time.perf_counter()
        if self._captures:
            num_sizes = runner.capture_all()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # of the captures' stream, which is not used again
            logger.info("captured steps of %d sizes in %.2f s", num_sizes, time.perf_counter() - started)
            started = time.perf_counter()
        warm_up(self.runner, self.config.scheduler)
        logger.info("warmed up in %.2f s", time.perf_counter() - started)

    def _plan_memory(
        self, config: EngineConfig, layout: KVCacheLayout, num_layers: int, drafter: object, draft_bytes: int,
        images: ImageEncoder | None,
    ) -> MemoryLedger:  # fmt: skip
        """``num_layers``: of the model; ``draft_bytes``: of the draft model's weights."""
        weights, scheduler = self.model.num_weight_bytes() + draft_bytes, config.scheduler
        if self.device.type == "cpu":
            ledger = plan_memory(config, layout, weights, self._device_memory(), stage=self.tp.stage)
            return replace(ledger, drafter=draft_bytes)
        assert isinstance(self.model, CausalLM)
        reader = drafter if isinstance(drafter, StateReader) else None
        adapters = self.adapters.model_adapters if self.adapters else None
        dummy = DummySteps(
            self.model, layout, scheduler, self.device, reader=reader, readers_layer=num_layers, adapters=adapters,
            images=images,
        )  # fmt: skip
        peak = peak_of(dummy.run_largest, self.device)
        guessing: DummySteps | None = None
        if isinstance(drafter, CausalLM) and reader is None:
            guessing = DummySteps(drafter, layout, scheduler, self.device, num_layers)
            peak = max(peak, peak_of(guessing.run_largest, self.device))
        graphs = 0
        if self._captures:
            # Intermediate tensors of the largest step, which the others share; results of all; the driver's part.
            sizes, prefills = decode_sizes(config, self.model.row_multiple), prefill_sizes(config)
            graphs = peak_of(lambda: dummy.run_decode(sizes[-1]), self.device)
            if drafts := draft_sizes(config, self.model.row_multiple):
                most = config.speculative.num_speculative_tokens
                graphs = max(graphs, peak_of(lambda: dummy.run_drafts(drafts[-1], most), self.device))
            guesses = drafter_sizes(config, self.model.row_multiple)
            if guessing:
                graphs = max(graphs, peak_of(partial(guessing.run_drafts, 2 * guesses[-1], 1), self.device))
            if prefills:
                graphs = max(graphs, peak_of(lambda: dummy.run_prefill(prefills[-1]), self.device))
            graphs += result_bytes(config, sizes + drafts, prefills, guesses)
        encoder, largest = 0, largest_image(config)
        if images is not None and largest is not None:
            encoder = peak_of(partial(images.run_outline, largest.tensors), self.device)
        histories = history_bytes(scheduler.max_num_seqs, config.model.vocab_size, scheduler.max_model_len)
        device = self._device_memory()
        slots = 0 if adapters is None else adapters.num_bytes
        device = replace(device, in_use=device.in_use - weights - slots)  # which are there
        ledger = plan_memory(
            config, layout, weights, device, activations=peak, graphs=graphs, histories=histories, adapters=slots,
            encoder=encoder,
        )  # fmt: skip
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
    """What guesses with ``model`` on a CPU, if there is one. ``sizes``: tokens of a step and rows of logits at most;
    ``window``: the shortest of any layer, if there are windows."""
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
