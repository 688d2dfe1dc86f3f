"""Tables of responses that are made in the background: who makes them, and the events that tell of them.

A server that makes a response holds a lease, which it renews. When it ends, however it ends, the lease runs out and
another server, or the same one after a restart, makes the response again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from octavo.entrypoints.storage.tables import Entry, Tables

LEASE_SECONDS = 15
RUNNING = ("queued", "in_progress")  # statuses of entries
_ROWS = 64  # of events that are read at once


@dataclass(frozen=True)
class Told:
    """Events as they are sent, one behind the other. ``first``: the number of the first of ``count``."""

    first: int
    count: int
    body: bytes


@dataclass(frozen=True)
class NewRun:
    """A response that the server ``owner`` begins to make with ``model``; ``request`` says how."""

    entry: Entry
    owner: str
    model: str
    request: bytes


@dataclass(frozen=True)
class ClaimedRun:
    """A response that nobody makes any more. ``request``: as in `NewRun`; ``attempt``: from 2 on; ``next_number``: that
    of its next event."""

    entry: Entry
    request: bytes
    attempt: int
    next_number: int


class RunTables(Tables):
    """Tables with those of runs. ``owner`` names a server that makes responses."""

    def begin(self, run: NewRun, told: Told) -> None:
        """Store a response that a server makes, with its first events."""

        def write() -> None:
            self.put(run.entry)
            sql = "INSERT INTO runs (id, owner, lease, attempt, model, request) VALUES (?, ?, ?, 1, ?, ?)"
            row = (run.entry.id, run.owner, self._lease(), run.model, zlib.compress(run.request, 1))
            self._db.execute(sql, row)
            self._tell(run.entry.id, told)

        self.write(write)

    def advance(self, entry_id: str, owner: str, told: Told, change: Callable[[RunTables], None] | None) -> bool:
        """Store the next events of a response, and what they ``change``. False, and nothing is stored, if the server
        makes it no more: it was cancelled or deleted, or is another's."""

        def write() -> bool:
            sql = "SELECT 1 FROM runs WHERE id = ? AND owner = ?"
            if not self._db.execute(sql, (entry_id, owner)):
                return False
            self._tell(entry_id, told)
            if change is not None:
                change(self)
            return True

        return self.write(write)

    def set(self, entry: Entry) -> None:
        """Replace the status and the body of an entry, not its items. One that does not run any more is nobody's."""
        sql = "UPDATE entries SET status = ?, body = ?, changed = ? WHERE id = ?"
        self._db.execute(sql, (entry.status, zlib.compress(entry.body, 1), int(self._clock()), entry.id))
        if entry.status not in RUNNING:
            self.end(entry.id)

    def end(self, entry_id: str) -> None:
        """Note that a response is made."""
        self._db.execute("DELETE FROM runs WHERE id = ?", (entry_id,))

    def stop(self, entry_id: str, change: Callable[[Entry], Entry]) -> Entry | None:
        """End a response that runs, whoever makes it, as what ``change`` makes of it; one that does not run stays as it
        is. Returns what is stored then; None: there is none."""

        def write() -> Entry | None:
            entry = self.get(entry_id, None)
            if entry is None or entry.status not in RUNNING:
                return entry
            self.set(changed := change(entry))
            return changed

        return self.write(write)

    def events_after(self, entry_id: str, number: int) -> tuple[list[tuple[int, bytes]], str | None]:
        """The next events behind the one of ``number``, each list with the number of its first, and the response's
        status; None: it is gone. Events are all there once the status says that it has ended."""
        status = self._db.execute("SELECT status FROM entries WHERE id = ?", (entry_id,))
        sql = "SELECT first, body FROM events WHERE id = ? AND last > ? ORDER BY first LIMIT ?"
        rows = self._db.execute(sql, (entry_id, number, _ROWS))
        return [(first, zlib.decompress(body)) for first, body in rows], status[0][0] if status else None

    def renew(self, owner: str, names: Sequence[str]) -> None:
        """Begin a server's leases of these responses anew."""
        sql, lease = "UPDATE runs SET lease = ? WHERE id = ? AND owner = ?", self._lease()
        if names:
            self.write(lambda: self._db.execute_many(sql, [(lease, name, owner) for name in names]))

    def release(self, owner: str) -> None:
        """End the leases of a server: whoever comes first makes its responses."""
        self.write(lambda: self._db.execute("UPDATE runs SET lease = 0 WHERE owner = ?", (owner,)))

    def claim(self, owner: str, models: Collection[str], most: int) -> list[ClaimedRun]:
        """Take over responses of ``models`` that nobody makes any more, at most so many. Their events are forgotten."""
        wanted = f"lease <= ? AND model IN ({', '.join('?' * len(models))})"
        now = int(self._clock())
        if not self._db.execute(f"SELECT 1 FROM runs WHERE {wanted} LIMIT 1", (now, *models)):
            return []

        def write() -> list[ClaimedRun]:
            sql = f"SELECT id, request, attempt + 1 FROM runs WHERE {wanted} LIMIT ?"
            rows = self._db.execute(sql, (now, *models, most))
            sql = "UPDATE runs SET owner = ?, lease = ?, attempt = ? WHERE id = ?"
            self._db.execute_many(sql, [(owner, self._lease(), attempt, name) for name, _, attempt in rows])
            return [run for row in rows if (run := self._claimed(*row)) is not None]

        return self.write(write)

    def _claimed(self, entry_id: str, request: bytes, attempt: int) -> ClaimedRun | None:
        entry = self.get(entry_id, None)
        if entry is None:
            self._db.execute("DELETE FROM runs WHERE id = ?", (entry_id,))
            return None
        sql = "SELECT coalesce(max(last), -1) + 1 FROM events WHERE id = ?"
        ((number,),) = self._db.execute(sql, (entry_id,))
        self._db.execute("DELETE FROM events WHERE id = ?", (entry_id,))
        return ClaimedRun(entry, zlib.decompress(request), attempt, number)

    def _lease(self) -> int:
        return int(self._clock()) + LEASE_SECONDS

    def _tell(self, entry_id: str, told: Told) -> None:
        if told.count:
            row = (entry_id, told.first, told.first + told.count - 1, zlib.compress(told.body, 1))
            self._db.execute("INSERT INTO events (id, first, last, body) VALUES (?, ?, ?, ?)", row)
