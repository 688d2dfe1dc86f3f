"""A gateway's Envoy as a process, and a server behind it that says what it got."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import openai
from support.envoy import Router
from support.serving import free_port

from octavo_operator.render.router.envoy import Endpoint, Pool
from octavo_operator.render.router.gateway import GatewaySpec, ModelName, files

Json = Any


class Gateway(Router):
    """A running gateway on loopback."""

    def __init__(
        self,
        folder: Path,
        pools: dict[str, Endpoint],
        models: dict[str, tuple[str, str]],
        with_picker: bool = False,
        hold_seconds: int = 0,
        **more: Any,
    ) -> None:
        """`models`: name -> pool, name there."""
        settings = {"picker_port": free_port()} if with_picker else {}
        super().__init__(folder, None, hold_seconds=hold_seconds, **settings)
        self.gateway = GatewaySpec(
            self.spec, tuple(Pool(name, (one,)) for name, one in pools.items()), named(models), **more
        )
        self.files = files(self.gateway)

    def change(self, **fields: Any) -> None:
        self.gateway = dataclasses.replace(self.gateway, **fields)
        self.files = files(self.gateway)
        self.write()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.spec.port}"

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def ask(self, method: str, path: str, body: Json = None, **headers: str) -> tuple[int, Any, Json]:
        connection = http.client.HTTPConnection("127.0.0.1", self.spec.port, timeout=90)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, answer.headers, json.loads(text) if text.startswith(b"{") else text

    def clusters(self) -> list[str]:
        """Names of the clusters that Envoy has, its own included."""
        url = f"http://127.0.0.1:{self.spec.admin_port}/clusters?format=json"
        return [one["name"] for one in json.load(urllib.request.urlopen(url, timeout=90))["cluster_statuses"]]

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while self.stat("cluster_membership_healthy") < count + 1 + bool(self.spec.picker_port):  # its own clusters
            assert time.monotonic() < deadline
            time.sleep(0.1)


def named(models: dict[str, tuple[str, str]]) -> tuple[ModelName, ...]:
    return tuple(ModelName(name, pool, served, pool, 1_700_000_000) for name, (pool, served) in models.items())


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode("latin1")
        self._say({"headers": {k.lower(): v for k, v in self.headers.items()}, "body": body})

    def _say(self, what: Any) -> None:
        said = json.dumps(what)
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, *_: Any) -> None:
        pass


class _Sink(_Echo):
    """Forgets bodies as they come: to write 30 MiB as JSON would take longer than all that is measured."""

    def do_POST(self) -> None:
        left = int(self.headers["content-length"])
        while left and (piece := self.rfile.read(min(left, 2**20))):
            left -= len(piece)
        self._say({})


@contextlib.contextmanager
def echo_server(with_bodies: bool = True) -> Iterator[Endpoint]:
    """Healthy, and answers with the headers and the body of a request; without bodies with nothing, but at once."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo if with_bodies else _Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Endpoint("127.0.0.1", server.server_port, server.server_port)
    server.shutdown()
