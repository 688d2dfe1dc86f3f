"""The channel between the front end and the core: whole messages, in order, and nobody waits for the other."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import types

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.core_client import CoreClient
from octavo.engine.core_launcher import CoreProcess
from octavo.engine.output_codec import decode_outputs, encode_outputs
from octavo.errors import EngineDeadError, OctavoError
from octavo.interface.messages import EngineCoreOutput, EngineCoreOutputs, LogprobsLists, SchedulerStats
from octavo.system.channel import Channel, Frames, Kind, frame

READY = msgspec.msgpack.encode({"config": {}, "num_blocks": 1, "blocks_of_longest": 1})


class Core:
    """The other end, in this process."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.channel, self._theirs = Channel(theirs), theirs
        self.heartbeat = None
        self.ended = threading.Event()
        self.process = types.SimpleNamespace(wait=lambda: self.ended.wait() and 7)

    def end(self) -> None:
        self._theirs.close()
        self.ended.set()

    def stop(self, grace: float) -> None:
        self.end()


def take(core: Core) -> list[tuple[Kind, bytearray]]:
    assert core.channel.wait(90)
    return list(core.channel.receive())


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=300))), st.integers(1, 40))
def test_frames_come_out_as_they_went_in_however_they_are_cut(messages, size):
    data, frames, found = b"".join(frame(kind, payload) for kind, payload in messages), Frames(), []
    for at in range(0, len(data), size):
        frames.feed(data[at : at + size])
        while item := frames.take():
            found.append(item)
    assert found == messages


def test_the_core_never_waits_for_a_front_end_that_does_not_read():
    ours, theirs = socket.socketpair()
    channel, big = Channel(theirs), b"x" * 3_000_000
    for number in range(5):
        channel.send(Kind.OUTPUTS, b"%d" % number + big)
    assert not channel.wait(0.05)

    def read() -> None:
        frames = Frames()
        while len(found) < 5:
            frames.feed(ours.recv(1 << 16))
            while item := frames.take():
                found.append(item[1])
        ours.sendall(frame(Kind.ABORT, b"done"))

    found: list[bytearray] = []
    reader = threading.Thread(target=read)
    reader.start()
    assert channel.wait(90), "what was left over is sent while the core waits"
    assert list(channel.receive()) == [(Kind.ABORT, b"done")]
    reader.join()
    assert [bytes(payload) for payload in found] == [b"%d" % number + big for number in range(5)]
    ours.close()
    assert channel.wait(90)
    with pytest.raises(EOFError):
        list(channel.receive())
    channel.send(Kind.OUTPUTS, b"nobody is left")


@pytest.mark.parametrize("num_steps", [3, 400])
def test_results_arrive_whole_and_in_order_and_requests_go_out(num_steps):
    async def main() -> None:
        core, results, exits = Core(), [], []
        client = CoreClient(core, results.append, exits.append)
        core.channel.send(Kind.READY, READY)
        assert (await client.wait_ready()).num_blocks == 1
        client.abort_requests(["a", "b"])
        kind, payload = (await asyncio.to_thread(take, core))[0]
        assert kind is Kind.ABORT and msgspec.msgpack.decode(payload) == ["a", "b"]
        sent = [
            EngineCoreOutputs([EngineCoreOutput(str(i), 0, [step]) for i in range(50)], None, float(step))
            for step in range(num_steps)
        ]
        for step in sent:
            core.channel.send(Kind.OUTPUTS, encode_outputs(step))
        await asyncio.to_thread(core.channel.flush, 5)
        core.end()  # its last words are heard all the same
        while not exits:
            await asyncio.sleep(0.01)
        assert results == sent and exits == [7]
        with pytest.raises(EngineDeadError):
            client.abort_requests(["c"])

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(("words", "error"), [("no such model", OctavoError), (None, EngineDeadError)])
def test_a_core_that_cannot_start_is_heard_even_when_it_ended_long_ago(words, error):
    async def main() -> None:
        core = Core()
        client = CoreClient(core, lambda outputs: None, lambda code: None)
        if words:
            core.channel.send(Kind.FAILED, msgspec.msgpack.encode(words))
        core.end()
        await asyncio.sleep(0.1)
        with pytest.raises(error, match=words or "ended with exit code 7"):
            await client.wait_ready()

    asyncio.run(asyncio.wait_for(main(), 30))


outputs = st.builds(
    EngineCoreOutput,
    request_id=st.text(max_size=5),
    index=st.integers(-1, 3),
    new_token_ids=st.lists(st.integers(0, 2**31), max_size=2),
    new_logprobs=st.none() | st.builds(LogprobsLists, st.just([[1, 2]]), st.just([[-0.5, -1.0]]), st.just([1])),
    finish_reason=st.none() | st.just("stop"),
    stop_reason=st.none() | st.just("."),
    num_cached_tokens=st.integers(0, 9),
    scheduled_time=st.none() | st.floats(0, 1e9),
    error=st.none() | st.text(max_size=3),
    embedding=st.none() | st.just([0.5]),
)


@given(st.lists(outputs, max_size=8), st.none() | st.builds(SchedulerStats))
def test_nothing_of_a_steps_results_is_lost_on_the_way(results, stats):
    found = decode_outputs(encode_outputs(EngineCoreOutputs(results, stats, 1.5)))
    assert (found.stats, found.timestamp) == (stats, 1.5)
    assert sorted(found.outputs, key=repr) == sorted(results, key=repr)


def test_a_core_that_was_told_no_configuration_is_not_waited_for() -> None:
    assert CoreProcess().stop() == -signal.SIGKILL  # in the middle of its imports
