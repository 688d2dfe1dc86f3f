"""What clients want kept stays in the prefix cache while others pass, and takes nothing from those who run."""

from __future__ import annotations

import pytest
from core_helpers import core_request, examples
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.core.states.manager import StateSettings
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.messages import Retain
from octavo.interface.step import ModelRunnerOutput

BLOCKS, SIZE = 64, 4
KEPT = [7] * 41  # ends inside a block

SHAPES = {
    "full attention": {},
    "windows": {"windows": (None, 9)},
    "states": {"states": StateSettings(num_blocks=2, gap=1)},
}


class Engine:
    """A scheduler whose device is always right, and a clock."""

    def __init__(self, share: float = 0.5, blocks: int = BLOCKS, **shape: object) -> None:
        self.kv = KVCacheManager(blocks + 1, SIZE, step_tokens=64, retention_share=share, **shape)
        config = SchedulerConfig(max_model_len=blocks * SIZE // 4, max_num_batched_tokens=64)
        self.scheduler, self.now, self.num = Scheduler(config, self.kv), 0.0, 0

    def serve(self, prompt: list[int], *wishes: Retain, **fields: object) -> int:
        """The tokens of a prompt that were cached."""
        self.num += 1
        request = core_request(f"r{self.num}", prompt, max_tokens=2, retain=list(wishes) or None, **fields)
        self.scheduler.add_request(request)
        cached = 0
        while self.scheduler.has_unfinished_requests():
            step = self.scheduler.schedule(self.now)
            assert step.num_scheduled_tokens, "nothing fits"
            sampled = ModelRunnerOutput({req_id: [1] for req_id in step.sampled_req_ids})
            for output in self.scheduler.update_from_output(sampled):
                cached += output.num_cached_tokens
            self.scheduler.check_integrity()
        return cached

    def flood(self, times: float = 10.0) -> None:
        """Others come, with as many times the tokens as the cache holds."""
        for _ in range(int(times * BLOCKS * SIZE / 50)):
            self.serve([1000 + self.num * 100 + i for i in range(50)])


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_to_be_kept_is_found_after_ten_times_the_cache_has_passed(shape: str) -> None:
    engine, end = Engine(**SHAPES[shape]), len(KEPT)
    engine.now = 59.0  # times end by the minute, none too early
    engine.serve([*KEPT, 8, 9], Retain(end, 3600))
    engine.flood()
    assert engine.scheduler.make_stats().retained_blocks > 0
    assert engine.serve([*KEPT, 5, 5, 5, 5]) == end
    engine.now += 3599  # the hit has renewed the time
    engine.flood()
    assert engine.serve([*KEPT, 6, 6, 6, 6]) == end
    engine.now += 3661
    engine.flood()
    assert engine.serve([*KEPT, 5, 5, 5, 5]) == 0
    assert engine.scheduler.make_stats().retained_blocks == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_wish_or_a_share_it_is_gone(shape: str) -> None:
    for share, wishes in ((0.5, ()), (0.0, (Retain(len(KEPT), 3600),))):
        engine = Engine(share, **SHAPES[shape])
        engine.serve([*KEPT, 8, 9], *wishes)
        engine.flood()
        assert engine.serve([*KEPT, 5, 5, 5, 5]) == 0


def test_a_prefix_that_another_request_has_computed_is_kept_too() -> None:
    engine = Engine()
    engine.serve([*KEPT, 8, 9])
    engine.serve([*KEPT, 8, 9], Retain(40, 300))
    engine.flood()
    assert engine.serve([*KEPT, 5, 5, 5, 5]) == 40


def test_each_part_is_kept_for_its_own_time() -> None:
    engine = Engine()
    engine.serve([*KEPT, 8, 9], Retain(20, 3600), Retain(40, 300))
    engine.now = 1000.0
    engine.flood()
    assert engine.serve([*KEPT, 5, 5, 5, 5]) == 20


def test_who_wants_most_makes_room_for_others() -> None:
    engine = Engine()
    engine.serve([5] * 40, Retain(40, 300), owner="b")
    for number in range(6):  # 60 blocks, of which 32 may be kept
        engine.serve([10 + number] * 40, Retain(40, 3600), owner="a")
    assert engine.scheduler.make_stats().retained_blocks == BLOCKS // 2
    engine.flood()
    assert engine.serve([5] * 50, owner="b") == 40


@given(
    share=st.sampled_from([0.1, 0.5, 1.0]),
    prompts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=20),
    shape=st.sampled_from(sorted(SHAPES)),
)
@examples(60)
def test_nothing_that_is_kept_is_missing_to_those_who_run(
    share: float, prompts: list[tuple[int, int, int]], shape: str
) -> None:
    engine = Engine(share, **SHAPES[shape])
    for word, length, end in prompts:
        engine.serve([word] * length, Retain(end, 3600))
        engine.kv.begin_step(engine.now)
        assert engine.kv.pool.num_free_blocks == engine.kv.pool.num_usable_blocks
    held = [engine.kv.pool.allocate() for _ in range(engine.kv.pool.num_free_blocks)]
    assert len({block.block_id for block in held}) == engine.kv.pool.num_usable_blocks
