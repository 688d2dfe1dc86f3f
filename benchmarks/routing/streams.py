"""What a router costs, beside a bare Envoy: time to the first token, CPU a streamed token, memory of many streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from support.emulated_engines import EmulatedEngines
from support.envoy import PickerProcess
from support.serving import free_port

from benchmarks.routing.routers import Ports, Router, envoy

KINDS = ("direct", "bare Envoy", "stage 1", "stage 2")
ADDED_CLIENTS, ADDED_REQUESTS = 4, 400
CPU_STREAMS, CPU_TOKENS = 100, (20, 220)
STREAM_TOKENS = 100  # of a stream that pays for its request, too
MANY_STREAMS, MANY_TOKENS, MANY_SECONDS = 1000, 25, 0.2
Figures = dict[str, float]


def _bare(router: Router) -> None:
    """Its listener forwards to the next replica and does nothing else."""
    listeners, clusters = (json.loads(router.files[name]) for name in ("lds.yaml", "cds.yaml"))
    for one in listeners["resources"]:
        manager = one["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"] = manager["http_filters"][-1:]
    for one in clusters["resources"]:
        one["lb_policy"] = "ROUND_ROBIN"
        del one["load_balancing_policy"]
    router.files |= {"lds.yaml": json.dumps(listeners), "cds.yaml": json.dumps(clusters)}


@contextlib.contextmanager
def proxy(kind: str, ports: Ports) -> Iterator[tuple[int, dict[str, int]]]:
    """The port, and the processes' ids by name."""
    if kind == "direct":
        yield ports[0][0], {}
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        router = envoy(Path(folder), ports, **({"picker_port": free_port()} if kind == "stage 2" else {}))
        if kind == "bare Envoy":
            _bare(router)
        stack.enter_context(router)
        router.wait_for_replicas(len(ports))
        processes = {"envoy": router.process.pid}
        if kind == "stage 2":
            picker = stack.enter_context(PickerProcess(router))
            picker.wait_for_replicas(len(ports))
            processes["picker"] = picker.process.pid
        yield router.spec.port, processes


def cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond: ticks would miss most of what wakes up for less than one."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


async def _ask(http: aiohttp.ClientSession, port: int, number: int, tokens: int) -> tuple[float, bool]:
    """Seconds to the first token, and whether all came."""
    message = {"role": "user", "content": f"question {number} " * 40}
    body = {"model": "tiny", "messages": [message], "max_tokens": tokens, "stream": True}
    began, first, text = time.perf_counter(), 0.0, b""
    try:
        async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            async for part in answer.content.iter_any():
                first = first or time.perf_counter() - began
                text += part
    except aiohttp.ClientError:
        return first, False
    return first, b"[DONE]" in text and text.count(b'"content"') == tokens


async def load(port: int, clients: int, requests: int, tokens: int) -> tuple[list[float], int]:
    """Each client asks so often. Seconds to first tokens, and how many answers were not whole."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as http:

        async def client(number: int) -> list[tuple[float, bool]]:
            return [await _ask(http, port, number * requests + one, tokens) for one in range(requests)]

        answers = [one for some in await asyncio.gather(*map(client, range(clients))) for one in some]
    return [first for first, _ in answers], sum(not whole for _, whole in answers)


@contextlib.contextmanager
def served(kind: str, token_seconds: float, **engine: int) -> Iterator[tuple[int, dict[str, int], int]]:
    """A proxy to engines that never make a request wait: its port, the processes' ids by name, an engine's port."""
    ports = [free_port() for _ in range(4)]
    engines = EmulatedEngines(ports, token_seconds=token_seconds, slots=4096, prefill=1e9, **engine)
    with engines, proxy(kind, [(port, port) for port in ports]) as (front, processes):
        yield front, processes, ports[0]


def _run(kind: str, share: float) -> Figures:
    with served(kind, 0.001) as (port, _, _):
        first, lost = asyncio.run(load(port, ADDED_CLIENTS, int(ADDED_REQUESTS * share) // ADDED_CLIENTS, 2))
        found = {"ttft_p50_ms": 1000 * statistics.median(first)}
    if kind == "direct":
        return found
    spent = []
    with served(kind, 0.02) as (port, processes, _):
        for tokens in (2, *CPU_TOKENS):  # the first ones open connections
            before = sum(map(cpu_seconds, processes.values()))
            _, more_lost = asyncio.run(load(port, CPU_STREAMS, 1, tokens))
            spent.append(sum(map(cpu_seconds, processes.values())) - before)
            lost += more_lost
    few, many = CPU_TOKENS
    found["cpu_us_a_token"] = 1e6 * (spent[2] - spent[1]) / CPU_STREAMS / (many - few)
    found["cpu_ms_a_request"] = 1e3 * spent[1] / CPU_STREAMS - found["cpu_us_a_token"] * few / 1e3
    found["cpu_us_a_token_with_request"] = found["cpu_us_a_token"] + 1e3 * found["cpu_ms_a_request"] / STREAM_TOKENS
    with served(kind, MANY_SECONDS) as (port, processes, _):
        _, more_lost = asyncio.run(load(port, MANY_STREAMS, 1, MANY_TOKENS))
        found |= {f"{name}_mb": peak_mb(pid) for name, pid in processes.items()}
    return {**found, "lost": lost + more_lost}


def compare(runs: int, share: float) -> dict[str, Figures]:
    """Medians of so many runs, by kind; kinds alternate. `share`: of the requests that tell times."""
    found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    for _ in range(runs):
        for kind in KINDS:
            found[kind].append(_run(kind, share))
    return {
        kind: {name: statistics.median(one[name] for one in some) for name in some[0]} for kind, some in found.items()
    }


def table(found: dict[str, Figures]) -> str:
    """For people."""
    direct, bare = found["direct"]["ttft_p50_ms"], found["bare Envoy"]
    lines = [
        f"\n**cost** (TTFT of {ADDED_CLIENTS} clients, CPU of {CPU_STREAMS} streams, MB of {MANY_STREAMS})\n",
        "| router | TTFT p50 ms | added ms | CPU ms a request | CPU us a token | of bare Envoy's "
        f"| the same of streams of {STREAM_TOKENS} tokens, requests included | peak MB | lost |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| direct | {direct:.2f} | | | | | | | |",
    ]
    for kind, one in found.items():
        if kind != "direct":
            peak = " + ".join(f"{one[name]:.0f}" for name in ("envoy_mb", "picker_mb") if name in one)
            alone, together = (one[name] / bare[name] for name in ("cpu_us_a_token", "cpu_us_a_token_with_request"))
            lines.append(
                f"| {kind} | {one['ttft_p50_ms']:.2f} | {one['ttft_p50_ms'] - direct:.2f} "
                f"| {one['cpu_ms_a_request']:.2f} | {one['cpu_us_a_token']:.1f} | {alone:.2f} | {together:.2f} "
                f"| {peak} | {one['lost']:.0f} |"
            )
    return "\n".join(lines)
