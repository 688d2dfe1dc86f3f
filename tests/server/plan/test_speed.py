"""The pace that is planned is what the engine's scheduler does, if steps take as long as planned."""

from __future__ import annotations

import heapq
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.engine.args import EngineArgs
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import ModelRunnerOutput
from octavo.memory.dry_run import Plan, make_plan
from octavo.memory.ledger import DeviceMemory
from octavo.plan.measure import measure
from octavo.plan.model import planned_model
from octavo.plan.speed import Speed, pace, step_seconds

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
# As measured on two cores: a token of a prompt takes 0.6 ms, one of an answer 4 ms and 1 ms beside others.
TWO_CORES = Speed(3e10, 4.5e11, 0.001, ((1, 3.7e-12), (4, 7e-12), (16, 5e-11)), 2e10, 8e9)
DELAY = 0.002  # from the end of an answer to the next request


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    args = EngineArgs(model=str(folder), load_format="dummy", quantization="int8", max_num_seqs=64)
    with planned_model(args) as model:
        config = replace(model.config, device="cpu")
        return make_plan(config, DeviceMemory("cpu", 8 << 30), measure)


def simulated(plan: Plan, users: int, context: int, output: int, rounds: int = 6) -> tuple[float, float]:
    """Tokens a second and the median time to the first token of users who send one request after the other."""
    scheduler = Scheduler(plan.config.scheduler, KVCacheManager(100_000, 16))
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    arrivals = [(0.0, user) for user in range(users)]
    sent: dict[str, float] = {}
    left, now, ttfts = users * rounds, 0.0, []
    seen: set[str] = set()
    while left:
        if not scheduler.has_unfinished_requests():
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            at, user = heapq.heappop(arrivals)
            req_id = f"{user}-{len(sent)}"
            prompt = [len(sent) + 1] + [7] * (context - 1)
            scheduler.add_request(EngineCoreRequest(req_id, prompt, params, eos_token_ids=[], arrival_time=at))
            sent[req_id] = at
        step = scheduler.schedule()
        rows = step.total_num_scheduled_tokens - step.num_prompt_tokens
        now += step_seconds(plan, TWO_CORES, rows, context + output / 2, step.num_prompt_tokens, context / 2)
        before = set(scheduler.running)
        for req_id in set(step.sampled_req_ids) - seen:
            ttfts.append(now - sent[req_id.rpartition("#")[2]])
            seen.add(req_id)
        scheduler.update_from_output(ModelRunnerOutput({req_id: [1] for req_id in step.sampled_req_ids}))
        for req_id in before - set(scheduler.running):
            left -= 1
            heapq.heappush(arrivals, (now + DELAY, int(req_id.rpartition("#")[2].partition("-")[0])))
    return users * rounds * output / now, statistics.median(ttfts)


@pytest.mark.sampled
@pytest.mark.parametrize("users", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("context", "output"), [(64, 64), (256, 128), (512, 64), (1024, 256)])
def test_the_scheduler_keeps_the_pace(users: int, context: int, output: int, plan: Plan) -> None:
    rate, ttft = simulated(plan, users, context, output)
    planned = pace(plan, TWO_CORES, users, context, context, output)
    assert planned.tokens_per_second == pytest.approx(rate, rel=0.12)
    assert planned.ttft == pytest.approx(ttft, rel=0.25)
