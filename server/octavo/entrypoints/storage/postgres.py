"""PostgreSQL as the database of the store, shared by all replicas. Needs the extra ``octavo[postgres]``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

_SCHEMA_NAME = "octavo"
_LOCK = 0x6F637461766F  # of all that writes: writers take turns, as in SQLite
_CONNECT_SECONDS = 5
_STATEMENT_MS = 10_000
_TYPES = ((r"INTEGER PRIMARY KEY", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"), (r"\bINTEGER\b", "BIGINT"))
_WORDS = ((r"\bBLOB\b", "BYTEA"), (r" WITHOUT ROWID", ""))


class PostgresDatabase:
    """The schema ``octavo`` of the database at an address. A connection that is lost is made anew by the next
    statement."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError where the driver is missing, psycopg.Error where the database cannot be reached."""
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                'responses_store names PostgreSQL, and psycopg is not installed; run pip install "octavo[postgres]"'
            ) from None
        self.errors: tuple[type[Exception], ...] = (psycopg.Error,)
        self._url, self._connect = url, psycopg.connect
        self._connection: psycopg.Connection[Any] | None = None
        self._depth = 0

    def create(self, schema: str, version: int) -> None:
        """See `Database`."""
        for pattern, word in (*_TYPES, *_WORDS):
            schema = re.sub(pattern, word, schema)

        def make() -> int:
            self.execute(f"CREATE SCHEMA IF NOT EXISTS {_SCHEMA_NAME}")
            self.execute("CREATE TABLE IF NOT EXISTS version (number BIGINT NOT NULL)")
            ((found,),) = self.execute("SELECT coalesce(max(number), 0) FROM version")
            if found < version:
                for statement in filter(str.strip, schema.split(";")):
                    self.execute(statement)
                self.execute("INSERT INTO version VALUES (?)", (version,))
            return int(found)

        if (found := self.write(make)) > version:
            raise ConfigError(
                f"responses_store: the database was written by a newer version (tables {found}, known: {version}); "
                "name another database"
            )

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        """See `Database`."""
        cursor = self._connected().execute(_in_its_words(sql), values)
        rows: list[Any] = cursor.fetchall() if cursor.description is not None else []
        return rows

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """See `Database`."""
        with self._connected().cursor() as cursor:
            cursor.executemany(_in_its_words(sql), rows)

    def write(self, work: Callable[[], T]) -> T:
        """See `Database`."""
        if self._depth:
            return work()
        with self._connected().transaction():
            self._depth += 1
            try:
                self.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))
                return work()
            finally:
                self._depth -= 1

    def used_bytes(self) -> int:
        """See `Database`."""
        return 0

    def close(self) -> None:
        """See `Database`."""
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or (self._connection.closed and not self._depth):
            options = f"-c search_path={_SCHEMA_NAME} -c statement_timeout={_STATEMENT_MS}"
            self._connection = self._connect(
                self._url,
                autocommit=True,
                connect_timeout=_CONNECT_SECONDS,
                options=options,
                application_name="octavo",
                keepalives_idle=30,
                tcp_user_timeout=_STATEMENT_MS,
            )
        return self._connection


def _in_its_words(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()
