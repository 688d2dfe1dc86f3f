"""Several cores behind one server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.serving import Engine

from octavo import LLM, SamplingParams
from octavo.engine.data_parallel import Loads
from octavo.errors import ConfigError
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest


def request(name: str, prompt: list[int], n: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt, SamplingParams(n=n), [], 0.0)


@given(st.integers(1, 4), st.data())
def test_the_core_with_fewest_tokens_gets_the_next_request(num_cores: int, data: st.DataObject) -> None:
    """Whatever arrives, grows and ends; and in the end nothing is left."""
    loads, alive = Loads(num_cores), {}
    for number in range(data.draw(st.integers(0, 20))):
        prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
        before = list(loads.tokens)
        core = loads.add(request(str(number), prompt, n=data.draw(st.integers(1, 2))))
        assert before[core] == min(before) and loads.tokens[core] == before[core] + len(prompt)
        alive[str(number)] = core
        for name in data.draw(st.sets(st.sampled_from(sorted(alive)))):
            if data.draw(st.booleans()):
                was = loads.tokens[alive[name]]
                loads.observe([EngineCoreOutput(name, 0, [1, 2])])
                assert loads.tokens[alive[name]] == was + 2
            else:
                loads.observe([EngineCoreOutput(name, -1, [], finish_reason="abort")])
                assert loads.core_of(name) is None
                del alive[name]
    for name in alive:
        loads.observe([EngineCoreOutput(name, 0, [1], finish_reason="stop")])
        loads.finish_sample(name, 1)
    assert loads.tokens == [0] * num_cores


def test_a_sample_whose_end_is_told_twice_is_one() -> None:
    """By the front end, which has found a stop string, while the core has ended it too: the other sample goes on, and
    can be aborted where it is."""
    loads = Loads(2)
    core = loads.add(request("r", [1, 2, 3], n=2))
    loads.finish_sample("r", 0)
    loads.observe([EngineCoreOutput("r", 0, [4], finish_reason="length")])
    assert loads.core_of("r") == core and loads.tokens[core] == 4
    loads.observe([EngineCoreOutput("r", 1, [4], finish_reason="length")])
    assert loads.core_of("r") is None and loads.tokens == [0, 0]


def test_equally_loaded_cores_are_told_apart_by_the_prompts_beginning() -> None:
    cores = set()
    for first in range(32):
        prompts = [[first] * 64, [first] * 64 + [1, 2, 3]]
        chosen = {Loads(3).add(request("r", prompt)) for prompt in prompts}
        assert len(chosen) == 1
        cores |= chosen
    assert cores == {0, 1, 2}


def test_offline_there_is_one_core() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size 2 is octavo serve's"):
        LLM(data_parallel_size=2)


@pytest.mark.slow
def test_two_cores_share_requests_and_end_together(tmp_path: Path) -> None:
    """Both compute, what they hold is one map of blocks, and one that is killed ends the server."""
    with Engine(tmp_path, "-dp", "2", "--num-gpu-blocks-override", "200") as engine:
        children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
        assert len(children) == 2
        statuses: list[int] = []
        clients = [
            threading.Thread(target=lambda i=i: statuses.append(engine.complete(f"prompt {i}", 20))) for i in range(8)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        assert statuses == [200] * 8
        blocks = json.load(urllib.request.urlopen(f"http://{engine.metrics_address}/octavo/blocks"))
        assert blocks["num_blocks"] == 400
        metrics = urllib.request.urlopen(f"http://{engine.metrics_address}/metrics").read().decode()
        steps = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("octavo:rank_steps_total")]
        assert len(steps) == 2 and min(steps) > 5, metrics
        crowd = engine.crowd(4, 1000)
        time.sleep(0.3)
        os.kill(int(children[1]), signal.SIGKILL)
        for thread in crowd:
            thread.join(20)
        assert engine.process.wait(20) == 1
