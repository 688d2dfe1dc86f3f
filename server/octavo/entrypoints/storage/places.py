"""Choose where a server keeps responses: a file, a database, or its memory."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.storage.database import SqliteDatabase
from octavo.entrypoints.storage.postgres import PostgresDatabase
from octavo.entrypoints.storage.runs import RunTables
from octavo.entrypoints.storage.store import Store
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

MEMORY = "memory"
POSTGRES = ("postgresql://", "postgres://")
DEFAULT_BYTES, DEFAULT_MEMORY_BYTES = 1 << 30, 64 << 20
# File systems of networks, on which locks and shared memory do not hold what SQLite needs of them.
_NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "9p",
        "ceph",
        "glusterfs",
        "gpfs",
        "lustre",
        "beegfs",
        "orangefs",
        "pvfs2",
        "ocfs2",
        "gfs2",
        "davfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "fuse.cephfs",
        "fuse.s3fs",
        "fuse.mountpoint-s3",
        "fuse.gcsfuse",
        "fuse.blobfuse",
        "fuse.blobfuse2",
        "fuse.rclone",
        "fuse.juicefs",
        "fuse.JuiceFS",
        "fuse.davfs",
        "fuse.goofys",
        "fuse.seaweedfs",
        "fuse.weed",
        "fuse.nfs",
        "fuse.smbnetfs",
        "fuse.curlftpfs",
        "fuse.moosefs",
        "fuse.mfs",
        "fuse.lizardfs",
    ]
)
_MOUNTS = Path("/proc/self/mountinfo")


def open_store(args: ServerArgs, environment: Mapping[str, str] = os.environ) -> Store:
    """Open the store that the options ask for. Without a path a file in the user's state folder, or memory where none
    can be written there. Raises ConfigError."""
    given = args.responses_store
    if given == MEMORY:
        return _in_memory(args)
    if given is not None and given.startswith(POSTGRES):
        return _in_postgres(given, args)
    path = default_path(environment) if given is None else Path(given)
    if path is None:
        logger.warning("responses are kept in memory, until the server ends: the user has no folder (HOME)")
        return _in_memory(args)
    try:
        return _in_file(path, args)
    except ConfigError as error:
        if given is not None:
            raise
        logger.warning("responses are kept in memory, until the server ends: %s", error)
        return _in_memory(args)


def default_path(environment: Mapping[str, str]) -> Path | None:
    """The file of a server that is given none; None: its user has no folder."""
    state, home = environment.get("XDG_STATE_HOME", ""), environment.get("HOME", "")
    if not state.startswith("/"):
        if not home.startswith("/"):
            return None
        state = f"{home}/.local/state"
    return Path(state) / "octavo" / "responses.db"


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that a path lies on; ``mounts`` is a text as of /proc/self/mountinfo. Empty: not
    known."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        left, found, right = line.partition(" - ")
        fields = left.split(" ")
        if not found or len(fields) < 5:
            continue
        point = fields[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), right.split(" ")[0]
    return kind


def _in_postgres(url: str, args: ServerArgs) -> Store:
    database = PostgresDatabase(url)
    try:
        tables = RunTables(database, 0, *_limits(args))
    except database.errors as error:  # whose words have no password
        raise ConfigError(
            f"responses_store names a PostgreSQL database that does not work: {str(error).strip()}; correct the "
            "address, or start the database"
        ) from None
    logger.info("responses are kept in PostgreSQL")
    return Store(tables, is_lasting=True, is_shared=True)


def _in_memory(args: ServerArgs) -> Store:
    most = args.responses_max_bytes or DEFAULT_MEMORY_BYTES
    return Store(RunTables(SqliteDatabase(":memory:"), most, *_limits(args)), is_lasting=False)


def _limits(args: ServerArgs) -> tuple[int, Callable[[], float], int]:
    """The lifetime of entries, the clock, and the bytes of each tenant."""
    return args.responses_ttl, time.time, args.responses_max_bytes_per_tenant or 0


def _in_file(path: Path, args: ServerArgs) -> Store:
    try:
        path = path.expanduser().resolve()
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kind = file_system_of(folder, _MOUNTS.read_text(errors="replace") if _MOUNTS.exists() else "")
        if kind in _NETWORK:
            raise ConfigError(
                f"responses_store {str(path)!r} lies on a network file system ({kind}), where SQLite loses data; name "
                'a file on a disk of this machine, or "memory"'
            )
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # prompts are nobody else's to read
        most = args.responses_max_bytes or DEFAULT_BYTES
        tables = RunTables(SqliteDatabase(str(path)), most, *_limits(args))
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, sqlite3.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f'responses_store {str(path)!r} cannot be used: {why}; name a file that can be written, or "memory"'
        ) from None
    logger.info("responses are kept in %s", path)
    return Store(tables, is_lasting=True)
