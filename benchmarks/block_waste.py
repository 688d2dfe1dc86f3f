"""Share of the KV cache's allocated slots that hold a token: 200 concurrent requests of 100 to 1,000 tokens.

    python -m benchmarks block_waste [--requests 200] [--block-size 16]

Goal: >= 95 %. A request's length, prompt and answer together, is uniform; half of it is prompt. No model runs: the real
scheduler and KV cache manager hand blocks out, and the share is taken in every step until the last request ends.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import ModelRunnerOutput

GOAL = 0.95


@dataclass(frozen=True)
class Step:
    """What the KV cache holds in one step."""

    tokens: int
    slots: int  # of the blocks that are handed out
    requests: int

    @property
    def used(self) -> float:
        """The share of the slots that hold a token."""
        return self.tokens / self.slots


def run(num_requests: int, block_size: int, shortest: int, longest: int, seed: int = 0) -> list[Step]:
    """Every step until the last request ends. Shared blocks would count once; these requests share nothing."""
    rng = random.Random(seed)
    num_blocks = num_requests * -(-longest // block_size) + 1
    config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=8192, max_model_len=longest)
    scheduler = Scheduler(config, KVCacheManager(num_blocks, block_size))
    for i in range(num_requests):
        length = rng.randint(shortest, longest)
        prompt = [rng.randrange(1000) for _ in range(length // 2)]
        params = SamplingParams(max_tokens=length - len(prompt), ignore_eos=True)
        scheduler.add_request(EngineCoreRequest(f"r{i}", prompt, params, eos_token_ids=[], arrival_time=0.0))
    steps, pool = [], scheduler.kv.pool
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        tokens = sum(request.num_computed_tokens for request in scheduler.running.values())
        slots = (pool.num_usable_blocks - pool.num_free_blocks) * block_size
        steps.append(Step(tokens, slots, len(scheduler.running)))
        scheduler.update_from_output(ModelRunnerOutput({req_id: [1] for req_id in step.sampled_req_ids}))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    shares = [step.used for step in run(args.requests, args.block_size, 100, 1000)]
    print(
        f"{args.requests} requests of 100 to 1,000 tokens, blocks of {args.block_size}: "
        f"mean {statistics.mean(shares):.2%} of allocated slots hold a token, lowest step {min(shares):.2%} "
        f"(goal {GOAL:.0%})"
    )


if __name__ == "__main__":
    main()
