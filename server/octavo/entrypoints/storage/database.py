"""The part of a database that the tables need, and SQLite as one.

Statements are in what SQLite and PostgreSQL have in common, with `?` for values.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from octavo.errors import ConfigError

T = TypeVar("T")

BUSY_SECONDS = 2.0  # of waiting for another process that writes


class Database(Protocol):
    """A database that one thread at a time may use. Methods raise one of ``errors`` where it does not work."""

    errors: tuple[type[Exception], ...]

    def create(self, schema: str, version: int) -> None:
        """Create tables and indexes that are not there. Raises ConfigError where a newer version has made them."""

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        """Return the rows of a statement."""

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement for each of the rows."""

    def write(self, work: Callable[[], T]) -> T:
        """Run ``work``, which may call this itself, in a transaction: all of it or nothing, and no other writer
        meanwhile."""

    def used_bytes(self) -> int:
        """The size of all that is stored; 0: the database has limits of its own."""

    def close(self) -> None:
        """Close the connection."""


class SqliteDatabase:
    """A file, or memory (``":memory:"``)."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: str) -> None:
        """Raises sqlite3.Error."""
        self._path = path
        # Transactions begin where the code says so, not at the first statement that writes.
        self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)

    def create(self, schema: str, version: int) -> None:
        """See `Database`."""
        found = self.value("PRAGMA user_version")
        if found > version:
            raise ConfigError(
                f"responses_store {self._path!r} was written by a newer version (tables {found}, known: {version}); "
                "name another file"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # the last turns may be lost with the machine, not the process
        self._db.execute("PRAGMA secure_delete = ON")
        self._db.execute("PRAGMA journal_size_limit = 16777216")
        self._db.executescript(f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {version}; COMMIT")

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        """See `Database`."""
        return self._db.execute(sql, values).fetchall()

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """See `Database`."""
        self._db.executemany(sql, rows)

    def write(self, work: Callable[[], T]) -> T:
        """See `Database`."""
        if self._db.in_transaction:
            return work()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            done = work()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return done

    def used_bytes(self) -> int:
        """See `Database`."""
        pages = self.value("PRAGMA page_count") - self.value("PRAGMA freelist_count")
        return pages * self.value("PRAGMA page_size")

    def value(self, sql: str) -> int:
        """The number that a statement gives."""
        return int(self._db.execute(sql).fetchone()[0])

    def close(self) -> None:
        """See `Database`."""
        self._db.close()
