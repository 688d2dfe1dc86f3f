"""Tables of stored responses and conversations. They know bytes and ids, and nothing of an API.

Items are stored once, however many responses contain them: each turn of a conversation repeats those before it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from octavo.entrypoints.storage.database import Database
from octavo.metrics.stats import Tenant

T = TypeVar("T")

VERSION = 1  # of the tables
_AT_ONCE = 16  # entries that make room together
_SHARE = 8  # of a tenant's free bytes, after which they are counted anew
_STILL = "status NOT IN ('queued', 'in_progress')"  # of an entry: nobody makes it any more
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, created INTEGER NOT NULL,
    changed INTEGER NOT NULL, status TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS entries_by_change ON entries (changed, key);
CREATE TABLE IF NOT EXISTS bodies (key INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS items (
    entry INTEGER NOT NULL, position INTEGER NOT NULL, is_output INTEGER NOT NULL, id TEXT, body INTEGER NOT NULL,
    PRIMARY KEY (entry, position)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_body ON items (body);
CREATE INDEX IF NOT EXISTS items_by_id ON items (id) WHERE id IS NOT NULL;
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, lease INTEGER NOT NULL, attempt INTEGER NOT NULL, model TEXT NOT NULL,
    request BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (id, first)) WITHOUT ROWID;
"""


class FullError(Exception):
    """An entry is larger than all the room there is, by the flag that says how much."""


@dataclass(frozen=True)
class StoredItem:
    """An item as JSON. ``id``: by which it is found; None: it is found with its entry alone."""

    body: bytes
    id: str | None = None


@dataclass(frozen=True)
class Entry:
    """A response or a conversation. ``body``: as the API shows it, as JSON; ``tenant``: see `account_of`; ``created``:
    seconds since the epoch; ``input`` and ``output``: the items that it answers, and those that it says."""

    id: str
    tenant: str
    created: int
    status: str
    body: bytes
    input: Sequence[StoredItem] = field(default_factory=list)
    output: Sequence[StoredItem] = field(default_factory=list)


def account_of(tenant: Tenant | None) -> str:
    """The owner of what a tenant stores; empty: a client without a gateway."""
    return "" if tenant is None else f"{tenant.name} {tenant.account}"


def tenant_of(account: str) -> Tenant | None:
    """The tenant of which `account_of` gives this."""
    name, found, rest = account.partition(" ")
    return Tenant(name, rest) if found else None


class Tables:
    """The tables in a database. ``max_bytes``: of all that is stored, what was changed first makes room; ``lifetime``:
    seconds since a change, 0: forever; ``clock``: seconds since the epoch; ``tenant_bytes``: of what each tenant has,
    whose own makes room, 0: no limit. One thread at a time may use them.

    Every method raises one of ``errors`` where the database does not work, and has then changed nothing.
    """

    def __init__(
        self,
        database: Database,
        max_bytes: int,
        lifetime: int,
        clock: Callable[[], float],
        tenant_bytes: int = 0,
    ) -> None:
        """Raises ConfigError for tables of a newer version, and one of the database's errors."""
        self._db, self._max_bytes, self._lifetime, self._clock = database, max_bytes, lifetime, clock
        self._tenant_bytes = tenant_bytes
        self._free: dict[str, int] = {}  # bytes that an account may add before its entries are counted anew
        self.errors = database.errors
        try:
            database.create(_SCHEMA, VERSION)
            self.expire()
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def put(self, entry: Entry) -> None:
        """Store an entry, in the place of an earlier one of the same id. The oldest make room. Raises FullError."""

        def write() -> None:
            changed = int(self._clock())
            row = (entry.id, entry.tenant, entry.created, changed, entry.status, zlib.compress(entry.body, 1))
            sql = """INSERT INTO entries (id, tenant, created, changed, status, body) VALUES (?, ?, ?, ?, ?, ?)
                ON CONFLICT (id) DO UPDATE SET changed = excluded.changed, status = excluded.status,
                body = excluded.body"""
            self._db.execute(sql, row)
            (key,) = self._keys("id = ?", entry.id)
            self._drop_items("entry = ?", key)
            items = [*((item, 0) for item in entry.input), *((item, 1) for item in entry.output)]
            self._add(key, items, len(entry.body))

        self.write(write)

    def append(self, entry_id: str, tenant: Tenant | None, items: Sequence[StoredItem]) -> bool:
        """Add items to the output of an entry that the tenant may have. False if there is none. Raises FullError."""

        def write() -> bool:
            key = self._touch(entry_id, tenant)
            if key is not None:
                self._add(key, [(item, 1) for item in items])
            return key is not None

        return self.write(write)

    def update(self, entry_id: str, tenant: Tenant | None, body: bytes) -> bool:
        """Replace the body of an entry that the tenant may have. False if there is none."""

        def write() -> bool:
            key = self._touch(entry_id, tenant)
            if key is not None:
                self._db.execute("UPDATE entries SET body = ? WHERE key = ?", (zlib.compress(body, 1), key))
            return key is not None

        return self.write(write)

    def remove(self, entry_id: str, tenant: Tenant | None, item_id: str) -> bool:
        """Remove an item from an entry that the tenant may have. False if there is none."""

        def write() -> bool:
            key = self._touch(entry_id, tenant)
            return bool(self._drop_items("entry = ? AND id = ?", key, item_id))

        return self.write(write)

    def get(self, entry_id: str, tenant: Tenant | None) -> Entry | None:
        """An entry that the tenant may have. Without a tenant nobody asks through a gateway: who knows the id may have
        it."""
        sql = "SELECT key, tenant, created, status, body FROM entries"
        sql += f" WHERE id = ? AND (changed > ? OR NOT {_STILL})"
        row = _first(self._db.execute(sql, (entry_id, self._expired())))
        if row is None or (tenant is not None and row[1] != account_of(tenant)):
            return None
        key, owner, created, status, body = row
        sql = "SELECT is_output, items.id, bodies.body FROM items JOIN bodies ON bodies.key = items.body"
        items: tuple[list[StoredItem], list[StoredItem]] = ([], [])
        for said, item_id, item in self._db.execute(f"{sql} WHERE entry = ? ORDER BY position", (key,)):
            items[said].append(StoredItem(zlib.decompress(item), item_id))
        return Entry(entry_id, owner, created, status, zlib.decompress(body), *items)

    def item(self, item_id: str, tenant: Tenant | None) -> bytes | None:
        """An item that has an id of its own, of an entry that the tenant may have."""
        sql = """SELECT bodies.body FROM items JOIN bodies ON bodies.key = items.body
            JOIN entries ON entries.key = items.entry
            WHERE items.id = ? AND changed > ? AND (? OR tenant = ?) LIMIT 1"""
        asked = (item_id, self._expired(), tenant is None, account_of(tenant))
        row = _first(self._db.execute(sql, asked))
        return None if row is None else zlib.decompress(row[0])

    def delete(self, entry_id: str, tenant: Tenant | None) -> bool:
        """Forget an entry. False if the tenant has none of this id."""

        def write() -> bool:
            keys = self._keys("id = ? AND (? OR tenant = ?)", entry_id, tenant is None, account_of(tenant))
            self._drop(keys)
            return bool(keys)

        return self.write(write)

    def expire(self) -> None:
        """Forget what has expired."""
        while keys := self._keys(f"changed <= ? AND {_STILL} LIMIT {_AT_ONCE}", self._expired()):
            self.write(partial(self._drop, keys))

    def count(self) -> int:
        """The number of entries."""
        return int(self._value("SELECT count(*) FROM entries"))

    def write(self, work: Callable[[], T]) -> T:
        """Run ``work``, which may call other methods, in a transaction: all of it or nothing."""
        return self._db.write(work)

    def _expired(self) -> int:
        """When that was last changed which expires now."""
        return int(self._clock()) - self._lifetime if self._lifetime else -1

    def _touch(self, entry_id: str, tenant: Tenant | None) -> int | None:
        """The key of an entry that the tenant may have, whose time begins again."""
        asked = (entry_id, self._expired(), tenant is None, account_of(tenant))
        found = self._keys("id = ? AND changed > ? AND (? OR tenant = ?)", *asked)
        if not found:
            return None
        self._db.execute("UPDATE entries SET changed = ? WHERE key = ?", (int(self._clock()), found[0]))
        return found[0]

    def _add(self, key: int, items: Sequence[tuple[StoredItem, int]], more: int = 0) -> None:
        """Add items to an entry. ``more``: bytes of the entry itself that are new."""
        begin = self._value(f"SELECT coalesce(max(position), -1) + 1 FROM items WHERE entry = {key}")
        rows = [(key, at, said, item.id, self._body(item.body)) for at, (item, said) in enumerate(items, begin)]
        self._db.execute_many("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)
        if self._tenant_bytes:
            self._make_room_of_tenant(key, more + sum(len(item.body) for item, _ in items))
        self._make_room(key)

    def _body(self, body: bytes) -> int:
        """The key of a body, which is stored unless it is there."""
        digest = hashlib.sha256(body).digest()[:16]
        row = _first(self._db.execute("SELECT key FROM bodies WHERE digest = ?", (digest,)))
        if row is not None:
            return int(row[0])
        sql = "INSERT INTO bodies (digest, body) VALUES (?, ?)"
        self._db.execute(sql, (digest, zlib.compress(body, 1)))
        ((key,),) = self._db.execute("SELECT key FROM bodies WHERE digest = ?", (digest,))
        return int(key)

    def _make_room(self, own: int) -> None:
        while self._db.used_bytes() > self._max_bytes:
            oldest = self._keys(f"key != ? AND {_STILL} ORDER BY changed, key LIMIT {_AT_ONCE}", own)
            if not oldest:
                raise FullError("--responses-max-bytes")
            self._drop(oldest)

    def _make_room_of_tenant(self, own: int, size: int) -> None:
        """Have the oldest entries of the tenant make room for its entry ``own``, which has gained at most ``size``
        bytes. Counting takes long; other servers add to the same tables."""
        ((account,),) = self._db.execute("SELECT tenant FROM entries WHERE key = ?", (own,))
        if not account:
            return
        self._free[account] = self._free.get(account, 0) - size
        if self._free[account] >= 0:
            return
        while (used := self._bytes_of(account)) > self._tenant_bytes:
            where = f"key != ? AND tenant = ? AND {_STILL} ORDER BY changed, key LIMIT {_AT_ONCE}"
            if not (oldest := self._keys(where, own, account)):
                raise FullError("--responses-max-bytes-per-tenant")
            self._drop(oldest)
        self._free[account] = (self._tenant_bytes - used) // _SHARE

    def _bytes_of(self, account: str) -> int:
        """The compressed size of an account's entries; an item that several contain counts once."""
        own = self._db.execute("SELECT coalesce(sum(length(body)), 0) FROM entries WHERE tenant = ?", (account,))
        sql = """SELECT coalesce(sum(length(body)), 0) FROM bodies WHERE key IN (SELECT items.body FROM items
            JOIN entries ON entries.key = items.entry WHERE tenant = ?)"""
        return int(own[0][0]) + int(self._db.execute(sql, (account,))[0][0])

    def _keys(self, where: str, *values: object) -> list[int]:
        return [row[0] for row in self._db.execute(f"SELECT key FROM entries WHERE {where}", values)]

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._drop_items("entry = ?", key)
            for table in ("runs", "events"):
                self._db.execute(f"DELETE FROM {table} WHERE id = (SELECT id FROM entries WHERE key = ?)", (key,))
            self._db.execute("DELETE FROM entries WHERE key = ?", (key,))

    def _drop_items(self, where: str, *values: object) -> set[int]:
        held = {row[0] for row in self._db.execute(f"SELECT body FROM items WHERE {where}", values)}
        self._db.execute(f"DELETE FROM items WHERE {where}", values)
        self._drop_unused(held)
        return held

    def _drop_unused(self, bodies: Iterable[int]) -> None:
        sql = "DELETE FROM bodies WHERE key = ? AND NOT EXISTS (SELECT 1 FROM items WHERE body = bodies.key)"
        self._db.execute_many(sql, [(body,) for body in bodies])

    def _value(self, sql: str) -> int:
        return int(self._db.execute(sql)[0][0])


def _first(rows: list[Any]) -> Any:
    return rows[0] if rows else None
