"""What the API process adds: the same requests through the core alone and streamed over HTTP.

    python -m benchmarks api_overhead [--concurrency 64] [--tokens 400]

A tiny model with made-up weights, so that the core is as fast as it can be and everything around it shows. The core
alone is `EngineCore.step` in a loop, in a process of its own, nothing detokenised. Both run several times in turn.

The core never waits for the API process. Where each has a CPU of its own, the core delivers as much less than alone as
its own CPU time a token is more, unless the API's is more still: then chunks carry more than one token each. Where
others want the same CPUs, the times tell of those, and the CPU times alone of us. Two CPUs may also be threads of one
core: what the core alone loses beside a process that does nothing but spin is no work of the API's.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPT_IDS = list(range(5, 37))
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def write_model(folder: Path, max_len: int) -> None:
    """A llama of two layers with a byte-level tokenizer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def core_alone(model: str, concurrency: int, tokens: int) -> None:
    """(The other process.) Prints the seconds and CPU seconds of each round that it is asked for on stdin."""
    from octavo.engine.args import EngineArgs
    from octavo.engine.core import EngineCore
    from octavo.interface.messages import EngineCoreRequest
    from octavo.interface.sampling_params import SamplingParams

    config = EngineArgs(
        model=model, load_format="dummy", max_num_seqs=concurrency, kv_cache_memory_bytes=256 << 20
    ).create_engine_config()
    core = EngineCore(config)
    number = 0
    for _ in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(concurrency):
            number += 1
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
            core.add_request(EngineCoreRequest(str(number), [number % 256, *PROMPT_IDS], params, [], time.time()))
        while core.has_unfinished_requests():
            core.step()
        print(time.perf_counter() - started, time.process_time() - cpu, flush=True)


class Client:
    """Reads what has come on all its streams every few milliseconds, over raw sockets: it costs next to nothing, for it
    shares the machine with what is measured. A client that woke for every chunk would cost more than the server."""

    READ_SECONDS = 0.02

    def __init__(self, port: int, tokens: int) -> None:
        self.port, self.tokens = port, tokens
        self.number = 0

    def request(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the next request."""
        shared = {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return "/v1/completions", {"prompt": [self.number % 256, *PROMPT_IDS], **shared}

    def is_whole(self, answer: bytes) -> bool:
        """Whether that is all of an answer."""
        return answer.rstrip().endswith(b"data: [DONE]\n\n\r\n0") and b'"finish_reason":"length"' in answer

    def open(self) -> socket.socket:
        """One request on a connection of its own."""
        self.number += 1
        path, content = self.request()
        body = json.dumps(content).encode()
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        )
        connection.setblocking(False)
        return connection

    def round(self, concurrency: int) -> tuple[float, int]:
        """Seconds until all answers are there, and the number of chunks in them."""
        started = time.perf_counter()
        streams = {self.open(): bytearray() for _ in range(concurrency)}
        unfinished = set(streams)
        while unfinished:
            time.sleep(self.READ_SECONDS)
            for connection in list(unfinished):
                with contextlib.suppress(BlockingIOError):
                    while data := connection.recv(1 << 18):
                        streams[connection] += data
                    unfinished.discard(connection)
                    connection.close()
        seconds = time.perf_counter() - started
        for answer in streams.values():
            if not self.is_whole(bytes(answer)):
                raise SystemExit(f"an answer is not whole: ...{bytes(answer[-300:])!r}")
        return seconds, sum(answer.count(b'"text_completion"') for answer in streams.values())


class Probe(threading.Thread):
    """Asks /livez over and over: what holds up the API's event loop holds up the answer too."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.seconds = port, [0.0]

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError, http.client.HTTPException):  # until the server ends
            while True:
                started = time.perf_counter()
                connection.request("GET", "/livez")
                connection.getresponse().read()
                self.seconds.append(time.perf_counter() - started)
                time.sleep(0.005)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core-alone", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.core_alone:
        return core_alone(options.core_alone, options.concurrency, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), max_len=max(512, options.tokens + 64))
        compare(folder, options)


def ask(alone: subprocess.Popen[str]) -> tuple[float, float]:
    """One round of the core alone: seconds, and CPU seconds."""
    assert alone.stdin is not None and alone.stdout is not None
    alone.stdin.write("\n")
    alone.stdin.flush()
    seconds, cpu = map(float, alone.stdout.readline().split())
    return seconds, cpu


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(model: str, concurrency: int) -> Iterator[tuple[int, int]]:
    """A server of the model with made-up weights: its process id and its port."""
    log = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  (as long as the server)
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "octavo.cli.main",
            "serve",
            model,
            "--load-format",
            "dummy",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--max-num-seqs",
            str(concurrency),
            "--kv-cache-memory-bytes",
            str(256 << 20),
            "--disable-access-log",
        ],
        stdout=log.fileno(),
        stderr=log.fileno(),
        env=ENV,
    )
    try:
        while not (found := re.search(r"serving .* at http://127.0.0.1:(\d+)", Path(log.name).read_text())):
            if server.poll() is not None:
                raise SystemExit(Path(log.name).read_text())
            time.sleep(0.05)
        yield server.pid, int(found[1])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def compare(model: str, options: argparse.Namespace) -> None:
    size = ["--concurrency", str(options.concurrency), "--tokens", str(options.tokens)]
    alone = subprocess.Popen(
        [sys.executable, __file__, "--core-alone", model, *size],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENV,
        text=True,
    )
    try:
        with serving(model, options.concurrency) as (pid, port):
            measure(alone, pid, port, options)
    finally:
        alone.stdin.close()  # type: ignore[union-attr]
        alone.wait()


def measure(alone: subprocess.Popen[str], pid: int, port: int, options: argparse.Namespace) -> None:
    client = Client(port, options.tokens)
    core_pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    rounds: dict[str, list[float]] = {"core alone": [], "beside a spinning process": [], "over HTTP": []}
    shares: list[tuple[float, ...]] = []
    probe = Probe(client.port)
    for number in range(options.rounds + 1):
        seconds, alone_cpu = ask(alone)
        with spinning():
            spun_seconds, _ = ask(alone)
        before = cpu_seconds(pid), cpu_seconds(core_pid)
        http_seconds, chunks = client.round(options.concurrency)
        if number == 0:  # warms up
            probe.start()
        else:
            rounds["core alone"].append(seconds)
            rounds["beside a spinning process"].append(spun_seconds)
            rounds["over HTTP"].append(http_seconds)
            api, core = cpu_seconds(pid) - before[0], cpu_seconds(core_pid) - before[1]
            total = options.concurrency * options.tokens
            shares.append((api / total, core / total, alone_cpu / total, chunks / total, core / alone_cpu - 1))
    total = options.concurrency * options.tokens
    for name, times in rounds.items():
        print(f"{name:<25} {statistics.median(times):6.3f} s  {total / statistics.median(times):9,.0f} tokens/s")
    extra, beyond = (
        statistics.median(h / c for c, h in zip(rounds[base], rounds["over HTTP"], strict=True)) - 1
        for base in ("core alone", "beside a spinning process")
    )
    api_cpu, core_cpu, alone_cpu, chunks, extra_cpu = (
        statistics.median(column) for column in zip(*shares, strict=True)
    )
    waits = sorted(probe.seconds)
    print(f"HTTP adds {extra:.1%} to the time, {beyond:.1%} beside a spinning process; {chunks:.2f} chunks a token")
    print(
        f"CPU time a token: core alone {1e6 * alone_cpu:.1f} us, core {1e6 * core_cpu:.1f} us ({extra_cpu:+.1%}), "
        f"API {1e6 * api_cpu:.1f} us beside it"
    )
    print(f"/livez meanwhile: p99 {1e3 * waits[int(0.99 * len(waits))]:.1f} ms, longest {1e3 * waits[-1]:.1f} ms")


if __name__ == "__main__":
    main()
