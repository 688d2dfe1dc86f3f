"""Several cores behind one server."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.real_durations import ENDS_SECONDS, timed_alone
from support.serving import Engine, are_gone
from support.split_cases import CASES
from support.tiny_models import make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.engine.data_parallel import Loads
from octavo.errors import ConfigError, OctavoError
from octavo.executor.lock_step import LockStep
from octavo.interface.engine_config import ParallelConfig
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

        def have_stepped(page: str) -> bool:
            steps = [
                float(line.split()[-1]) for line in page.splitlines() if line.startswith("octavo:rank_steps_total")
            ]
            return len(steps) == 2 and min(steps) > 5

        engine.wait_until_told(have_stepped)
        crowd = engine.crowd(4, 1000)
        time.sleep(0.3)
        os.kill(int(children[1]), signal.SIGKILL)
        for thread in crowd:
            thread.join(90)
        assert engine.process.wait(90) == 1


@pytest.mark.slow
@timed_alone
def test_experts_are_dealt_to_cores_that_step_together(tmp_path: Path) -> None:
    """Of a mixture with a shared expert: answers are those of one engine, be requests at one core alone or, at random
    times, at both; guesses are verified; each core holds half of the experts. One that is killed ends the server."""
    guesses = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1})
    flags = "--dtype", "float32", "--load-format", "auto", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"
    engine = Engine(tmp_path, "-dp", "2", "-ep", *flags, "--speculative-config", guesses)
    config_class, settings = CASES["experts"]
    make_model(config_class, settings | {"num_hidden_layers": 3, "max_position_embeddings": 2048}).save_pretrained(
        tmp_path / "model"
    )
    rng, answers = random.Random(28), dict[int, str]()
    asked = [
        {
            "prompt": [rng.randrange(250) for _ in range(rng.choice([2, 9, 40, 150]))] * 2,
            "seed": number,
            "max_tokens": rng.choice([1, 7, 40]),
            "temperature": rng.choice([0.0, 0.8]),
        }
        for number in range(20)
    ]
    llm = LLM(str(tmp_path / "model"), dtype="float32", max_num_seqs=8, max_num_batched_tokens=64)
    params = [SamplingParams(ignore_eos=True, **{k: v for k, v in one.items() if k != "prompt"}) for one in asked]
    prompts = [{"prompt_token_ids": one["prompt"]} for one in asked]
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    def ask(number: int, after: float) -> None:
        time.sleep(after)
        answers[number] = engine.text({"model": "tiny", "ignore_eos": True, **asked[number]})

    with engine:
        for number in range(3):
            ask(number, 0)
        clients = [threading.Thread(target=ask, args=(i, rng.random() * 1.5)) for i in range(3, len(asked))]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        assert [answers.get(number) for number in range(len(asked))] == expected
        assert "not recorded" not in engine.log
        children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
        cores = [psutil.Process(int(child)) for child in children]

        def sleep() -> bool:
            used = [sum(core.cpu_times()[:2]) for core in cores]
            time.sleep(1)
            return all(sum(core.cpu_times()[:2]) - before < 0.3 for core, before in zip(cores, used, strict=True))

        assert any(sleep() for _ in range(10)), "soon after the last answer"
        crowd = engine.crowd(4, 1000)
        time.sleep(0.3)
        os.kill(int(children[0]), signal.SIGKILL)
        assert engine.process.wait(ENDS_SECONDS) == 1
        for thread in crowd:
            thread.join(60)
        assert not any(thread.is_alive() for thread in crowd)
        assert are_gone(list(map(int, children)))


@pytest.mark.parametrize("has_ended", [True, False])
def test_an_engine_without_the_first_one_says_so(has_ended: bool) -> None:
    """That one makes what the experts of all exchange through."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lock_step = LockStep(1, [ours], ParallelConfig(distributed_timeout_seconds=1))
        if has_ended:
            theirs.close()
        with pytest.raises(OctavoError, match="core 0, which has some of the experts, did not begin within 1 s"):
            lock_step.share_memory()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tensor_parallel_size": 2}, "and tensor_parallel_size 2 is not supported yet: give tensor_parallel_size 1"),
        ({"pipeline_parallel_size": 2}, "and pipeline_parallel_size 2 is not supported yet"),
        ({"data_parallel_size": 17}, "at most 16 engines step together"),
        ({"enable_lora": True}, "and enable_lora is not supported yet"),
        ({"distributed_executor_backend": "mp"}, "distributed_executor_backend mp: leave that out"),
        ({"speculative_config": {"model": "x", "num_speculative_tokens": 2}}, "give method ngram or suffix"),
        ({"data_parallel_size": 5}, "4 experts cannot be dealt to 5 ranks"),
    ],
)
def test_flags_that_exclude_experts_on_several_cores_are_refused(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_model(*CASES["experts"]).save_pretrained(tmp_path)
    options: dict[str, Any] = {"data_parallel_size": 2, "load_format": "dummy", "skip_tokenizer_init": True, **more}
    with pytest.raises(ConfigError, match=said) as error:
        EngineArgs(str(tmp_path), enable_expert_parallel=True, **options).create_engine_config(progress=False)
    assert "\n" not in str(error.value)
