"""Adapters take turns in slots: nobody waits for ever, and those who can run do not wait for those who cannot."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_helpers import core_request, tokens_for

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.lora import PATIENCE, AdapterSlots
from octavo.core.scheduler import Scheduler
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.lora import Adapter
from octavo.interface.step import SchedulerOutput


class Engine:
    """A scheduler whose adapters are in memory ``delay`` steps after they have been asked for."""

    def __init__(self, max_loras: int, max_num_seqs: int = 8, delay: int = 0, policy: str = "fcfs") -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=128, policy=policy)
        self.slots, self.delay, self.loading = AdapterSlots(max_loras), delay, list[tuple[int, Adapter]]()
        self.scheduler = Scheduler(config, KVCacheManager(400, 4), adapters=self.slots)
        self.now, self.started = 0, dict[str, int]()
        self.arrived: dict[str, int] = {}

    def add(self, request_id: str, adapter: str | None, **fields: Any) -> None:
        self.arrived[request_id] = self.now
        named = None if adapter is None else Adapter(adapter, "", "digest")
        fields = {"max_tokens": 8, "ignore_eos": True, "arrival_time": float(self.now)} | fields
        self.scheduler.add_request(core_request(request_id, [1, 2, 3], adapter=named, **fields))

    def step(self) -> SchedulerOutput:
        self.now += 1
        for at, adapter in [one for one in self.loading if one[0] <= self.now]:
            self.loading.remove((at, adapter))
            self.slots.loaded(adapter)
        step = self.scheduler.schedule()
        self.loading += [(self.now + 1 + self.delay, adapter) for adapter in self.slots.take_wanted()]
        for data in step.scheduled_new_reqs:
            self.started.setdefault(data.req_id.partition("#")[2], self.now)
        if step.num_scheduled_tokens:
            self.scheduler.update_from_output(tokens_for(step))
        self.scheduler.check_integrity()
        return step


def test_a_request_that_must_wait_for_a_slot_is_passed_over_and_comes_back():
    engine = Engine(max_loras=1)
    for name, adapter in (("a1", "a"), ("b1", "b"), ("base", None), ("a2", "a")):
        engine.add(name, adapter)
    for _ in range(40):
        engine.step()
    assert engine.started["base"] == 1  # did not wait behind them
    assert engine.started["a1"] == engine.started["a2"] < engine.started["b1"]
    assert engine.started["b1"] <= engine.started["a1"] + 8 + 3  # as soon as the slot was free
    assert not engine.scheduler.has_unfinished_requests()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_stream_of_requests_for_one_adapter_does_not_keep_another_waiting(policy):
    engine = Engine(max_loras=1, policy=policy)
    for i in range(200):
        engine.add(f"a{i}", "a")
        if i == 10:
            engine.add("b", "b")
        engine.step()
    waited = engine.started["b"] - engine.arrived["b"]
    assert PATIENCE < waited <= PATIENCE + 8 + 4  # those that ran then have 8 tokens
    assert len([i for i in engine.started if i.startswith("a")]) > 100  # and it goes on with the first


def test_a_request_that_comes_back_starts_although_others_are_urgent():
    """Else slots would be loaded for the one and for the other, and nobody would run."""
    engine = Engine(max_loras=1, max_num_seqs=2, delay=PATIENCE + 2)
    for name in "abc":
        for i in range(4):
            engine.add(f"{name}{i}", name)
    for _ in range(1000):
        engine.step()
    assert not engine.scheduler.has_unfinished_requests()


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_twenty_adapters_through_two_slots_all_get_their_turn(policy, delay):
    rng, engine = random.Random(1), Engine(max_loras=2, max_num_seqs=4, delay=delay, policy=policy)
    added = 0
    for _ in range(4000):
        if rng.random() < 0.1:
            adapter = rng.choice([None, *(f"adapter-{i}" for i in range(20))])
            engine.add(f"r{added}", adapter, max_tokens=rng.randrange(1, 12), n=rng.choice([1, 1, 2]))
            added += 1
        if added and rng.random() < 0.02:
            engine.scheduler.finish_sample(f"r{rng.randrange(added)}", 0, 3)  # type: ignore[arg-type]
        engine.step()
    for _ in range(4000):
        engine.step()
    assert not engine.scheduler.has_unfinished_requests()
    waits = [engine.started[i] - at for i, at in engine.arrived.items() if i in engine.started]
    # Each may have to wait for the nineteen others in turn, two at a time, and for what runs then.
    assert max(waits) <= 20 / 2 * (12 + delay + 4) * 4 + 2 * PATIENCE
    running, waiting = engine.slots.names()
    assert running == waiting == []
