"""Building blocks of the core's tests: requests, schedulers, and how many examples hypothesis tries."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from support.examples import FACTOR

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import ModelRunnerOutput, SchedulerOutput

EOS = 9


def examples(number: int, **more: Any) -> settings:
    return settings(
        max_examples=number,
        derandomize=FACTOR <= 1,
        database=None if FACTOR <= 1 else settings.default.database,  # type: ignore[attr-defined]
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


def core_request(request_id: str, prompt: list[int], **fields: Any) -> EngineCoreRequest:
    """``fields`` go to SamplingParams or, where it has no such field, to EngineCoreRequest."""
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__dataclass_fields__}
    fields.setdefault("arrival_time", 0.0)
    return EngineCoreRequest(request_id, prompt, SamplingParams(**params), eos_token_ids=[EOS], **fields)


def request(request_id: str, prompt: list[int], **fields: Any) -> Request:
    return Request(core_request(request_id, prompt, **fields))


def make_scheduler(num_blocks: int = 64, block_size: int = 16, prefix_caching: bool = True, **config: Any) -> Scheduler:
    """``num_blocks`` usable ones. The longest sequence is what the pool holds, unless said otherwise."""
    config.setdefault("max_model_len", num_blocks * block_size)
    return Scheduler(SchedulerConfig(**config), KVCacheManager(num_blocks + 1, block_size, prefix_caching))


def tokens_for(step: SchedulerOutput, token: int = 1) -> ModelRunnerOutput:
    """What a runner that always samples ``token`` gives back."""
    return ModelRunnerOutput({req_id: [token] for req_id in step.sampled_req_ids})


def run_step(scheduler: Scheduler, token: int = 1) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Schedule, answer, update; an empty step is not answered."""
    step = scheduler.schedule()
    outputs = scheduler.update_from_output(tokens_for(step, token)) if step.num_scheduled_tokens else []
    scheduler.check_integrity()
    return step, outputs


def run_until_done(
    scheduler: Scheduler, max_steps: int = 10_000
) -> list[tuple[SchedulerOutput, list[EngineCoreOutput]]]:
    steps = []
    while scheduler.has_unfinished_requests():
        steps.append(run_step(scheduler))
        assert len(steps) < max_steps, "the scheduler makes no progress"
    return steps
