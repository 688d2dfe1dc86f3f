"""The links of a picker to those beside the gateway's other routers: lines of JSON over a connection each way.

Each router tells every other one whom it sees and, to the one that decides for a tenant, what it has let in; then it
asks there. A connection that ends, or is silent for its lease, ends what was under way at its router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo_router.admission import TAKEN_BACK, UNDECIDED, Tenants, Verdict
from octavo_router.circle import LEASE_SECONDS
from octavo_router.limits import Refusal

ASK_SECONDS = 0.05  # then the router has its share
_BEAT_SECONDS, _LIST_SECONDS, _CONNECT_SECONDS, _AGAIN_SECONDS = 0.5, 1.0, 1.0, 0.25
_MAX_LINE = 2**26  # bytes: what a router has let in, of all tenants
Json = Any
logger = logging.getLogger(__name__)


class _Link:
    """A link to one other router. It answers on the same connection, in any order."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None
        self.task: asyncio.Task[None] | None = None
        self._number = 0
        self._asked: dict[int, tuple[Callable[[Verdict], None], asyncio.TimerHandle]] = {}
        self._is_slow = True  # it has said nothing yet, or nothing since it did not answer in time
        self._heard = 0.0  # when it last said something

    @property
    def answers(self) -> bool:
        """True if the router answers, as far as anybody knows."""
        return self.writer is not None and not self._is_slow

    def opened(self, writer: asyncio.StreamWriter) -> None:
        self.writer, self._is_slow, self._heard = writer, True, time.monotonic()

    def beat(self) -> None:
        """Tells that this one is there. A connection on which nothing comes back is given up."""
        if self.writer and time.monotonic() - self._heard > LEASE_SECONDS:
            self.writer.transport.abort()
        self.send({"beat": True})

    def send(self, message: Json) -> None:
        if self.writer:
            self.writer.write(json.dumps(message).encode() + b"\n")

    def ask(self, tenant: str, then: Callable[[Verdict], None]) -> None:
        self._number += 1
        timer = asyncio.get_running_loop().call_later(ASK_SECONDS, self._late, self._number)
        self._asked[self._number] = then, timer
        self.send({"ask": [self._number, tenant]})

    def _late(self, number: int) -> None:
        self._is_slow = True
        self._asked.pop(number)[0](UNDECIDED)

    def heard(self, message: Json) -> None:
        """An answer, or a sign of life."""
        self._is_slow, self._heard = False, time.monotonic()
        if "answer" not in message:
            return
        number, tenant, verdict = message["answer"]
        if number in self._asked:
            then, timer = self._asked.pop(number)
            timer.cancel()
            then(Refusal(*verdict) if isinstance(verdict, list) else verdict)
        elif verdict is None:  # too late: it has counted a request that went another way
            self.send({"tell": [TAKEN_BACK, tenant]})

    def lost(self) -> None:
        """Answer open questions with UNDECIDED: the connection is lost."""
        self.writer = None
        asked, self._asked = self._asked, {}
        for then, timer in asked.values():
            timer.cancel()
            then(UNDECIDED)


class Peers:
    """`me`: "ADDRESS:PORT" of this one; `listed`: those that serve, None: they cannot be found out."""

    def __init__(self, tenants: Tenants, me: str, listed: Callable[[], Iterable[str] | None]) -> None:
        self._tenants, self._me, self._listed = tenants, me, listed
        self._circle = tenants.circle
        self._links: dict[str, _Link] = {}
        self._callers: dict[str, asyncio.StreamWriter] = {}
        self._told_view = ""
        tenants.links = self

    def ask(self, router: str, tenant: str, then: Callable[[Verdict], None]) -> None:
        """True if a request of the tenant may begin."""
        link = self._links.get(router)
        if link and link.answers:
            link.ask(tenant, then)
        else:
            then(UNDECIDED)

    def tell(self, router: str, what: str, tenant: str) -> None:
        """Tell the others of a request of the tenant."""
        if link := self._links.get(router):
            link.send({"tell": [what, tenant]})

    def tell_all(self) -> None:
        """Tell every router whom this one sees, and what the other has to know."""
        self._told_view = self._circle.view
        for name, link in self._links.items():
            self._report(name, link)

    def _report(self, name: str, link: _Link) -> None:
        told = self._tenants.told(name, time.monotonic())
        link.send({"from": self._me, "sees": self._told_view, "told": told})

    async def run(self) -> None:
        """Keep the links, until cancelled."""
        address, _, port = self._me.rpartition(":")
        server = await asyncio.start_server(self._serve, address.strip("[]"), int(port), limit=_MAX_LINE)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._list())
                tasks.create_task(self._beat())
        finally:
            server.close()
            for link in self._links.values():
                if link.task:
                    link.task.cancel()
            for caller in self._callers.values():
                caller.close()

    async def _list(self) -> None:
        while True:
            if (found := await asyncio.to_thread(self._listed)) is not None:
                self._circle.serving(found)
                self._changed()
            await asyncio.sleep(_LIST_SECONDS)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            for name in self._circle.silent(time.monotonic()):
                self._forget(name)
            for link in self._links.values():
                link.beat()
            self._changed()

    def _changed(self) -> None:
        """Others may be there by now, or gone."""
        others = self._circle.members - {self._me}
        for name in set(self._links) - others:
            link = self._links.pop(name)
            if link.task:
                link.task.cancel()
        for name in others - set(self._links):
            link = self._links[name] = _Link()
            link.task = asyncio.create_task(self._follow(name, link))
        if self._circle.view != self._told_view:
            self.tell_all()

    async def _follow(self, name: str, link: _Link) -> None:
        """Holds a connection to another one."""
        address, _, port = name.rpartition(":")
        while True:
            try:
                opening = asyncio.open_connection(address.strip("[]"), int(port), limit=_MAX_LINE)
                reader, writer = await asyncio.wait_for(opening, _CONNECT_SECONDS)
                link.opened(writer)
                try:
                    self._report(name, link)
                    while line := await reader.readline():
                        link.heard(json.loads(line))
                finally:
                    link.lost()
                    writer.close()
            except (OSError, ValueError, KeyError, TypeError, AttributeError, TimeoutError):
                pass
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of another router."""
        name = ""
        try:
            while line := await reader.readline():
                name = self._hear(json.loads(line), name, writer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("the connection of router %s is closed: %r", name or "?", error)
        finally:
            if self._callers.get(name) is writer:
                self._forget(name)
            writer.close()

    def _hear(self, message: Json, name: str, writer: asyncio.StreamWriter) -> str:
        """Returns whose connection it is."""
        now = time.monotonic()

        def send(answer: Json) -> None:
            writer.write(json.dumps(answer).encode() + b"\n")

        if "from" in message:
            name = str(message["from"])
            before = self._callers.get(name)
            if before and before is not writer:
                before.close()
            self._callers[name] = writer
            self._circle.hear(name, str(message["sees"]), now)
            self._tenants.ledger.learn(name, message["told"], now)
            self._changed()
            send({"beat": True})
        elif self._callers.get(name) is not writer:
            raise ValueError("it has not named itself, or another connection has its name")
        elif "ask" in message:
            number, tenant = message["ask"]
            verdict = self._tenants.decide(name, tenant, now)
            told = [verdict.limit, verdict.text, verdict.retry_after] if isinstance(verdict, Refusal) else verdict
            send({"answer": [number, tenant, told]})
        elif "tell" in message:
            what, tenant = message["tell"]
            self._tenants.hear(name, what, tenant, now)
        else:
            self._circle.renew(name, now)
            send({"beat": True})
        return name

    def _forget(self, name: str) -> None:
        if caller := self._callers.pop(name, None):
            caller.close()
        self._circle.lose(name)
        self._tenants.ledger.gone(name)
        self._changed()


def resolver(names: str, port: int) -> Callable[[], list[str] | None]:
    """Finds the addresses of these names, with commas between them: those of a headless Service's pods."""

    def listed() -> list[str] | None:
        found: list[str] = []
        for name in names.split(","):
            with contextlib.suppress(OSError):
                found += [str(one[4][0]) for one in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
        return [address_of(one, port) for one in dict.fromkeys(found)] or None

    return listed


def address_of(host: str, port: int) -> str:
    """Return the address by which a router is named."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
