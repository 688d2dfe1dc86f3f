"""The server that the dashboard shows: its own or another's."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import httpx

from octavo.bench.local_server import local_server
from octavo.chat_client import TIMEOUT, Client, Model, has_tls
from octavo.errors import OctavoError

_PATIENCE = 10.0  # seconds for the smallest of answers, of a server with much to do


class Session:
    """The server that all tabs look at. It holds nothing that belongs to one visitor.

    ``key`` and ``model``, set by `page`: the `gr.State` with the API key that a visitor has entered, and that with the
    `Model` that is served. Both are None until they are known; ``model`` has a ``change`` event for what depends on it.
    ``tabs``: the `gr.Tabs`, whose ``select`` event says which is open.
    """

    key: Any = None
    model: Any = None
    tabs: Any = None

    def __init__(
        self,
        flags: Sequence[str] = (),
        url: str | None = None,
        management_url: str | None = None,
        model_name: str | None = None,
        api_key: str | None = None,
        local: bool = True,
    ) -> None:
        """``flags`` of an `octavo serve` of its own, started by `start` where ``url`` is None. ``local``: the page
        answers this machine alone, whose visitors need not enter ``api_key`` themselves."""
        self.flags = tuple(flags)
        self.management_url = management_url.rstrip("/") if management_url else None
        self.model_name = model_name
        self.local = local
        self._own, self._own_key, self._key = url is None, api_key, api_key if local else None
        self._address = url.rstrip("/").removesuffix("/v1") if url else ""
        self._failure = ""
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def address(self) -> str:
        """Base address of the server, as http://127.0.0.1:8000. Raises OctavoError while it starts and if it failed."""
        if self._failure:
            raise OctavoError(f"the server did not start: {self._failure}")
        if not self._address:
            raise OctavoError("the server is starting: try again in a moment")
        return self._address

    @property
    def own_model(self) -> str:
        """The model that the dashboard was started with; "" for the default one."""
        return self.flags[0] if self.flags and not self.flags[0].startswith("-") else self.model_name or ""

    @property
    def is_own(self) -> bool:
        """Return whether the dashboard has started the server."""
        return self._own

    def api_key(self, key: str | None) -> str | None:
        """The key to send for a visitor who has entered ``key``."""
        return key or self._key

    def client(self, key: str | None) -> Client:
        """A client of the server's OpenAI API."""
        return Client(f"{self.address}/v1", self.api_key(key))

    def async_client(self, key: str | None) -> httpx.AsyncClient:
        """An HTTP client for event loops."""
        headers = {"Authorization": f"Bearer {found}"} if (found := self.api_key(key)) else {}
        url = f"{self.address}/v1"
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT, trust_env=False, verify=has_tls(url))

    def find_model(self, key: str | None) -> Model:
        """The model to talk to. Raises OctavoError, KeyRequiredError where the visitor needs a key."""
        with self.client(key) as client:
            return client.model(self.model_name)

    async def look(self, key: str | None) -> None:
        """Ask the server something small. Raises OctavoError where it does not answer, or not well."""
        way_out = "end the dashboard and start it again" if self._own else "this turns green once it does again"
        try:
            async with self.async_client(key) as http:
                answer = await http.get("/models", timeout=_PATIENCE)
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise OctavoError(f"the server at {self.address} does not answer ({said}): {way_out}") from None
        if answer.status_code != HTTPStatus.OK:
            raise OctavoError(f"the server at {self.address} answers HTTP {answer.status_code}")

    # The server.

    def start(self) -> None:
        """Start the server, if it is the dashboard's own, without waiting for it."""
        if self._own:
            self._thread.start()

    async def started(self) -> None:
        """Wait until the server is ready. Raises OctavoError if it does not start."""
        while not self._address and not self._failure:
            await asyncio.sleep(0.02)
        _ = self.address

    def stop(self) -> None:
        """Stop what `start` has started."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """The thread that the server is a child of: it lasts as long."""
        port = _free_port()
        # Pages of others may not read from it, unless the visitor's flags say so.
        flags = ["--allowed-origins=[]", *self.flags]
        flags += ["--management-host", "127.0.0.1", "--management-port", str(port)]
        settings = {"OCTAVO_API_KEY": self._own_key} if self._own_key else {}
        try:
            with local_server(flags, settings, self._stop.is_set) as server:
                self.management_url = f"http://127.0.0.1:{port}"
                self._address = server.url
                self._stop.wait()
        except OctavoError as error:
            self._failure = str(error)
            if not self._stop.is_set():  # the page says it too, and its tab Plan needs no server
                print(f"octavo: error: the server did not start: {error}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
