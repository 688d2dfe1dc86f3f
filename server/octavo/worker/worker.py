"""One device's share of the engine: loads the model, sizes and allocates the KV cache, runs steps."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from octavo import platform
from octavo.config import EngineConfig, SchedulerConfig
from octavo.core.kv_cache_spec import KVCacheSpec
from octavo.core.sched_output import ModelRunnerOutput, SchedulerOutput
from octavo.errors import ConfigError
from octavo.loader.load_model import load_model
from octavo.worker.memory import MemoryLedger, plan_cpu_memory
from octavo.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Tokens in one step unless said otherwise. A CPU takes about a millisecond for each: what decodes beside it waits.
STEP_TOKENS = {"cpu": 512, "cuda": 2048}


def choose_device(device: str) -> torch.device:
    """Raises ConfigError when CUDA is asked for and not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for and torch sees no CUDA device; use device='cpu' or 'auto'")
    return torch.device("cpu" if device == "auto" else device)


class Worker:
    def __init__(self, config: EngineConfig) -> None:
        self.device = choose_device(config.device)
        if self.device.type == "cpu":
            torch.set_num_threads(platform.cpu_count())
        started = time.perf_counter()
        self.model = load_model(config.model, config.load_format, self.device)
        weights = self.model.num_weight_bytes()
        logger.info("loaded %s in %.2f s", config.model.model, time.perf_counter() - started)
        specs: list[KVCacheSpec] = self.model.kv_cache_specs()
        kv_dtype = config.cache.kv_cache_dtype
        if kv_dtype == "auto" and self.model.is_quantized:
            kv_dtype = "bfloat16"  # finer than the weights are
        if kv_dtype != "auto":
            specs = [replace(spec, dtype=kv_dtype) for spec in specs]
        self.ledger: MemoryLedger = plan_cpu_memory(
            config.cache, specs, weights, config.scheduler.max_model_len, config.fit_max_model_len
        )
        for line in self.ledger.lines():
            logger.info(line)
        self.config = replace(config, scheduler=self._scheduler_config(config.scheduler))
        kv_caches = [self._allocate_kv(spec) for spec in specs]
        self.runner = ModelRunner(self.config, self.model, self.device, kv_caches)

    def _scheduler_config(self, asked: SchedulerConfig) -> SchedulerConfig:
        budget = asked.max_num_batched_tokens
        if budget == 0:
            budget = max(STEP_TOKENS[self.device.type], asked.max_num_seqs)
        return replace(asked, max_model_len=self.ledger.max_model_len, max_num_batched_tokens=budget)

    def _allocate_kv(self, spec: KVCacheSpec) -> torch.Tensor:
        """[2, num_blocks, num_kv_heads, block_size, head_size]; host pages are not touched before they are used."""
        shape = (2, self.ledger.num_blocks, spec.num_kv_heads, self.ledger.block_size, spec.head_size)
        kv = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self.device)
        kv[:, 0].zero_()
        return kv

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute_model(step)
