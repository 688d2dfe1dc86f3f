"""What the scheduler costs a step: schedule + update for running, decoding requests. Goal: < 1 ms for 256 of them.

    python -m benchmarks scheduler [--running 256] [--steps 400]

No model runs: tokens are made up, so that only the scheduler and the KV cache manager are measured.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import ModelRunnerOutput

PROMPT = 512  # tokens
GOAL_MS = 1.0


def make_request(name: str, prompt: list[int], max_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt, SamplingParams(max_tokens=max_tokens), eos_token_ids=[2], arrival_time=0.0)


def one_step(scheduler: Scheduler) -> float:
    """Seconds that one step costs; making up its tokens is not counted."""
    started = time.perf_counter()
    step = scheduler.schedule()
    scheduled = time.perf_counter()
    result = ModelRunnerOutput({req_id: [7] for req_id in step.sampled_req_ids})
    sampled = time.perf_counter()
    scheduler.update_from_output(result)
    return time.perf_counter() - sampled + scheduled - started


def measure(running: int, waiting: int, steps: int, reason: str) -> tuple[float, float]:
    """Median and 99th percentile of a step, in ms. ``reason``: what the waiting ones wait for, "rows" or "memory"."""
    blocks = running * -(-(PROMPT + steps + 64) // 16) + 1
    config = SchedulerConfig(
        max_num_seqs=running if reason == "rows" else running + waiting,
        max_num_batched_tokens=8192,
        max_model_len=(blocks - 1) * 16,
    )
    scheduler = Scheduler(config, KVCacheManager(blocks, 16))
    for i in range(running):
        scheduler.add_request(make_request(f"r{i}", [i % 100] * PROMPT, PROMPT + steps + 64))
    while scheduler._prefilling or not scheduler.running or len(scheduler.running) < running:
        one_step(scheduler)
    # Those that wait have a long cached prefix, so that there is much to look up again in each step. Only the first in
    # the queue is asked, and when it is to wait for memory it is too long for what is left.
    for i in range(waiting):
        missing = scheduler.kv.pool.num_free_blocks * 16 if reason == "memory" and i == 0 else 0
        scheduler.add_request(make_request(f"w{i}", [i % 100] * PROMPT + [3] * missing, 16))
    gc.collect()
    gc.freeze()
    times = [one_step(scheduler) * 1e3 for _ in range(steps)]
    assert len(scheduler.running) == running and scheduler.num_waiting == waiting
    gc.unfreeze()
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print(f"schedule + update, {args.running} running (goal: median < {GOAL_MS} ms for 256)")
    for waiting, reason in ((0, "rows"), (args.waiting, "rows"), (args.waiting, "memory")):
        median, p99 = measure(args.running, waiting, args.steps, reason)
        behind = f"{waiting} waiting for {reason}" if waiting else "nobody waiting"
        print(f"  {behind:28s} median {median:6.3f} ms   p99 {p99:6.3f} ms")


if __name__ == "__main__":
    main()
