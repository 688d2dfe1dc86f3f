"""One device's share of the engine: loads the model, sizes and allocates the KV cache, runs steps."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import torch

import octavo_kernels
from octavo.core.kv_groups import KVCacheLayout
from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig, SchedulerConfig
from octavo.interface.step import PendingOutput, SchedulerOutput
from octavo.loader.load_model import load_model
from octavo.models.base import CausalLM
from octavo.models.encoder import Encoder
from octavo.sample.token_pool import most_bytes
from octavo.system import limits
from octavo.worker.cpu.runner import CPURunner
from octavo.worker.device import choose_device, choose_kernels, resolve_dtype
from octavo.worker.encoder_runner import EncoderRunner
from octavo.worker.gpu.decode_graphs import decode_sizes
from octavo.worker.gpu.graphs import CudaCapture, run_eagerly
from octavo.worker.gpu.memory_profile import DummySteps, peak_of
from octavo.worker.gpu.prefill_graphs import prefill_sizes
from octavo.worker.gpu.runner import GPURunner
from octavo.worker.gpu.warm_up import warm_up
from octavo.worker.kv_cache import allocate_kv_cache, kv_cache_layout, kv_cache_specs
from octavo.worker.memory import (
    GRAPH_BYTES,
    MemoryLedger,
    available_for_weights,
    check_weights_fit,
    out_of_memory,
    plan_cpu_memory,
    plan_device_memory,
    plan_without_cache,
)
from octavo.worker.model_memory import alternatives, model_memory
from octavo.worker.model_runner import ModelRunner
from octavo.worker.pooler import PoolingHead, classify
from octavo.worker.request_states import RequestStates
from octavo.worker.step import DeviceRunner

logger = logging.getLogger(__name__)

# Default max_num_batched_tokens. A CPU takes half a millisecond for each token of a small model, and more of them at a
# time are no faster: they only keep the decodes beside them waiting. A GPU's step of prompts takes the host some
# milliseconds to launch, longer than the device needs for few tokens of a small model.
MAX_NUM_BATCHED_TOKENS = {"cpu": 192, "cuda": 8192}
# The same for encoders, or the longest text if that is more: nobody waits beside them.
ENCODER_TOKENS = {"cpu": 1024, "cuda": 16384}


class Worker:
    """One device with its model, KV cache and runner.

    ``overlap``: let steps overlap on a CPU too, with the runner of GPUs. Raises ConfigError when the engine cannot run.
    """

    def __init__(self, config: EngineConfig, overlap: bool = False) -> None:
        try:
            self._start(config, overlap)
        except (MemoryError, RuntimeError) as error:  # torch's own is one of these
            advice = out_of_memory(error)
            if advice is None:
                raise
            raise ConfigError(f"{config.model.model}: {advice}") from error

    def _start(self, config: EngineConfig, overlap: bool) -> None:
        self.device = choose_device(config.device)
        config = resolve_dtype(config, self.device)
        choose_kernels(config, self.device)
        on_cpu = self.device.type == "cpu"
        use_gpu_runner = overlap or not on_cpu
        self.max_in_flight = 2 if use_gpu_runner else 1
        if on_cpu:
            torch.set_num_threads(limits.cpu_count())
        elif not octavo_kernels.can_be_captured(self.device):
            config = replace(config, enforce_eager=True)
        self._captures = not (on_cpu or config.enforce_eager)
        own_len = config.scheduler.max_model_len
        config = _with_max_model_len(config, self._check_fits(config))  # tables of the model are as long as that
        started = time.perf_counter()
        self.model = load_model(config.model, config.load_format, self.device)
        limits.trim_memory()  # give back what only loading needed
        logger.info("loaded %s in %.2f s", config.model.model, time.perf_counter() - started)
        if isinstance(self.model, Encoder):
            self._start_encoder(config, self.model)
            return
        assert isinstance(self.model, CausalLM)
        specs = kv_cache_specs(self.model, config, self.device)
        scheduler = self._scheduler_config(config.scheduler)
        config = replace(config, scheduler=scheduler)
        layout = kv_cache_layout(specs, config, self.max_in_flight)
        self.model.set_groups(layout.groups)
        self.ledger = self._plan_memory(config, layout)
        for line in self.ledger.lines(self.model.weight_bytes_by_kind()):
            logger.info(line)
        shortened = self.ledger.shortened(own_len, config.cache)
        if shortened:
            logger.warning(shortened)
        config = _with_max_model_len(config, self.ledger.max_model_len)
        self.config = replace(config, device=self.device.type)
        scheduler = self.config.scheduler
        ledger, device = self.ledger, self.device
        kv_cache = allocate_kv_cache(layout, ledger.num_blocks, device)
        head = PoolingHead(self.config.model, device, partial(classify, self.model, self.config.model.pooler.token_ids))
        requests = RequestStates(self.config, device, use_gpu_runner, head, len(layout.groups))
        gpu_runner = None
        if use_gpu_runner:
            capture = CudaCapture() if self._captures else run_eagerly
            gpu_runner = GPURunner(self.config, self.model, requests, kv_cache.layers, capture)
        max_rows = scheduler.max_num_batched_tokens
        runner: DeviceRunner = gpu_runner or CPURunner(self.model, requests, kv_cache, max_rows)
        self.runner: ModelRunner | EncoderRunner = ModelRunner(self.model, requests, runner, kv_cache)
        if gpu_runner and not on_cpu:
            self._prepare(gpu_runner)

    def _start_encoder(self, config: EngineConfig, model: Encoder) -> None:
        """No KV cache is made, and each text is computed in one step."""
        asked, longest = config.scheduler, config.model.max_model_len
        budget = asked.max_num_batched_tokens or max(ENCODER_TOKENS[self.device.type], longest)
        self.config = replace(
            config, device=self.device.type, scheduler=replace(asked, max_num_batched_tokens=budget)
        )  # fmt: skip
        on_cpu = self.device.type == "cpu"
        total = limits.memory_limit() if on_cpu else torch.cuda.mem_get_info(self.device)[1]
        self.ledger = plan_without_cache(config.cache, model.num_weight_bytes(), longest, total)
        for line in self.ledger.lines(model.weight_bytes_by_kind()):
            logger.info(line)
        self.max_in_flight = 1 if on_cpu else 2
        self.runner = EncoderRunner(model, self.config, self.device)
        self.runner.warm_up()

    def _check_fits(self, config: EngineConfig) -> int:
        """Before anything is read. Returns the longest sequence that fits, as far as can be known. Raises ConfigError
        when the weights, or one sequence of the length that is asked for beside them, do not fit."""
        cache, max_model_len = config.cache, config.scheduler.max_model_len
        memory = model_memory(config, self.device)
        if self.device.type == "cpu":
            in_use, total, where = 0, limits.memory_limit(), "memory that this process may use"
        else:
            free, total = torch.cuda.mem_get_info(self.device)
            in_use, where = total - free, "memory of the device"
        available = available_for_weights(cache, total, in_use, self.device.type != "cpu")
        others = alternatives(config, self.device, memory, total, in_use)
        check_weights_fit(cache, memory, available, total, where, others)
        if config.model.is_encoder:
            return max_model_len
        config = replace(config, scheduler=self._scheduler_config(config.scheduler))
        layout = kv_cache_layout(memory.specs, config, self.max_in_flight)
        if self.device.type == "cpu":
            ledger = plan_cpu_memory(cache, layout, memory.weights, max_model_len, config.fit_max_model_len)
        else:  # what a step takes is known later
            ledger = plan_device_memory(
                cache, layout, memory.weights, max_model_len, config.fit_max_model_len,
                device_total=total, in_use=in_use + memory.weights, activations=0, graphs=0,
            )  # fmt: skip
        return ledger.max_model_len

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

    def _scheduler_config(self, asked: SchedulerConfig) -> SchedulerConfig:
        budget = asked.max_num_batched_tokens
        if budget == 0:
            budget = max(MAX_NUM_BATCHED_TOKENS[self.device.type], asked.max_num_seqs)
        return replace(asked, max_num_batched_tokens=budget)

    def _plan_memory(self, config: EngineConfig, layout: KVCacheLayout) -> MemoryLedger:
        weights, scheduler, cache = self.model.num_weight_bytes(), config.scheduler, config.cache
        if self.device.type == "cpu":
            return plan_cpu_memory(cache, layout, weights, scheduler.max_model_len, config.fit_max_model_len)
        assert isinstance(self.model, CausalLM)
        dummy = DummySteps(self.model, layout, scheduler, self.device)
        peak = peak_of(dummy.run_largest, self.device)
        graphs = 0
        if self._captures:
            # Intermediate tensors of the largest step, which the others share; results of all; the driver's part.
            sizes, prefills = decode_sizes(config, self.model), prefill_sizes(config)
            graphs = peak_of(lambda: dummy.run_decode(sizes[-1]), self.device)
            if prefills:
                graphs = max(graphs, peak_of(lambda: dummy.run_prefill(prefills[-1]), self.device))
            hidden, attended = config.model.hidden_size, config.model.num_heads * config.model.head_size
            graphs += (3 * len(sizes) + len(prefills)) * GRAPH_BYTES
            graphs += sum(sizes) * (4 * hidden + 32) + sum(prefills) * 4 * (hidden + attended)
        histories = most_bytes(scheduler.max_num_seqs, config.model.vocab_size, scheduler.max_model_len)
        free, total = torch.cuda.mem_get_info(self.device)
        return plan_device_memory(
            cache, layout, weights, scheduler.max_model_len, config.fit_max_model_len,
            device_total=total, in_use=total - free, activations=peak, graphs=graphs, histories=histories,
        )  # fmt: skip

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start a step; what is returned waits for its results."""
        return self.runner.execute_model(step)


def _with_max_model_len(config: EngineConfig, max_model_len: int) -> EngineConfig:
    return replace(
        config,
        model=replace(config.model, max_model_len=max_model_len),
        scheduler=replace(config.scheduler, max_model_len=max_model_len),
    )
