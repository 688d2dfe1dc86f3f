"""The tables of stored responses: what is put is what comes back, to its owner alone, within limits."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.storage.database import SqliteDatabase
from octavo.entrypoints.storage.places import default_path, file_system_of, open_store
from octavo.entrypoints.storage.runs import RunTables
from octavo.entrypoints.storage.store import Store, StoreError
from octavo.entrypoints.storage.tables import Entry, FullError, StoredItem, Tables, account_of
from octavo.errors import ConfigError
from octavo.metrics.stats import Tenant

ONE, OTHER = Tenant("one", "a"), Tenant("other", "b")
BODIES = st.lists(st.binary(max_size=40), max_size=5)


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def tables(
    path: str = ":memory:", max_bytes: int = 1 << 30, lifetime: int = 0, clock: Clock | None = None
) -> RunTables:
    return RunTables(SqliteDatabase(path), max_bytes, lifetime, clock or Clock())


def entry(name: str, tenant: Tenant | None = None, size: int = 1) -> Entry:
    return Entry(name, account_of(tenant), 1_000, "completed", os.urandom(size))


@given(st.lists(st.tuples(BODIES, BODIES), min_size=1, max_size=6), st.data())
def test_what_is_put_comes_back_until_it_is_deleted_and_leaves_nothing(turns, data) -> None:
    """Whatever items responses share, in whatever order they are deleted."""
    kept = tables()
    entries = {}
    for number, (asked, said) in enumerate(turns):
        name = f"resp_{number}"
        output = [StoredItem(body, f"msg_{number}_{at}") for at, body in enumerate(said)]
        entries[name] = Entry(name, "", number, "completed", b"{}", [StoredItem(body) for body in asked], output)
        kept.put(entries[name])
    for name in data.draw(st.permutations(list(entries))):
        for left, whole in entries.items():
            assert kept.get(left, None) == whole
            assert all(kept.item(item.id, None) == item.body for item in whole.output)
        gone = entries.pop(name)
        assert kept.delete(name, None) and not kept.delete(name, None)
        assert kept.get(name, None) is None and not any(kept.item(item.id, None) for item in gone.output)
    assert kept.count() == 0 and not kept._db.execute("SELECT * FROM bodies")


def test_items_that_turns_repeat_are_stored_once(tmp_path: Path) -> None:
    """A conversation of 100 turns of 10 kB takes little more than 1 MB, though its responses contain 50 MB."""
    kept = tables(str(tmp_path / "r.db"))
    items = [StoredItem(os.urandom(10_000)) for _ in range(100)]
    for number in range(100):
        kept.put(Entry(f"resp_{number}", "", number, "completed", b"{}", items[:number], items[number : number + 1]))
    assert kept._db.used_bytes() < 2_000_000
    whole = kept.get("resp_99", None)
    assert whole is not None and [*whole.input, *whole.output] == items


def test_other_tenants_find_nothing() -> None:
    kept = tables()
    output = [StoredItem(b"said", "msg_1")]
    kept.put(Entry("resp_1", account_of(ONE), 1, "completed", b"{}", [], output))
    assert kept.get("resp_1", OTHER) is None and kept.item("msg_1", OTHER) is None and not kept.delete("resp_1", OTHER)
    assert kept.get("resp_1", None) is not None, "who knows the id and comes by no gateway may have it"
    assert kept.get("resp_1", ONE) is not None and kept.item("msg_1", ONE) == b"said" and kept.delete("resp_1", ONE)


def test_the_oldest_makes_room() -> None:
    clock = Clock()
    kept = tables(max_bytes=1 << 20, clock=clock)
    kept.put(entry("conv_1"))
    for number in range(60):
        kept.put(entry(f"resp_{number}", size=50_000))
        clock.now += 1
        kept.append("conv_1", None, [StoredItem(b"%d" % number, f"msg_{number}")])
    found = [number for number in range(60) if kept.get(f"resp_{number}", None) is not None]
    used = kept.get("conv_1", None)
    assert used is not None and len(used.output) == 60, "what goes on is not old"
    assert 2 < len(found) < 21 and found == list(range(60 - len(found), 60))
    assert kept._db.used_bytes() <= 1 << 20
    with pytest.raises(FullError):
        kept.put(entry("resp_large", size=2 << 20))
    assert kept.count() == len(found) + 1, "what is too large costs the others nothing"


@given(st.lists(st.tuples(st.sampled_from([None, ONE, OTHER]), st.integers(1, 400), st.booleans()), max_size=40))
def test_a_tenant_makes_room_for_itself_alone(steps) -> None:
    """Whoever stores what, in entries and in items: nobody is above the limit for long, and nobody else loses."""
    limit, kept = 4_000, Tables(SqliteDatabase(":memory:"), 1 << 30, 0, Clock(), tenant_bytes=4_000)
    stored, counts = dict[str, list[str]](), dict[str, int]()
    for number, (tenant, size, as_item) in enumerate(steps):
        account, body = account_of(tenant), os.urandom(size)
        items = [StoredItem(body)] if as_item else []
        kept.put(Entry(f"resp_{number}", account, 1, "completed", b"" if as_item else body, items))
        stored.setdefault(account, []).append(f"resp_{number}")
        for owner, names in stored.items():
            left = [name for name in names if kept.get(name, None) is not None]
            assert left == names[len(names) - len(left) :], "the oldest have made room"
            assert left == names or owner == account or len(left) == counts[owner]
            if owner:
                assert kept._bytes_of(owner) <= limit
            else:
                assert left == names, "who comes without a gateway has no limit"
        counts = {owner: sum(kept.get(n, None) is not None for n in names) for owner, names in stored.items()}


def test_an_entry_above_the_limit_of_its_tenant_is_refused_by_the_flag() -> None:
    kept = Tables(SqliteDatabase(":memory:"), 1 << 30, 0, Clock(), tenant_bytes=1_000)
    kept.put(entry("resp_small", ONE, 100))
    with pytest.raises(FullError, match="--responses-max-bytes-per-tenant"):
        kept.put(entry("resp_large", ONE, 2_000))
    assert kept.get("resp_small", ONE) and kept.get("resp_large", ONE) is None, "nothing has changed"
    kept.put(entry("resp_large", None, 2_000))
    running = Entry("resp_run", account_of(ONE), 1, "in_progress", os.urandom(800))
    kept.put(running)
    with pytest.raises(FullError):
        kept.put(entry("resp_more", ONE, 900))
    assert kept.get("resp_run", ONE) == running, "what runs makes no room"


def test_servers_that_share_a_file_keep_the_limit_of_a_tenant_about(tmp_path: Path) -> None:
    path = str(tmp_path / "shared.db")
    both = [Tables(SqliteDatabase(path), 1 << 30, 0, Clock(), tenant_bytes=100_000) for _ in range(2)]
    for number in range(300):
        both[number % 2].put(entry(f"resp_{number}", ONE, 1_000))
    assert both[0]._bytes_of(account_of(ONE)) < 100_000 * 1.25
    assert both[1].get("resp_299", ONE) and not both[1].get("resp_0", ONE)


def test_entries_expire() -> None:
    clock = Clock()
    kept = tables(lifetime=10, clock=clock)
    kept.put(entry("resp_1"))
    clock.now += 9
    kept.put(entry("resp_2"))
    assert kept.get("resp_1", None) is not None
    clock.now += 1
    assert kept.get("resp_1", None) is None and kept.count() == 2
    kept.expire()
    assert kept.count() == 1 and kept.get("resp_2", None) is not None


def test_what_is_deleted_is_gone_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    kept = tables(str(path))
    secret = zlib.compress(b"a secret of somebody, " * 3, 1)
    kept.put(Entry("resp_1", "", 1, "completed", b"{}", [StoredItem(b"a secret of somebody, " * 3)]))
    kept._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert secret in path.read_bytes()
    kept.delete("resp_1", None)
    kept.close()
    assert secret not in path.read_bytes()


def test_a_disk_that_is_full_changes_nothing_and_is_named(tmp_path: Path) -> None:
    asyncio.run(_fill_a_disk(tmp_path))


async def _fill_a_disk(tmp_path: Path) -> None:
    kept = tables(str(tmp_path / "r.db"))
    store = Store(kept, True)
    await store.run(lambda tables: tables.put(entry("resp_1")))
    kept._db.execute(f"PRAGMA max_page_count = {kept._db.value('PRAGMA page_count') + 2}")
    with pytest.raises(StoreError, match=r"--responses-store.* full") as raised:
        await store.run(lambda tables: tables.put(entry("resp_2", size=100_000)))
    assert raised.value.status == 503
    kept._db.execute("PRAGMA max_page_count = 100000")
    with pytest.raises(StoreError, match="full"):  # for a moment nobody tries again
        await store.run(lambda tables: tables.count())
    store._failed = None
    assert await store.run(lambda tables: tables.count()) == 1
    store.close()


def test_files_of_a_newer_version_and_no_files_at_all_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match=r"responses_store .* newer version \(tables 99"):
        open_store(ServerArgs(responses_store=str(path)))
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    for wrong in (text, tmp_path, Path("/proc/none/r.db")):
        with pytest.raises(ConfigError, match=r'responses_store .* cannot be used: .*"memory"'):
            open_store(ServerArgs(responses_store=str(wrong)))


def test_the_default_is_a_file_of_the_users_alone_or_memory(tmp_path: Path, caplog) -> None:
    assert default_path({"HOME": "/home/me"}) == Path("/home/me/.local/state/octavo/responses.db")
    assert default_path({"HOME": "/home/me", "XDG_STATE_HOME": "relative"}).is_relative_to("/home/me")
    assert default_path({}) is None
    store = open_store(ServerArgs(), {"XDG_STATE_HOME": str(tmp_path)})
    assert store.is_lasting
    path = tmp_path / "octavo" / "responses.db"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.close()
    store = open_store(ServerArgs(), {"XDG_STATE_HOME": "/proc/none"})
    assert not store.is_lasting and "responses are kept in memory" in caplog.text
    store.close()


MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /mnt/my\\040share rw,relatime shared:2 - nfs4 server:/export rw
31 30 0:41 / /mnt/my\\040share/local rw - tmpfs tmpfs rw
32 22 0:42 / /mnt/buckets rw master:3 - fuse.mountpoint-s3 bucket rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/mnt/my share/a/b", "nfs4"),
        ("/mnt/my share/local/a", "tmpfs"),
        ("/mnt/my shared", "ext4"),
        ("/mnt/buckets", "fuse.mountpoint-s3"),
    ],
)
def test_file_systems_are_those_of_the_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_network_file_systems_are_refused_by_name(tmp_path: Path, monkeypatch, caplog) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"30 22 0:40 / {tmp_path} rw - nfs4 server:/export rw\n")
    monkeypatch.setattr("octavo.entrypoints.storage.places._MOUNTS", mounts)
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\)"):
        open_store(ServerArgs(responses_store=str(tmp_path / "r.db")))
    assert not (tmp_path / "r.db").exists()
    store = open_store(ServerArgs(), {"XDG_STATE_HOME": str(tmp_path)})
    assert not store.is_lasting and "nfs4" in caplog.text
    store.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("responses_store", "mysql://host/db"),
        ("responses_store", ""),
        ("responses_ttl", -1),
        ("responses_max_bytes", 1_000),
        ("responses_max_bytes_per_tenant", 1_000),
    ],
)
def test_wrong_options_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        ServerArgs(**{field: value}).check()  # type: ignore[arg-type]
