"""Engines of several processes: they answer as one process does, and end as a whole."""

from __future__ import annotations

import gc
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from support.real_durations import ENDS_SECONDS, REAL_DURATIONS, timed_alone
from support.serving import Engine, are_gone, rank_pids
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from octavo.executor.multiproc import MultiprocExecutor
from octavo.executor.rank_processes import RankProcesses
from octavo.executor.ranks import Ranks, Watched
from octavo.executor.remote import RemoteExecutor
from octavo.executor.token_sums import EVERY, TokenSum
from octavo.interface.step import ModelRunnerOutput
from octavo.system.channel import Channel

PROMPTS = [[5, 6, 7, 8], list(range(3, 60)), [9] * 33]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, seed=8, max_tokens=40, ignore_eos=True, n=2, top_p=0.9),
]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}


def answers(llm: LLM) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model(*FAMILIES["llama"]).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_ranks_answer_as_one_process_and_end_with_it(model: str) -> None:
    """Greedy and sampled, batched, of several samples; the same with fewer blocks than all need (preemption)."""
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    expected = answers(LLM(model, **options))
    llm = LLM(model, tensor_parallel_size=2, num_gpu_blocks_override=10, **options)
    assert answers(llm) == expected
    assert llm.totals.num_preemptions
    pids = [rank.process.pid for rank in llm.engine.executor._ranks._ranks]
    assert len(pids) == 1
    del llm
    gc.collect()
    assert are_gone(pids) and not [name for name in os.listdir("/dev/shm") if "octavo" in name or "torch" in name]


@pytest.mark.slow
def test_ranks_need_no_room_in_dev_shm(model: str) -> None:
    """Containers have 64 MiB of it by default, or less: what ranks share has no name and no folder."""
    script = f"""
import os
from octavo import LLM, SamplingParams
if __name__ == "__main__":
    disk = os.statvfs("/dev/shm")
    assert disk.f_blocks * disk.f_frsize == 4096
    llm = LLM({model!r}, tensor_parallel_size=2, pipeline_parallel_size=2, skip_tokenizer_init=True, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], params, use_tqdm=False)
    print(len(output.outputs[0].token_ids))
"""
    mount = 'mount -t tmpfs -o size=4096 tmpfs /dev/shm && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if os.geteuid() != 0 or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    done = subprocess.run([*inside, sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["8"], done.stderr[-3000:]


@pytest.mark.slow
def test_the_embedded_model_on_three_ranks_from_a_command_line(tmp_path: Path) -> None:
    """No __main__ guard, more ranks than cores, a grammar that rank 0 alone follows; a rank that is killed ends it."""
    script = f"""
from octavo import LLM, SamplingParams, StructuredOutputsParams
import os, signal
llm = LLM(tensor_parallel_size=3, max_model_len=256)
grammar = StructuredOutputsParams(json={SCHEMA!r})
params = [SamplingParams(temperature=0, max_tokens=n, structured_outputs=g) for n, g in ((2, None), (40, grammar))]
for out in llm.generate(["The capital of France is", "My age as JSON: "], params, use_tqdm=False):
    print(repr(out.outputs[0].text))
os.kill(llm.engine.executor._ranks._ranks[1].process.pid, signal.SIGKILL)
llm.generate("The capital", params[0], use_tqdm=False)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    said = run.stdout.splitlines()
    assert said[0] == "' Paris.'" and '"age":' in said[1], run.stderr
    assert run.returncode and re.search(r"Error: .*rank 2 .*signal 9", run.stderr), run.stderr


@pytest.mark.slow
@timed_alone
@pytest.mark.sampled
@pytest.mark.parametrize("flag", ["-tp", "-pp"])
@pytest.mark.parametrize(("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_that_is_lost_ends_the_server(flag: str, victim: int, number: signal.Signals, tmp_path: Path) -> None:
    """In the middle of requests: they end, nothing is left, the log names the rank."""
    with Engine(tmp_path, flag, "2", "--distributed-timeout-seconds", "3" if REAL_DURATIONS else "8") as engine:
        core = engine.core_pid
        (rank,) = rank_pids(core)
        crowd = engine.crowd(3, 1000)
        engine.wait_until_told(re.compile(r'octavo:rank_steps_total\{[^}]*rank="1"\} [1-9]').search)
        time.sleep(random.uniform(0, 0.4))
        os.kill((core, rank)[victim], number)
        assert engine.process.wait(ENDS_SECONDS + (2 if number == signal.SIGSTOP else 0)) == 1
        for thread in crowd:
            thread.join(60)
        assert not any(thread.is_alive() for thread in crowd)
        assert are_gone([core, rank])
        assert victim == 0 or f"rank 1 (process {rank}) " in engine.log


def has_ended(pid: int) -> bool:
    """Within ten seconds. One that was killed is not waited for while a record of the log holds the engine."""
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_rank_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_API_KEY", "HF_TOKEN", "OCTAVO_CLUSTER_TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ranks = RankProcesses(range(1, 2))
    try:
        environment = Path(f"/proc/{ranks.processes[0].process.pid}/environ").read_bytes()
    finally:
        ranks.close()
    assert b"OMP_NUM_THREADS=3" in environment and b"a-secret" not in environment


def lose_one(model: str, number: signal.Signals, after: float, patch: pytest.MonkeyPatch, **options: Any) -> bool:
    """Start an engine, and send its first other rank a signal ``after`` so many seconds; whether that was in time: then
    there is an error that names the rank, and nothing is left."""
    patch.setattr("octavo.executor.ranks._SILENT_SECONDS", 5.0)
    begin, pids, timers = RankProcesses._start_processes, list[int](), list[threading.Timer]()

    def start(ranks: RankProcesses, heartbeats: int) -> None:
        begin(ranks, heartbeats)
        pids.extend(rank.process.pid for rank in ranks.processes)
        timers.append(threading.Timer(after, os.kill, (pids[0], number)))
        timers[0].start()

    patch.setattr(RankProcesses, "_start_processes", start)
    started, told, llm = time.monotonic(), "", None
    try:
        seconds = 5 if number == signal.SIGSTOP else 300
        llm = LLM(model, skip_tokenizer_init=True, max_model_len=128, distributed_timeout_seconds=seconds, **options)
        answers(llm)
    except OctavoError as error:
        told = str(error)
    timers[0].cancel()
    llm = None
    gc.collect()
    assert all(map(has_ended, pids))
    if told:
        assert re.search(rf"rank [01] \(process {pids[0]}\)|rank 1 did not", told), told
        assert time.monotonic() - started < after + 120
    return bool(told)


@pytest.mark.sampled(share=2)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_as_it_imports_is_told(
    number: signal.Signals, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before rank 0 has made what they exchange through, so that it never waits for this one there."""
    assert lose_one(model, number, 0.0, monkeypatch, tensor_parallel_size=2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
        {"tensor_parallel_size": 2, "enable_lora": True},
    ],
)
def test_a_rank_that_is_lost_at_any_time_of_the_start_is_told(
    options: dict[str, Any], number: signal.Signals, model: str
) -> None:
    """As it imports, loads, agrees on the memory, records; and in the first steps."""
    times, whole = 0, 0.0
    for _ in range(2):  # the first one may compile
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            assert not lose_one(model, signal.SIGCONT, 0.0, patch, **options)
        whole = time.monotonic() - started
    for after in (whole * share / 9 for share in range(10)):
        with pytest.MonkeyPatch.context() as patch:
            times += lose_one(model, number, after, patch, **options)
    assert times >= 3


@pytest.mark.slow
def test_a_drain_answers_what_has_begun_and_leaves_no_rank(tmp_path: Path) -> None:
    with Engine(tmp_path, "-tp", "2") as engine:
        pids = [engine.core_pid, *rank_pids(engine.core_pid)]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
        client = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = client.getresponse()
        answer.readline()
        engine.process.terminate()
        assert b"data: [DONE]" in answer.read() and engine.process.wait(90) == 0
        assert are_gone(pids)


@pytest.mark.slow
def test_a_stopped_rank_does_not_outlive_a_killed_server(tmp_path: Path) -> None:
    with Engine(tmp_path, "-tp", "2") as engine:
        pids = [engine.core_pid, *rank_pids(engine.core_pid)]
        os.kill(pids[1], signal.SIGSTOP)
        engine.process.kill()
        assert are_gone(pids)


class Pair(Ranks):
    """This process and a rank that reads nothing."""

    def _start(self) -> None:
        ours, self.theirs = socket.socketpair()
        beat = SimpleNamespace(seconds_since_beat=lambda: 9.0, num_steps=0)
        name = "rank 1 (process 7)"
        self._ranks.append(
            SimpleNamespace(
                number=1,
                name=name,
                channel=Channel(ours),
                heartbeat=beat,
                watched=[Watched(1, name, beat)],
                ended=lambda: None,
                end=lambda: None,
                close=ours.close,
            )
        )


@pytest.fixture
def pair() -> Iterator[Pair]:
    ranks = Pair(2)
    ranks._start_thread()
    yield ranks
    ranks.close()
    ranks.theirs.close()


def executor_of(
    ranks: Ranks, payload: bytes, compute: Callable[[object], object], kind: type[Any] = MultiprocExecutor
) -> Any:
    executor = kind.__new__(kind)
    executor._ranks, executor._encode = ranks, lambda step: payload
    executor._place = SimpleNamespace(tp=SimpleNamespace(size=2))
    executor.worker = SimpleNamespace(cut_drafts=lambda step: None, execute_model=compute)
    return executor


@pytest.mark.parametrize("kind", [MultiprocExecutor, RemoteExecutor])
def test_a_stopped_rank_that_reads_no_large_step_is_told(kind: type[Any], pair: Pair) -> None:
    """As one with images is."""
    pair.timeout = 0.5
    executor = executor_of(pair, bytes(1 << 24), lambda step: pytest.fail("the step was not sent"), kind)
    with pytest.raises(RuntimeError, match=r"step 7 was not done in 0.5 s: rank 1 \(process 7\) is late"):
        executor.execute_model(SimpleNamespace(step_id=7))


def test_every_step_in_flight_is_watched(pair: Pair) -> None:
    pair.timeout = 0.5
    for step in (7, 8):
        pair.begin_step(step)
    pair.end_step()
    pair.wait_for_news(20)
    assert str(pair.lost).startswith("step 8 was not done")


def test_a_rank_without_a_heartbeat_is_told_without_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an adapter is read, or before there is any step."""
    monkeypatch.setattr("octavo.executor.ranks._SILENT_SECONDS", 3.5)
    assert pair._silence() is None
    pair.timeout = 0.5
    pair.wait_for_news(20)
    assert pair.lost == "rank 1 (process 7) has given no sign of life for 3.5 s"


def test_no_step_follows_one_that_was_interrupted(pair: Pair) -> None:
    """The ranks are in the middle of it, and would take the next one's exchanges for its own."""

    def interrupted(step: object) -> object:
        raise KeyboardInterrupt

    executor = executor_of(pair, b"", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.execute_model(SimpleNamespace(step_id=7))
    with pytest.raises(RuntimeError, match=r"interrupted \(KeyboardInterrupt\): start the engine anew"):
        executor.execute_model(SimpleNamespace(step_id=8))


def test_ranks_that_sample_different_tokens_are_told_with_both_sums() -> None:
    ours, theirs = TokenSum(), TokenSum()
    for step in range(EVERY - 1):
        assert not ours.add(ModelRunnerOutput(sampled_token_ids={"a": [step], "b": [3, 4]}))
        assert not theirs.add(ModelRunnerOutput(sampled_token_ids={"a": [step + (step == 17)], "b": [4, 3]}))
    assert ours.add(ModelRunnerOutput()) and theirs.add(ModelRunnerOutput())
    assert ours.value != theirs.value

    with pytest.raises(RuntimeError, match=rf"{ours.value:016x}.*rank 1 {theirs.value:016x}"):
        ours.compare([(1, bytearray(msgspec.msgpack.encode((EVERY, theirs.value))))])
