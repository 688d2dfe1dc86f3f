"""Random requests, aborts, disconnects and bad input at several times what the server can run, for as long as you like.

    python -m benchmarks soak [--minutes 30] [--overload 4]

Ends with exit code 1 when anything failed that was not the client's fault, when sequences, queue or KV cache are not
empty at the end, when the engine's books do not balance, or when memory grew by more than 2 % in the second half (of a
run of two minutes and more: the first seconds fill caches).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.api_overhead import write_model

MAX_NUM_SEQS = 16
MAX_LEN = 512
BAD_BODIES = [
    b"",
    b"{",
    b"[1]",
    b'{"prompt": ""}',
    b'{"prompt": [999999]}',
    b'{"prompt": "x", "n": 1000000}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "top_p": 0}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "max_tokens": 1000000000}',
    b'{"prompt": "x", "stop": [""]}',
    b"[" * 50_000,
    b'{"prompt": "x", "allowed_token_ids": []}',
    b'{"messages": []}',
    b'{"prompt": [true]}',
]


def random_body(rng: random.Random) -> dict[str, object]:
    """A request of any shape; half of the prompts begin alike, so that prefixes are shared, copied and evicted."""
    prefix = [7] * rng.choice([0, 16, 33, 100])
    body: dict[str, object] = {
        "prompt": prefix + [rng.randrange(256) for _ in range(rng.randint(1, 150))],
        "max_tokens": rng.choice([1, 5, 20, 60, 200]),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "n": rng.choice([1, 1, 1, 2, 4]),
        "stream": rng.random() < 0.7,
        "ignore_eos": True,
    }
    extras: list[tuple[str, object]] = [
        ("logprobs", 3),
        ("prompt_logprobs", 1),
        ("stop", ["a", "zz"]),
        ("presence_penalty", 1.0),
        ("top_k", 5),
        ("min_tokens", 1),
        ("seed", 3),
        ("repetition_penalty", 1.2),
        ("bad_words", ["b"]),
        ("echo", True),
        ("top_p", 0.5),
        ("cache_salt", "salt"),
    ]
    if rng.random() < 0.03:  # few, or they would starve the others
        body["priority"] = -1
    return body | dict(rng.sample(extras, rng.randint(0, 3)))


class Soak:
    def __init__(self, url: str, seconds: float, seed: int) -> None:
        self.url, self.until = url, time.monotonic() + seconds
        self.rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def fault(self, what: str) -> None:
        self.faults.append(what)
        print(f"FAULT: {what[:300]}", flush=True)

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.until:
            kind = self.rng.choices(["whole", "leave", "cancel", "bad"], [6, 2, 1, 2])[0]
            try:
                await getattr(self, kind)(http)
            except (httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError, httpx.ReadTimeout) as error:
                self.fault(f"{kind}: {error!r}")

    async def whole(self, http: httpx.AsyncClient) -> None:
        """A request to its end, every byte of it checked."""
        body = random_body(self.rng)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            text = (await response.aread()).decode()
        if response.status_code == 429:
            self.outcomes["queue full"] += 1
            await asyncio.sleep(self.rng.random())
            return
        if response.status_code != 200:
            self.fault(f"{response.status_code} {text} for {body}")
        elif body["stream"]:
            chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            ends = [c for chunk in chunks for c in chunk.get("choices", []) if c["finish_reason"]]
            if not text.endswith("data: [DONE]\n\n") or len(ends) != body["n"] or any("error" in c for c in chunks):
                self.fault(f"a stream ended badly: {text[-300:]}")
        elif len(json.loads(text)["choices"]) != body["n"]:
            self.fault(f"choices are missing: {text}")
        self.outcomes["answered"] += 1

    async def leave(self, http: httpx.AsyncClient) -> None:
        """A stream that its reader leaves after a few chunks."""
        body = {**random_body(self.rng), "stream": True, "max_tokens": 200}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            chunks = 0
            async for _ in response.aiter_bytes():
                chunks += 1
                if chunks > self.rng.randint(0, 10):
                    break
        self.outcomes["left"] += 1

    async def cancel(self, http: httpx.AsyncClient) -> None:
        """A request whose client gives up waiting."""
        body = {**random_body(self.rng), "stream": False, "max_tokens": 200}
        try:
            await asyncio.wait_for(http.post("/v1/completions", json=body), self.rng.random() * 0.5)
        except TimeoutError:
            pass
        self.outcomes["gave up"] += 1

    async def bad(self, http: httpx.AsyncClient) -> None:
        path = self.rng.choice(["/v1/completions", "/v1/chat/completions"])
        headers = {"content-type": "application/json"}
        response = await http.post(path, content=self.rng.choice(BAD_BODIES), headers=headers)
        if not 400 <= response.status_code < 500 or "error" not in response.json():
            self.fault(f"{response.status_code} {response.text} for bad input")
        self.outcomes["refused"] += 1


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def watch_memory(pids: list[int], until: float, samples: list[list[int]]) -> None:
    while time.monotonic() < until:
        samples.append([resident(pid) for pid in pids])
        await asyncio.sleep(max(0.5, (until - time.monotonic()) / 200))


async def run(soak: Soak, pids: list[int], clients: int) -> list[list[int]]:
    samples: list[list[int]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=soak.url, timeout=300, limits=limits) as http:
        await asyncio.gather(watch_memory(pids, soak.until, samples), *(soak.client(http) for _ in range(clients)))
    return samples


def gauge(metrics: str, name: str) -> float:
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    assert found, name
    return float(found[1])


def check_end(soak: Soak, log: str) -> None:
    """Wait until all is quiet; then everything must be empty and in order."""
    names = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
    values: dict[str, float] = {}
    for _ in range(50):
        metrics = httpx.get(f"{soak.url}/metrics").text
        values = {name: gauge(metrics, name) for name in names}
        if not any(values.values()):
            break
        time.sleep(0.2)
    else:
        soak.fault(f"not empty at the end: {values}")
    print("preemptions:", gauge(metrics, "vllm:num_preemptions_total"))
    if httpx.get(f"{soak.url}/health").status_code != 200:
        soak.fault("not healthy at the end")
    time.sleep(2.5)  # the idle engine checks its books
    text = Path(log).read_text()
    if "integrity check failed" in text or "Traceback" in text:
        soak.fault("the log tells of a fault:\n" + text[max(0, text.find("Traceback") - 300) :][:3000])


def check_memory(soak: Soak, samples: list[list[int]]) -> None:
    for name, series in zip(("API process", "core"), zip(*samples, strict=True), strict=True):
        second = series[len(series) // 2 :]
        quarter = max(1, len(second) // 4)
        before, after = (sum(part) / len(part) for part in (second[:quarter], second[-quarter:]))
        growth = after / before - 1
        print(f"{name}: {before / 2**20:.1f} MiB at half time, {after / 2**20:.1f} MiB at the end ({growth:+.2%})")
        if growth > 0.02:
            soak.fault(f"the {name}'s memory grew by {growth:.1%} in the second half")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--overload", type=float, default=4, help="clients for each sequence that can run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("r") as log:
        write_model(Path(folder), MAX_LEN)
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "octavo.cli.main",
                "serve",
                folder,
                "--load-format",
                "dummy",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--max-num-seqs",
                str(MAX_NUM_SEQS),
                "--num-gpu-blocks-override",
                "200",
                "--max-num-queued-reqs",
                "100",
                "--scheduling-policy",
                "priority",
                "--disable-access-log",
            ],
            stdout=log.fileno(),
            stderr=log.fileno(),
        )
        try:
            while not (found := re.search(r"serving .* at (http\S+)", Path(log.name).read_text())):
                if server.poll() is not None:
                    raise SystemExit(Path(log.name).read_text())
                time.sleep(0.05)
            core = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])
            soak = Soak(found[1], options.minutes * 60, options.seed)
            samples = asyncio.run(run(soak, [server.pid, core], int(MAX_NUM_SEQS * options.overload)))
            print("outcomes:", dict(soak.outcomes))
            if options.minutes >= 2:
                check_memory(soak, samples)
            check_end(soak, log.name)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait()
        if code != 0:
            soak.fault(f"the server ended with exit code {code}")
    print(f"{len(soak.faults)} faults in {options.minutes:g} minutes")
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
