"""Do `octavo bench serve` and `vllm bench serve` say the same of one server, and does our client cost it anything?

    python -m benchmarks client [--clients octavo,vllm,thin] [--repeats 3] [--users 8] [--request-rate 6] ...

One `octavo serve` without prefix cache, one ShareGPT file, and the clients in turn, there and back again (A B B A): all
send the same prompts, in the same order, at the same times, and ask for the same lengths. Printed is each figure, the
median of the repeats, and how far each client is from the first; with --output also as JSON. The status is 1 if a
figure of vLLM's is more than 3 % away, or the rate that "thin" sees more than 5 %.

"thin" is the least that a client can be: one thread, sockets, a clock, no event is looked at before the end.

Where vLLM is installed (`make peers`), its own code also computes all figures from the times that our client recorded:
these must be equal, not near.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers.cpus import cpu_kind
from benchmarks.peers.engines import checkpoint_folder, peers_folder, vllm_binary
from octavo.bench.client import BACKENDS, make_body, read_result
from octavo.bench.datasets import SampleRequest, add_dataset_arguments, load_dataset
from octavo.bench.http_client import Exchange
from octavo.bench.load import load_tokenizer
from octavo.bench.local_server import LocalServer, local_server
from octavo.bench.report import Report, percentile
from octavo.errors import OctavoError

MODEL = "smollm2-135m-instruct"
SAME, THIN = 0.03, 0.05  # how far figures may be apart
# Largest and 99th percentile of few requests are those of one moment; peaks depend on where a second begins.
LOOSE = ("p99_", "std_", "max_")
FIGURES = (
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "duration",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "std", "p99")),
)
# Runs in vLLM's environment: figures by its own function from what our client recorded.
RECOMPUTE = """
import json, sys
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics
run = json.load(open(sys.argv[1]))
names = ("generated_texts", "latencies", "output_lens", "ttfts", "itls", "input_lens", "errors", "start_times")
outputs = [
    RequestFuncOutput(text, not error, latency, out, ttft, itl, prompt_len=prompt, error=error, start_time=start)
    for text, latency, out, ttft, itl, prompt, error, start in zip(*(run[name] for name in names))
]
found, _ = calculate_metrics([], outputs, run["duration"], None, [99.0], {})
figures = {k: v for k, v in vars(found).items() if not isinstance(v, list)}
for name in ("ttft", "tpot", "itl", "e2el"):
    figures[f"p99_{name}_ms"] = getattr(found, f"percentiles_{name}_ms")[0][1]
figures["total_input_tokens"], figures["total_output_tokens"] = found.total_input, found.total_output
print(json.dumps(figures | {"duration": run["duration"]}, default=float))
"""


@dataclass
class Load:
    """What all clients send. ``file``: of conversations, whose first questions are the prompts."""

    file: Path
    samples: list[SampleRequest]
    users: int
    rate: float
    seed: int
    backend: str
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def flags(self, url: str, output: Path) -> list[str]:
        """Of `bench serve`, ours and vLLM's alike."""
        words = ["--backend", self.backend, "--endpoint", BACKENDS[self.backend], "--base-url", url]
        words += ["--model", MODEL, "--dataset-name", "sharegpt"]
        words += ["--dataset-path", str(self.file), "--num-prompts", str(len(self.samples)), "--seed", str(self.seed)]
        words += ["--request-rate", str(self.rate), "--max-concurrency", str(self.users), "--ignore-eos"]
        words += ["--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99"]
        words += ["--num-warmups", "2", "--disable-tqdm", "--disable-shuffle", "--save-result", "--save-detailed"]
        return [*words, "--result-dir", str(output.parent), "--result-filename", output.name]


def make_load(args: argparse.Namespace, folder: Path) -> Load:
    """Random words of about --input-len tokens; answers of about --output-len."""
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    words = f"--num-prompts {args.num_prompts} --input-len {args.input_len} --output-len {args.output_len} --seed"
    words += f" {args.seed} --random-range-ratio 0.25"
    tokenizer = load_tokenizer(None)
    found = load_dataset(parser.parse_args(words.split()), tokenizer)
    # The second turn of a conversation says how long the answer is to be.
    rng = random.Random(args.seed)
    answers = [tokenizer.decode(rng.choices(found[0].prompt_token_ids, k=sample.output_len)) for sample in found]
    talks = [
        {"conversations": [{"from": "human", "value": sample.prompt}, {"from": "gpt", "value": answer}]}
        for sample, answer in zip(found, answers, strict=True)
    ]
    file = folder / "sharegpt.json"
    file.write_text(json.dumps(talks))
    words = f"--dataset-name sharegpt --dataset-path {file} --num-prompts {args.num_prompts} --disable-shuffle"
    samples = load_dataset(parser.parse_args(words.split()), tokenizer)
    return Load(file, samples, args.users, args.request_rate, args.seed, args.backend)


def run_octavo(load: Load, server: LocalServer, output: Path) -> dict[str, Any]:
    flags = load.flags(server.url, output)
    return _run([sys.executable, "-m", "octavo.cli.main", "bench", "serve", *flags], output, {})


def run_vllm(load: Load, server: LocalServer, output: Path) -> dict[str, Any]:
    flags = [*load.flags(server.url, output), "--tokenizer", str(checkpoint_folder(peers_folder()))]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return _run([str(vllm_binary(peers_folder())), "bench", "serve", *flags], output, env)


def _run(command: list[str], output: Path, env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        raise OctavoError(f"{' '.join(command[:4])} failed: {(done.stderr + done.stdout)[-1500:]}")
    figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def run_thin(load: Load, server: LocalServer, output: Path) -> dict[str, Any]:
    """A closed loop of users, or all when they are due; a connection a user. Pieces are kept as they come."""
    where = urlsplit(server.url)
    options = {"temperature": 0, "ignore_eos": True}
    requests = [_request(where.netloc, make_body(sample, MODEL, False, options)) for sample in load.samples]
    for request in requests[:1] * 2:
        _converse(where.hostname or "", where.port or 80, [request], 1)
    exchanges, seconds = _converse(where.hostname or "", where.port or 80, requests, load.users)
    results = [read_result(exchange, 0, 0.0) for exchange in exchanges]
    figures = Report(results, seconds, {}, metrics=("ttft", "tpot", "itl", "e2el")).to_dict()
    output.write_text(json.dumps(figures))
    return figures


def _request(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    # HTTP/1.0: the answer is not chunked and ends with the connection.
    head = f"POST /v1/completions HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _converse(host: str, port: int, requests: Sequence[bytes], users: int) -> tuple[list[Exchange], float]:
    exchanges = [Exchange(status=200) for _ in requests]
    waiting = list(range(len(requests)))[::-1]
    selector = selectors.DefaultSelector()
    began = time.perf_counter()

    def begin() -> None:
        number = waiting.pop()
        exchanges[number].started = time.perf_counter()
        connection = socket.create_connection((host, port))
        connection.sendall(requests[number])
        selector.register(connection, selectors.EVENT_READ, exchanges[number])

    for _ in range(min(users, len(requests))):
        begin()
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            key.data.pieces.append((time.perf_counter(), data))
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                if waiting:
                    begin()
    seconds = time.perf_counter() - began
    for exchange in exchanges:
        _drop_head(exchange)
    return exchanges, seconds


def _drop_head(exchange: Exchange) -> None:
    head, _, _ = exchange.body.partition(b"\r\n\r\n")
    exchange.status = int(head.split(b" ", 2)[1])
    left = len(head) + 4
    for i, (at, piece) in enumerate(exchange.pieces):
        exchange.pieces[i] = (at, piece[left:])
        left = max(0, left - len(piece))


CLIENTS = {"octavo": run_octavo, "vllm": run_vllm, "thin": run_thin}


def recompute(run: dict[str, Any], folder: Path) -> dict[str, tuple[float, float]]:
    """Figures that vLLM's own function makes of our recorded times and that are not ours: name -> (ours, vLLM's)."""
    file = folder / "recorded.json"
    file.write_text(json.dumps(run))
    command = [str(vllm_binary(peers_folder()).with_name("python")), "-c", RECOMPUTE, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise OctavoError(f"vLLM's calculate_metrics: {done.stderr[-800:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    return {n: (run[n], theirs[n]) for n in FIGURES if abs(run[n] - theirs[n]) > 1e-6 * abs(theirs[n])}


def compare(runs: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[str]]:
    """Lines of a table, and what is too far apart: of the first client's figures, from each other's."""
    first, *others = runs
    lines = [
        f"{'median of ' + str(len(runs[first])):<28}"
        + "".join(f"{name:>12}" for name in runs)
        + "".join(f"{first + ' / ' + name:>18}" for name in others)
    ]
    far = []
    for name in FIGURES:
        medians = {client: percentile([run[name] for run in found], 50) for client, found in runs.items()}
        line = f"{name:<28}" + "".join(f"{value:>12.2f}" for value in medians.values())
        for other in others:
            ratio = medians[first] / medians[other] if medians[other] else 1.0 + (medians[first] != 0)
            line += f"{ratio:>18.3f}"
            limit = SAME if other == "vllm" else THIN if name == "output_throughput" else None
            if limit and not name.startswith(LOOSE) and abs(ratio - 1) > limit:
                far.append(f"{name}: {first} / {other} is {ratio:.3f}, more than {limit:.0%} apart")
        lines.append(line)
    return lines, far


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="octavo,vllm,thin", help="the first is compared (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each client (default: 4)")
    parser.add_argument("--users", type=int, default=8, help="--max-concurrency (default: 8)")
    parser.add_argument("--num-prompts", type=int, default=64, help="(default: 64)")
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="without thin (default: all at once)")
    parser.add_argument("--input-len", type=int, default=128, help="(default: 128)")
    parser.add_argument("--output-len", type=int, default=96, help="(default: 96)")
    parser.add_argument("--backend", choices=("openai", "openai-chat"), default="openai", help="(default: openai)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--output", type=Path, help="JSON file of all figures (default: none)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = args.clients.split(",")
    if "vllm" in names and not vllm_binary(peers_folder()).exists():
        names.remove("vllm")
        print("vLLM is not installed (make peers): left out")
    if "thin" in names and (args.request_rate != float("inf") or args.backend != "openai"):
        names.remove("thin")
        print("thin knows neither rates nor chats: left out")
    print(cpu_kind())
    with tempfile.TemporaryDirectory() as temporary, local_server(["--no-enable-prefix-caching"]) as server:
        folder = Path(temporary)
        load = make_load(args, folder)
        for repeat in range(args.repeats):
            for name in names if repeat % 2 == 0 else reversed(names):
                run = CLIENTS[name](load, server, folder / "result.json")
                load.runs.setdefault(name, []).append(run)
                print(f"{repeat + 1}: {name:<8} {run['output_throughput']:8.1f} tok/s", flush=True)
        runs = {name: load.runs[name] for name in names}
        differing = recompute(runs["octavo"][-1], folder) if "vllm" in names and "octavo" in names else None
    lines, far = compare(runs)
    print("\n".join(lines))
    if differing is not None:
        print("vLLM's own function on our recorded times:", differing or "all figures equal")
        far += [f"{name}: ours {ours}, by vLLM's function {theirs}" for name, (ours, theirs) in differing.items()]
    for line in far:
        print("FAR:", line)
    if args.output:
        kept = {name: [{key: run[key] for key in FIGURES} for run in found] for name, found in runs.items()}
        args.output.write_text(
            json.dumps({"cpu": cpu_kind(), "load": vars(args) | {"output": None}, "runs": kept}, indent=1, default=str)
            + "\n"
        )
        print("saved", args.output)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
