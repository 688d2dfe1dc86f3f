"""Engines whose load a test decides: pods on fake nodes, played by kwok, that really answer for their metrics.

kwok gives a pod everything but a process. Here each gets an address of this machine's loopback, and one HTTP server
answers on all of them as the engine's management port does. Requests arrive, wait, run and end as in an engine that
holds `capacity` at once.
"""

from __future__ import annotations

import http.server
import itertools
import random
import threading
import time
from collections import deque
from typing import Any

Json = dict[str, Any]


_SERVING = "app.kubernetes.io/component%3Dengine"  # of groups of pods the leaders


class Replica:
    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.began = time.monotonic()
        self.waiting: deque[float] = deque()  # seconds that each takes
        self.running: list[float] = []  # when each ends
        self.answers: str = "page"  # page | nonsense | 500


class Fleet:
    """Pods of one LLMDeployment. A context manager."""

    def __init__(self, api: Any, namespace: str, *, capacity: int = 4, load_seconds: float = 1.0, net: int = 9) -> None:
        self.capacity, self.load_seconds = capacity, load_seconds
        self.replicas: dict[str, Replica] = {}
        self.rate = 0.0  # requests a second
        self.request_seconds = 1.0
        self.first_queued: float | None = None  # when a request waited first, since it was last set to None
        self._api, self._namespace, self._path = api, namespace, f"/api/v1/namespaces/{namespace}/pods"
        self._addresses = (f"127.{net}.{number // 250}.{number % 250 + 1}" for number in itertools.count())
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._random = random.Random(0)
        self._owed = 0.0
        fleet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, text = fleet._answer(self.connection.getsockname()[0])
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._threads = [threading.Thread(target=work) for work in (self._server.serve_forever, self._live)]

    def __enter__(self) -> Fleet:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()

    # What a test does.

    def manifest(self, base: Json) -> Json:
        """The LLMDeployment, changed so that its pods land here."""
        spec = base["spec"]
        spec["scheduling"] = {
            "nodeSelector": {"nvidia.com/gpu.product": self._namespace},
            "tolerations": [{"operator": "Exists"}],
        }
        path = "/spec/containers/0/ports/1/containerPort"
        spec["podPatches"] = [*spec.get("podPatches", []), {"op": "replace", "path": path, "value": self.port}]
        return base

    def arrive(self, count: int) -> None:
        """So many requests at once."""
        with self._lock:
            for _ in range(count):
                self._place(self.request_seconds)

    def waiting(self) -> int:
        with self._lock:
            return sum(len(replica.waiting) for replica in self.replicas.values())

    def in_flight(self) -> int:
        with self._lock:
            return sum(len(replica.waiting) + len(replica.running) for replica in self.replicas.values())

    # What happens by itself.

    def _live(self) -> None:
        listed = before = time.monotonic()
        while not self._stop.wait(0.02):
            now = time.monotonic()
            if now - listed > 0.15:
                listed = now
                try:
                    self._follow(self._api.call("GET", f"{self._path}?labelSelector={_SERVING}")["items"])
                except OSError:
                    pass
            with self._lock:
                self._owed += self.rate * (now - before)
                while self._owed >= 1:
                    self._owed -= 1
                    self._place(self.request_seconds)
                for replica in self.replicas.values():
                    self._serve(replica, now)
            before = now

    def _follow(self, pods: list[Json]) -> None:
        alive = {pod["metadata"]["name"]: pod for pod in pods if "deletionTimestamp" not in pod["metadata"]}
        for name, pod in alive.items():
            if name not in self.replicas and (pod.get("status") or {}).get("phase") == "Running":
                replica = Replica(name, next(self._addresses))
                status = {"status": {"podIP": replica.address, "podIPs": [{"ip": replica.address}]}}
                self._api.call("PATCH", f"{self._path}/{name}/status", status, "application/merge-patch+json")
                with self._lock:
                    self.replicas[name] = replica
        with self._lock:
            for name in set(self.replicas) - set(alive):
                gone = self.replicas.pop(name)
                for seconds in gone.waiting:  # clients try again
                    self._place(seconds)

    def _place(self, seconds: float) -> None:
        """As a Service would: on any replica that has loaded."""
        now = time.monotonic()
        ready = [
            one for one in self.replicas.values() if now - one.began > self.load_seconds or len(self.replicas) == 1
        ]
        if ready:
            self._random.choice(ready).waiting.append(seconds)

    def _serve(self, replica: Replica, now: float) -> None:
        replica.running = [end for end in replica.running if end > now]
        while replica.waiting and len(replica.running) < self.capacity:
            replica.running.append(now + replica.waiting.popleft())
        if replica.waiting and self.first_queued is None:
            self.first_queued = now

    def _answer(self, address: str) -> tuple[int, bytes]:
        with self._lock:
            replica = next((one for one in self.replicas.values() if one.address == address), None)
            if replica is None or replica.answers == "500":
                return 500, b""
            if replica.answers == "nonsense":
                return 200, b"vllm:num_requests_running lots\n"
            lines = [
                f'vllm:num_requests_running{{engine="0"}} {len(replica.running)}',
                f'vllm:num_requests_waiting{{engine="0"}} {len(replica.waiting)}',
                f'octavo:max_num_seqs{{engine="0"}} {self.capacity}',
            ]
            return 200, ("\n".join(lines) + "\n").encode()
