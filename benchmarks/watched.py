"""What it costs that somebody watches the KV cache: `python -m benchmarks watched`, about five minutes.

Twenty users load one server while the dashboard's tab Memory reads and draws the block map once a second, or not, in
turn and back again. The tab's part runs in a process of its own, as the dashboard does; there is no browser.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator

import uvloop

from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.bench.load import (
    add_arrival_arguments,
    add_sampling_arguments,
    add_server_arguments,
    find_model,
    load_tokenizer,
    measure,
)
from octavo.bench.local_server import local_server

_WATCH = """
import sys, time, httpx
from octavo.dashboard.block_map import CacheView, counters_html, map_html
while True:
    view = CacheView.of(httpx.get(sys.argv[1] + "/octavo/blocks").json())
    map_html(view, whole=False), counters_html(view, 512, 1 << 20)
    print("looked", flush=True)
    time.sleep(1)
"""


@contextlib.contextmanager
def watcher(url: str) -> Iterator[None]:
    """Reads and draws the map of the management port ``url`` once a second."""
    process = subprocess.Popen([sys.executable, "-c", _WATCH, url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # what it imports is not what watching costs
        yield
        assert process.poll() is None, "the watcher has ended"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Print the ratio of each pair and the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    for add in (add_server_arguments, add_dataset_arguments, add_arrival_arguments, add_sampling_arguments):
        add(parser)
    parser.set_defaults(num_prompts=60, random_input_len=128, random_output_len=128, max_concurrency=20)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with local_server(["--management-port", str(port)]) as server:
        args.base_url, args.disable_tqdm = server.url, True
        model, tokenizer = find_model(args)[0], load_tokenizer(None)

        def rate(seed: int, watched: bool) -> float:
            args.seed = seed
            samples = load_dataset(args, tokenizer)
            with watcher(f"http://127.0.0.1:{port}") if watched else contextlib.nullcontext():
                results, seconds = uvloop.run(measure(args, samples, model, samples[:1]))
            assert all(result.success for result in results)
            return sum(result.output_tokens for result in results) / seconds

        rate(0, watched=False)  # to warm up
        ratios = []
        for pair in range(args.pairs):
            first = bool(pair % 2)
            found = {watched: rate(1 + 2 * pair + i, watched) for i, watched in enumerate((first, not first))}
            ratios.append(found[True] / found[False])
            print(f"{found[False]:7.1f} tok/s, watched {found[True]:7.1f}: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}, lowest {min(ratios):.3f}, highest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
