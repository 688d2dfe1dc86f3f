"""Steps of an encoder: whole texts within a step's limits, each once; nothing is lost or kept, whatever ends."""

from __future__ import annotations

import pytest
from core_helpers import core_request, examples
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.encoder_scheduler import EncoderScheduler
from octavo.core.request import RequestStatus
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.pooling import Pooling
from octavo.interface.step import ModelRunnerOutput

POOLING = Pooling("embed", "mean")


def make(**config: object) -> EncoderScheduler:
    return EncoderScheduler(SchedulerConfig(**{"max_num_batched_tokens": 20, "max_num_seqs": 3, **config}))  # type: ignore[arg-type]


def add(scheduler: EncoderScheduler, name: str, length: int, **fields: object) -> None:
    scheduler.add_request(core_request(name, [5] * length, pooling=POOLING, **fields))


@examples(100)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    in_flight=st.integers(1, 2),
    aborted=st.sets(st.integers(0, 29)),
    failed=st.sets(st.integers(0, 29)),
)
def test_every_text_is_computed_whole_and_once(
    lengths: list[int], in_flight: int, aborted: set[int], failed: set[int]
) -> None:
    scheduler, steps, ended = make(), [], dict[str, str | None]()
    for i, length in enumerate(lengths):
        add(scheduler, f"r{i}", length)
    computed: list[str] = []
    while scheduler.has_unfinished_requests() or steps:
        step = scheduler.schedule()
        if step.num_scheduled_tokens:
            assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values()) <= 20
            computed += step.num_scheduled_tokens
            steps.append(step)
            if len(steps) == 1:  # some end while they are in flight, some while they wait
                for output in scheduler.finish_requests([f"r{i}" for i in aborted], RequestStatus.FINISHED_ABORTED):
                    ended[output.request_id] = output.finish_reason
        if len(steps) >= in_flight or not step.num_scheduled_tokens:
            done = steps.pop(0)
            errors = {i: "broken" for i in done.num_scheduled_tokens if int(i.partition("#r")[2]) in failed}
            vectors = {i: [1.0] for i in done.num_scheduled_tokens if i not in errors}
            for output in scheduler.update_from_output(ModelRunnerOutput(embeddings=vectors, errors=errors)):
                assert output.request_id not in ended
                assert (output.embedding is None) == (output.error is not None)
                ended[output.request_id] = output.finish_reason
        scheduler.check_integrity()
    assert len(set(computed)) == len(computed)
    assert set(ended) == {f"r{i}" for i in range(len(lengths))}
    assert {reason for i, reason in ended.items() if int(i[1:]) in aborted} <= {"abort", "stop", "error"}


def test_a_text_that_can_never_run_is_refused() -> None:
    scheduler = make()
    with pytest.raises(ValueError, match=r"21 tokens.*at most 20 \(max_num_batched_tokens\)"):
        add(scheduler, "long", 21)
    add(scheduler, "twice", 1)
    with pytest.raises(ValueError, match="already in use"):
        add(scheduler, "twice", 1)
    with pytest.raises(ValueError, match="cannot generate"):
        scheduler.add_request(core_request("text", [5]))


def test_lower_priorities_come_first() -> None:
    scheduler = make(policy="priority", max_num_seqs=1)
    for priority in (3, 1, 2):
        add(scheduler, str(priority), 2, priority=priority)
    order = []
    while (step := scheduler.schedule()).num_scheduled_tokens:
        order += step.num_scheduled_tokens
        scheduler.update_from_output(ModelRunnerOutput(embeddings={i: [1.0] for i in step.num_scheduled_tokens}))
    assert order == ["0#1", "0#2", "0#3"]
