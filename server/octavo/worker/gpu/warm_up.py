"""Dummy steps that compile a runner's kernels before the first request comes.

They run like any step, so they launch what requests launch. Their sequences lie in the null block, all of their keys
and values count as written, so that none are, and they are removed after the last step.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import NewRequestData, SchedulerOutput
from octavo.layers.moe import FusedMoE
from octavo.layers.quantization.base import LinearBase
from octavo.memory.capture_sizes import PREFILL_SIZES
from octavo.worker.model_runner import ModelRunner

# Attention has a kernel variant for each number of new tokens up to this, and one for longer chunks of prompts.
SHORT_STEPS = 8
PROMPT = 24
LONG_PROMPT = PREFILL_SIZES[-1] + 1  # steps of fewer tokens are captured
# Attention has lanes for this many sequences, or 2, 4, ... times as many; and it sums chunks in another way where many
# rows keep the device busy.
LANES = 256

# Every kind of sampling that launches other kernels: truncation and constraints, with and without each other.
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=1, presence_penalty=1.0, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, logit_bias={0: 1.0}),
)


@torch.inference_mode()
def warm_up(runner: ModelRunner, scheduler: SchedulerConfig) -> None:
    """Run prompts, decodes and mixed steps, and every kind of sampling; the runner must be idle."""
    longest = min(scheduler.max_num_batched_tokens, scheduler.max_model_len - 1)
    if not longest:
        return  # max_model_len is 1: no request can run either
    for module in runner.model.modules():
        if isinstance(module, LinearBase):
            module.method.warm_up(module, scheduler.max_num_batched_tokens)
        elif isinstance(module, FusedMoE):
            module.warm_up(scheduler.max_num_batched_tokens)
    runner.update_rows(SchedulerOutput(step_id=0, block_copies=[(0, 0)]))
    for params in PARAMS:
        _run_prompt(runner, params, min(PROMPT, longest))
    for count in _batch_sizes(scheduler.max_num_seqs):
        for length in range(1, min(SHORT_STEPS, longest) + 1):
            _run_prompts(runner, min(count, scheduler.max_num_batched_tokens // length), length)
    if runner.adapters is not None:  # in an empty slot: tiles of rows, and of one row
        for params in PARAMS[:3]:
            _run_prompt(runner, params, min(PROMPT, longest), adapter_slot=0)
        _run_prompts(runner, min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens), 1, adapter_slot=0)
    _run_images(runner, longest)
    for count in _batch_sizes(scheduler.max_num_seqs - 1):
        _run_mixed(runner, count, min(LONG_PROMPT, longest, scheduler.max_num_batched_tokens - count))


def _run_images(runner: ModelRunner, longest: int) -> None:
    """Prompts of one image, of which the last token is none."""
    lengths = {min(PROMPT, longest), min(LONG_PROMPT, longest)} if runner.images is not None and longest > 1 else ()
    for length in lengths:
        assert runner.images is not None
        with runner.images.pretended(length - 1) as image:
            _run_prompt(runner, PARAMS[0], length, mm_items=[image])


def _batch_sizes(most: int) -> list[int]:
    """Numbers of sequences up to ``most`` with which attention launches other kernels."""
    return sorted({min(count, most) for count in (1, *(LANES << i for i in range(most.bit_length())))} - {0})


def _run_prompt(runner: ModelRunner, params: SamplingParams, length: int, **more: Any) -> None:
    """A prompt, and a token after it. ``more``: of the sequence."""
    only = _request(runner, "warm-up", params, length, **more)
    _run(runner, [only], {only.req_id: length})
    _run(runner, [], {only.req_id: 1})
    runner.update_rows(SchedulerOutput(step_id=0, finished_req_ids=[only.req_id]))


def _run_prompts(runner: ModelRunner, count: int, length: int, adapter_slot: int = -1) -> None:
    """``count`` prompts of one length."""
    prompts = [_request(runner, f"warm-up-{i}", PARAMS[0], length, adapter_slot=adapter_slot) for i in range(count)]
    counts = {data.req_id: length for data in prompts}
    _run(runner, prompts, counts)
    runner.update_rows(SchedulerOutput(step_id=0, finished_req_ids=[*counts]))


def _run_mixed(runner: ModelRunner, decodes: int, length: int) -> None:
    """A token of each of ``decodes`` sequences, beside another's prompt."""
    first = [_request(runner, f"warm-up-{i}", PARAMS[0], 1) for i in range(decodes)]
    counts = {data.req_id: 1 for data in first}
    _run(runner, first, counts)
    last = _request(runner, "warm-up", PARAMS[0], length)
    _run(runner, [last], counts | {last.req_id: length})
    runner.update_rows(SchedulerOutput(step_id=0, finished_req_ids=[*counts, last.req_id]))


def _request(runner: ModelRunner, req_id: str, params: SamplingParams, length: int, **more: Any) -> NewRequestData:
    blocks = -(-(length + 1) // runner.requests.batch.block_size)
    return NewRequestData(
        req_id=req_id,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        sampling_params=params,
        stop_token_ids=frozenset(),
        sample_index=0,
        block_ids=[[0] * blocks] * len(runner.requests.batch.block_tables),
        num_computed_tokens=0,
        num_kv_tokens=length + 1,  # no keys and values are written
        **more,
    )


def _run(runner: ModelRunner, new: list[NewRequestData], counts: dict[str, int]) -> None:
    step = SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=new,
        num_scheduled_tokens=counts,
        sampled_req_ids=list(counts),
        total_num_scheduled_tokens=sum(counts.values()),
    )
    runner.execute_model(step)()
