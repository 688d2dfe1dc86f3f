"""Steps on nothing that make a runner's kernels be compiled before the first request comes, which would wait for it.

They go the way of any step, so what they launch is what requests launch. Their sequences lie in the null block, all of
their keys and values count as written, so that none are, and they are gone when the last step is done.
"""

from __future__ import annotations

import torch

from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import NewRequestData, SchedulerOutput
from octavo.worker.gpu.prompt_graphs import SIZES
from octavo.worker.model_runner import ModelRunner

# A step's attention differs by its longest sequence up to so many new tokens; more is a prompt's chunk.
SHORT_STEPS = 8
PROMPT = 24
LONG_PROMPT = SIZES[-1] + 1  # steps of fewer tokens are captured
# It has lanes for so many sequences, for twice as many where there are more, and so on; and it sums chunks in another
# way where many rows keep the device busy than for few.
LANES = 256

# Every way of sampling that makes a difference to kernels, cuts and constraints with and without one another.
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=1, presence_penalty=1.0, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, logit_bias={0: 1.0}),
)


@torch.inference_mode()
def warm_up(runner: ModelRunner) -> None:
    """Run prompts, decodes and mixed steps, and every kind of sampling; the runner must be idle."""
    scheduler = runner.config.scheduler
    longest = min(scheduler.max_num_batched_tokens, scheduler.max_model_len - 1)
    if not longest:
        return  # one token and nothing after it: no request can run either
    runner._update_rows(SchedulerOutput(step_id=0, block_copies=[(0, 0)]))
    for params in PARAMS:
        _alone(runner, params, min(PROMPT, longest))
    for count in _counts(scheduler.max_num_seqs):
        for length in range(1, min(SHORT_STEPS, longest) + 1):
            _together(runner, min(count, scheduler.max_num_batched_tokens // length), length)
    for count in _counts(scheduler.max_num_seqs - 1):
        _mixed(runner, count, min(LONG_PROMPT, longest, scheduler.max_num_batched_tokens - count))


def _counts(most: int) -> list[int]:
    """Numbers of sequences up to ``most`` that make a difference to attention."""
    return sorted({min(count, most) for count in (1, *(LANES << i for i in range(most.bit_length())))} - {0})


def _alone(runner: ModelRunner, params: SamplingParams, length: int) -> None:
    """A prompt, and a token after it."""
    only = _sequence(runner, "warm-up", params, length)
    _run(runner, [only], {only.req_id: length})
    _run(runner, [], {only.req_id: 1})
    runner._update_rows(SchedulerOutput(step_id=0, finished_req_ids=[only.req_id]))


def _together(runner: ModelRunner, count: int, length: int) -> None:
    """So many prompts of one length."""
    prompts = [_sequence(runner, f"warm-up-{i}", PARAMS[0], length) for i in range(count)]
    counts = {data.req_id: length for data in prompts}
    _run(runner, prompts, counts)
    runner._update_rows(SchedulerOutput(step_id=0, finished_req_ids=[*counts]))


def _mixed(runner: ModelRunner, decodes: int, length: int) -> None:
    """A token of each of some sequences, beside another's prompt."""
    first = [_sequence(runner, f"warm-up-{i}", PARAMS[0], 1) for i in range(decodes)]
    counts = {data.req_id: 1 for data in first}
    _run(runner, first, counts)
    last = _sequence(runner, "warm-up", PARAMS[0], length)
    _run(runner, [last], counts | {last.req_id: length})
    runner._update_rows(SchedulerOutput(step_id=0, finished_req_ids=[*counts, last.req_id]))


def _sequence(runner: ModelRunner, req_id: str, params: SamplingParams, length: int) -> NewRequestData:
    blocks = -(-(length + 1) // runner.batch.block_size)
    return NewRequestData(
        req_id=req_id,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        sampling_params=params,
        stop_token_ids=frozenset(),
        sample_index=0,
        block_ids=[0] * blocks,
        num_computed_tokens=0,
        num_kv_tokens=length + 1,  # nothing is written
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
