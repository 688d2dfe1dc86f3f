"""One device's share of the engine: loads the model, sizes and allocates the KV cache, runs steps."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

import octavo_kernels
from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig, SchedulerConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.step import PendingOutput, SchedulerOutput
from octavo.loader.load_model import load_model
from octavo.sample.token_pool import most_bytes
from octavo.system import limits
from octavo.worker.device import choose_device, choose_kernels
from octavo.worker.gpu.graphs import CudaCapture, run_again
from octavo.worker.gpu.memory_profile import decode_step, largest_step, peak_of, prompt_step
from octavo.worker.gpu.prompt_graphs import prompt_sizes
from octavo.worker.gpu.runner import DeviceModelRunner, captured_sizes
from octavo.worker.gpu.warm_up import warm_up
from octavo.worker.kv_cache import allocate_kv_cache, kv_cache_specs
from octavo.worker.memory import (
    GRAPH_BYTES,
    MemoryLedger,
    available_for_weights,
    check_weights_fit,
    out_of_memory,
    plan_cpu_memory,
    plan_device_memory,
)
from octavo.worker.model_memory import alternatives, model_memory
from octavo.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Tokens in one step unless said otherwise. A CPU takes half a millisecond for each of a small model, and more of them
# at a time would not make it faster: they only keep the decodes beside them waiting. A GPU's step of prompts takes the
# host some milliseconds to launch, which few tokens of a small model would not fill.
STEP_TOKENS = {"cpu": 192, "cuda": 8192}


class Worker:
    """``overlap``: let steps overlap (None: on devices with a queue of their own)."""

    def __init__(self, config: EngineConfig, overlap: bool | None = None) -> None:
        try:
            self._start(config, overlap)
        except (MemoryError, RuntimeError) as error:  # torch's own is one of these
            advice = out_of_memory(error)
            if advice is None:
                raise
            raise ConfigError(f"{config.model.model}: {advice}") from error

    def _start(self, config: EngineConfig, overlap: bool | None) -> None:
        self.device = choose_device(config.device)
        choose_kernels(config, self.device)
        on_cpu = self.device.type == "cpu"
        if on_cpu:
            torch.set_num_threads(limits.cpu_count())
        elif not octavo_kernels.can_be_captured(self.device):
            config = replace(config, enforce_eager=True)
        self._captures = not (on_cpu or config.enforce_eager)
        self._check_fits(config)
        started = time.perf_counter()
        self.model = load_model(config.model, config.load_format, self.device)
        limits.trim_memory()  # of what loading needed
        logger.info("loaded %s in %.2f s", config.model.model, time.perf_counter() - started)
        specs = kv_cache_specs(self.model, config, self.device)
        scheduler = self._scheduler_config(config.scheduler)
        self.ledger = self._plan_memory(replace(config, scheduler=scheduler), specs)
        for line in self.ledger.lines():
            logger.info(line)
        scheduler = replace(scheduler, max_model_len=self.ledger.max_model_len)
        self.config = replace(config, scheduler=scheduler, device=self.device.type)
        num_blocks, block_size = self.ledger.num_blocks, self.ledger.block_size
        kv_caches = [allocate_kv_cache(spec, num_blocks, block_size, self.device) for spec in specs]
        self.max_in_flight = 1
        if overlap if overlap is not None else not on_cpu:
            self.max_in_flight = 2
            self.runner: ModelRunner = self._device_runner(kv_caches)
        else:
            self.runner = ModelRunner(self.config, self.model, self.device, kv_caches)

    def _check_fits(self, config: EngineConfig) -> None:
        """Before anything is read. Raises ConfigError when the weights, or one sequence beside them, do not fit."""
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
        if self.device.type == "cpu":
            plan_cpu_memory(cache, memory.specs, memory.weights, max_model_len, config.fit_max_model_len)
        else:  # what a step takes is known later
            plan_device_memory(
                cache, memory.specs, memory.weights, max_model_len, config.fit_max_model_len,
                device_total=total, in_use=in_use + memory.weights, activations=0, graphs=0,
            )  # fmt: skip

    def _device_runner(self, kv_caches: list[torch.Tensor]) -> DeviceModelRunner:
        capture = CudaCapture() if self._captures else run_again
        runner = DeviceModelRunner(self.config, self.model, self.device, kv_caches, capture)
        if self.device.type == "cpu":
            return runner
        started = time.perf_counter()
        if self._captures:
            runner.capture_all()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # of what is kept for the captures' stream, which is not used again
            logger.info("captured steps of %d sizes in %.2f s", runner.num_sizes, time.perf_counter() - started)
            started = time.perf_counter()
        warm_up(runner)
        logger.info("ran a step of each kind in %.2f s", time.perf_counter() - started)
        return runner

    def _scheduler_config(self, asked: SchedulerConfig) -> SchedulerConfig:
        budget = asked.max_num_batched_tokens
        if budget == 0:
            budget = max(STEP_TOKENS[self.device.type], asked.max_num_seqs)
        return replace(asked, max_num_batched_tokens=budget)

    def _plan_memory(self, config: EngineConfig, specs: list[KVCacheSpec]) -> MemoryLedger:
        weights, scheduler, cache = self.model.num_weight_bytes(), config.scheduler, config.cache
        if self.device.type == "cpu":
            return plan_cpu_memory(cache, specs, weights, scheduler.max_model_len, config.fit_max_model_len)
        step = (self.model, specs, scheduler, cache.block_size, self.device)
        peak = peak_of(lambda: largest_step(*step), self.device)
        graphs = 0
        if self._captures:
            # What the largest step inside needs (the others share it), the results of all, and the driver's own.
            sizes, prompts = captured_sizes(config, self.model), prompt_sizes(config)
            graphs = peak_of(lambda: decode_step(*step, sizes[-1]), self.device)
            if prompts:
                graphs = max(graphs, peak_of(lambda: prompt_step(*step, prompts[-1]), self.device))
            hidden, attended = config.model.hidden_size, config.model.num_heads * config.model.head_size
            graphs += (3 * len(sizes) + len(prompts)) * GRAPH_BYTES
            graphs += sum(sizes) * (4 * hidden + 32) + sum(prompts) * 4 * (hidden + attended)
        histories = most_bytes(scheduler.max_num_seqs, config.model.vocab_size, scheduler.max_model_len)
        free, total = torch.cuda.mem_get_info(self.device)
        return plan_device_memory(
            cache, specs, weights, scheduler.max_model_len, config.fit_max_model_len,
            device_total=total, in_use=total - free, activations=peak, graphs=graphs, histories=histories,
        )  # fmt: skip

    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        return self.runner.execute_model(step)
