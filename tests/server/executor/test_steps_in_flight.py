"""Processes beside the engine's launch a step while the device computes the one before it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.executor import remote
from octavo.executor.worker_proc import Inbox, run
from octavo.interface.engine_config import SpeculativeConfig
from octavo.interface.step import ModelRunnerOutput, SchedulerOutput
from octavo.system.channel import Channel, Kind

SECONDS = 20.0  # for what happens at once unless it never does
STEPS = 4


@dataclass
class Device:
    """A worker whose steps, of which two may be in flight, last until they are released."""

    launched: list[threading.Event] = field(default_factory=lambda: [threading.Event() for _ in range(STEPS)])
    released: list[threading.Event] = field(default_factory=lambda: [threading.Event() for _ in range(STEPS)])
    idle: threading.Event = field(default_factory=threading.Event)  # nothing is left to do but to wait for the device
    last: int = -1
    max_in_flight: int = 2
    adapters: None = None
    taken: threading.Event = field(default_factory=threading.Event)  # the results of some step are asked for
    config: Any = field(default_factory=lambda: SimpleNamespace(speculative=SpeculativeConfig("ngram", 3)))

    def execute_model(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        self.last = step.step_id
        self.idle.clear()
        self.launched[step.step_id].set()

        def pending() -> ModelRunnerOutput:
            self.idle.set()
            self.taken.set()
            assert self.released[step.step_id].wait(SECONDS)
            return ModelRunnerOutput()

        return pending

    def when_done(self) -> Callable[[], bool]:
        released = self.released[self.last]

        def done() -> bool:
            self.idle.set()
            return released.is_set()

        return done


def follow(device: Device, channel: Channel, heartbeat: Any) -> None:
    """As a rank beside the first."""
    stage = SimpleNamespace(is_last=True, is_first=True)
    place = SimpleNamespace(rank=1, tp=SimpleNamespace(stage=stage, rank=1), check=lambda: None)
    run(device, place, channel, Inbox(channel), heartbeat)  # type: ignore[arg-type]


def serve(device: Device, channel: Channel, heartbeat: Any) -> None:
    """As an engine's worker in a process of its own."""
    about = dict.fromkeys(("num_blocks", "prefix_cache_blocks", "recording_obstacle"))
    about |= {"weight_bytes": {}, "memory_shares": {}, "kv_layout": None}
    executor = SimpleNamespace(
        worker=device,
        execute_model=device.execute_model,
        max_in_flight=device.max_in_flight,
        config=SimpleNamespace(to_dict=dict),
        **about,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "UniProcExecutor", lambda config: executor)
        patch.setattr(remote, "gc", SimpleNamespace(freeze=int, enable=int, collect=int))
        remote.serve(None, channel, heartbeat)  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = socket.socketpair()
    yield Channel(ends[0]), Channel(ends[1])
    for end in ends:
        end.close()


@pytest.mark.parametrize("side", [follow, serve])
def test_a_step_is_launched_while_the_one_before_it_runs(
    side: Callable[..., None], pair: tuple[Channel, Channel]
) -> None:
    """It comes some time after that was launched. Results are taken when no other step comes, too."""
    ours, theirs = pair
    device, progress = Device(), [threading.Event() for _ in range(STEPS + 1)]
    heartbeat = SimpleNamespace(progress=lambda steps: progress[steps].set())

    def work() -> None:
        with pytest.raises(EOFError):
            side(device, theirs, heartbeat)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(STEPS):
            ours.send(Kind.STEP, msgspec.msgpack.encode(SchedulerOutput(number)))
            assert device.launched[number].wait(SECONDS), f"step {number} waits for the one before it"
            if number:
                device.released[number - 1].set()
                assert progress[number].wait(SECONDS)
            assert device.idle.wait(SECONDS)
        device.released[-1].set()
        assert progress[STEPS].wait(SECONDS), "the last step's results are never taken"
    finally:
        for event in device.released:
            event.set()
        ours.close()
        thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_step_waits_for_the_drafts_that_its_sequences_had(pair: tuple[Channel, Channel]) -> None:
    """A rank that wakes late finds both: how many drafts hold decides where the next step goes on. Others need not
    wait."""
    ours, theirs = pair
    device, progress = Device(), threading.Event()
    heartbeat = SimpleNamespace(progress=lambda steps: progress.set())
    steps = [
        SchedulerOutput(0, num_scheduled_tokens={"a": 3}, scheduled_spec_decode_tokens={"a": [5, 6]}),
        SchedulerOutput(1, num_scheduled_tokens={"b": 1}),
        SchedulerOutput(2, num_scheduled_tokens={"a": 1}),
    ]

    def work() -> None:
        with pytest.raises(EOFError):
            follow(device, theirs, heartbeat)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for step in (steps[0], steps[2]):
            ours.send(Kind.STEP, msgspec.msgpack.encode(step))
        assert device.taken.wait(SECONDS)
        assert not device.launched[2].is_set(), "it is launched while the drafts of its sequence are unknown"
        device.released[0].set()
        assert device.launched[2].wait(SECONDS) and progress.is_set()
        ours.send(Kind.STEP, msgspec.msgpack.encode(steps[1]))
        assert device.launched[1].wait(SECONDS), "a step of other sequences waits, too"
    finally:
        for event in device.released:
            event.set()
        ours.close()
        thread.join(SECONDS)
