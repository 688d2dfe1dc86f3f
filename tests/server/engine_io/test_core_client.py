"""The front end's side of the sockets, with a core that takes its time."""

from __future__ import annotations

import asyncio
import threading
import types

import msgspec
import zmq

from octavo.engine.core_client import CoreClient
from octavo.engine.core_proc import ABORT, READY
from octavo.engine.heartbeat import Heartbeat
from octavo.engine.launcher import OUTPUT_SOCKET, REQUEST_SOCKET


class SlowCore:
    """Says that it is ready before it is connected to the socket that requests come by."""

    def __init__(self, directory) -> None:
        self.directory, self.heartbeat = directory, Heartbeat(directory, create=True)
        self.ended = threading.Event()
        self.process = types.SimpleNamespace(wait=lambda: self.ended.wait() and 0)
        self.removed = False

    def run(self) -> list[bytes]:
        context = zmq.Context()
        outputs, requests = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        outputs.connect(f"ipc://{self.directory / OUTPUT_SOCKET}")
        outputs.send_multipart([READY, msgspec.msgpack.encode({"config": {}, "num_blocks": 1})])
        assert not self.ended.wait(0.3)
        assert not self.removed, "the folder with the sockets is still needed"
        requests.connect(f"ipc://{self.directory / REQUEST_SOCKET}")
        assert requests.poll(5_000)
        message = requests.recv_multipart()
        context.destroy(linger=0)
        return message

    def remove_directory(self) -> None:
        self.removed = True

    def stop(self, grace: float) -> None:
        self.ended.set()


def test_nobody_blocks_on_a_core_that_is_not_connected_yet(tmp_path):
    async def main() -> None:
        core = SlowCore(tmp_path)
        client = CoreClient(core, lambda outputs: None, lambda code: None)
        running = asyncio.create_task(asyncio.to_thread(core.run))
        turns = 0
        ready = asyncio.create_task(client.wait_ready())
        while not ready.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 5 and core.removed
        client.abort_requests(["a"])
        assert (await asyncio.wait_for(running, 10))[0] == ABORT
        client.close()

    asyncio.run(main())
