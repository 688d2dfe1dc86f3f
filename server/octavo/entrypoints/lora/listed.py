"""The LoRA adapters that a file lists (--lora-list): fetched, loaded before the server is ready, and followed while it
runs. One that cannot be used keeps nobody from using the others: its state says why.

Fetching is a process of its own (`octavo fetch --adapter`), so that a slow or endless download holds up nothing here,
ends when its adapter is no longer wanted, and alone has the credentials of adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec

from octavo.entrypoints.args import ADAPTER_NAME
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.lora.served import Adapters
from octavo.errors import ConfigError, OctavoError

logger = logging.getLogger(__name__)

MAX_LISTED = 64
POLL_SECONDS = 10.0  # between looks at the file, when nobody asks for one
START_SECONDS = 120.0  # until the server is ready without those that are not loaded yet
_MAX_BYTES = 1 << 20  # of the file
_RETRY_SECONDS = (15.0, 60.0, 300.0)  # after a fetch that has failed; the last again and again
_FETCHES = 4  # at the same time
# Files of the folder with credentials, each the value of the variable of its name.
CREDENTIALS = (
    "HF_TOKEN",
    "HF_ENDPOINT",
    "OCTAVO_HTTP_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
)
LOADING, LOADED, FAILED = "loading", "loaded", "failed"
DOWNLOAD_FAILED, RANK_TOO_HIGH, WRONG_BASE, TOO_MANY, NOT_USABLE = (
    "DownloadFailed",
    "RankTooHigh",
    "WrongBase",
    "TooMany",
    "NotUsable",
)


@dataclass(frozen=True)
class Entry:
    """One adapter of the list. ``digest``: sha256:HEX of its weights' file."""

    name: str
    uri: str
    revision: str | None = None
    digest: str | None = None


class AdapterState(msgspec.Struct, omit_defaults=True):
    """The state of an adapter. ``state``: loading, loaded or failed, for which ``reason`` is a word and
    ``message`` a line; ``served``: requests may name it, perhaps as it was listed before; ``uri``, ``revision`` and
    ``expected``, the digest that its weights must have, are the list's; ``digest``: of the files that are served."""

    name: str
    state: str
    served: bool
    uri: str = ""
    revision: str = ""
    expected: str = ""
    digest: str = ""
    reason: str = ""
    message: str = ""


class AdapterReport(msgspec.Struct):
    """The body of /v1/adapters. ``listed``: SHA-256 of the list that was read last, empty without a list."""

    listed: str
    adapters: list[AdapterState]


def parse_list(text: bytes) -> list[Entry]:
    """The entries of {"adapters": [{"name": ..., "uri": ..., "revision": ..., "digest": ...}, ...]}. Raises
    ConfigError."""
    try:
        given: Any = json.loads(text)
        found = [_entry(one) for one in given["adapters"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = str(error) if isinstance(error, ConfigError) else "it is not valid"
        raise ConfigError(
            f'lora_list: {why}; write {{"adapters": [{{"name": "sql", "uri": "hf://org/name"}}]}}'
        ) from None
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"lora_list: {twice[0]!r} is listed twice")
    return found


def _entry(one: dict[str, Any]) -> Entry:
    values = {key: one.get(key) for key in ("name", "uri", "revision", "digest")}
    for key, value in values.items():
        if not isinstance(value, str) and (value is not None or key in ("name", "uri")):
            raise ConfigError(f"{key} must be a text, got {value!r:.80}")
    entry = Entry(**values)  # type: ignore[arg-type]
    if not ADAPTER_NAME.fullmatch(entry.name):
        raise ConfigError(f"name {entry.name[:80]!r} must have letters, digits and ._:@/+=~- alone")
    return entry


def reason_of(message: str) -> str:
    """The word for why an adapter that was fetched cannot be used."""
    if "max_lora_rank" in message:
        return RANK_TOO_HIGH
    return WRONG_BASE if "another model's" in message else NOT_USABLE


class _FetchError(Exception):
    """The last line of what the fetching process said."""


@dataclass
class _Listed:
    entry: Entry
    state: str = LOADING
    reason: str = ""
    message: str = ""
    task: asyncio.Task[None] | None = None
    tried: asyncio.Event = field(default_factory=asyncio.Event)  # once, with whatever outcome

    def fail(self, reason: str, message: str) -> None:
        if (self.reason, self.message) != (reason, message):
            logger.warning("adapter %s: %s: %s", self.entry.name, reason, message)
        self.state, self.reason, self.message = FAILED, reason, message

    def stop(self) -> None:
        if self.task:
            self.task.cancel()
        self.tried.set()


class AdapterList:
    """Keeps `Adapters` as the file says; what others have loaded there stays theirs."""

    def __init__(self, adapters: Adapters, path: str | None, credentials: str | None) -> None:
        """``path``: of the file; None: there is none. ``credentials``: a folder with files of names in CREDENTIALS,
        read anew for every fetch."""
        self._adapters = adapters
        self._path = Path(path) if path is not None else None
        self._credentials = Path(credentials) if credentials is not None else None
        self._listed: dict[str, _Listed] = {}
        self._digest = ""
        self._can_load = False  # not before the model is there
        self._reading = asyncio.Lock()
        self._slots = asyncio.Semaphore(_FETCHES)
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once each adapter is loaded or has failed, or after START_SECONDS. Raises ConfigError for a list that
        cannot be read: a server must not seem ready without all of its adapters."""
        self._can_load = True
        if self._path is None:
            return
        await self.reload()
        waiting = [asyncio.ensure_future(one.tried.wait()) for one in self._listed.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=START_SECONDS)
            for one in late:
                one.cancel()
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Ends what is being fetched."""
        tasks = [one.task for one in self._listed.values() if one.task] + ([self._following] if self._following else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reload(self) -> None:
        """Reads the file; returns at once, while what is new is fetched and loaded. A file that is not there changes
        nothing. Raises ConfigError, and then nothing is changed either."""
        if self._path is None or not self._can_load:
            return
        async with self._reading:
            text = await asyncio.to_thread(_read, self._path)
            digest = hashlib.sha256(text).hexdigest() if text is not None else self._digest
            if text is not None and digest != self._digest:
                self._apply(parse_list(text))
                self._digest = digest

    def report(self) -> AdapterReport:
        """Report listed adapters, then others that are served."""
        found = []
        for name, one in self._listed.items():
            served = self._adapters[name]
            digest, entry = served.adapter.digest if served else "", one.entry
            found.append(
                AdapterState(
                    name,
                    one.state,
                    served is not None,
                    entry.uri,
                    entry.revision or "",
                    entry.digest or "",
                    digest,
                    one.reason,
                    one.message,
                )
            )
        for other in self._adapters.all():
            if other.adapter.name not in self._listed:
                found.append(AdapterState(other.adapter.name, LOADED, True, digest=other.adapter.digest))
        return AdapterReport(self._digest, found)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.reload()
            except (ConfigError, OSError) as error:
                logger.warning("%s", error)

    def _apply(self, entries: list[Entry]) -> None:
        wanted = {one.name: one for one in entries}
        for name in [name for name in self._listed if name not in wanted]:
            self._listed.pop(name).stop()
            self._adapters.unload_listed(name)
        for number, (name, entry) in enumerate(wanted.items()):
            before = self._listed.pop(name, None)  # put back in the order of the list
            if before is not None and before.entry == entry:
                self._listed[name] = before
                continue
            if before is not None:
                before.stop()
            one = self._listed[name] = _Listed(entry)
            if number < MAX_LISTED:
                one.task = asyncio.create_task(self._bring(one))
            else:
                one.fail(TOO_MANY, f"{len(wanted)} adapters are listed, and {MAX_LISTED} may be: remove some")
                one.tried.set()

    async def _bring(self, one: _Listed) -> None:
        """Fetches and loads it; tries again where fetching fails."""
        for seconds in _pauses():
            try:
                async with self._slots:
                    folder = await _fetch(one.entry, self._credentials)
                await self._adapters.load_listed(one.entry.name, folder, one.entry.uri)
                one.state, one.reason, one.message = LOADED, "", ""
                logger.info("adapter %s is loaded from %s", one.entry.name, one.entry.uri)
                return
            except _FetchError as error:
                one.fail(DOWNLOAD_FAILED, str(error))
            except (APIError, OctavoError) as error:
                return one.fail(reason_of(str(error)), str(error))
            except Exception:
                logger.exception("adapter %s", one.entry.name)
                return one.fail(NOT_USABLE, "internal error; see the server's log")
            finally:
                one.tried.set()
            await asyncio.sleep(seconds)


def _pauses() -> Iterator[float]:
    return chain(_RETRY_SECONDS, repeat(_RETRY_SECONDS[-1]))


def _read(path: Path) -> bytes | None:
    """None: it is not there."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"lora_list: cannot read {path}: {error.strerror or error}") from None
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"lora_list: {path} has more than {_MAX_BYTES} bytes")
    return text


async def _fetch(entry: Entry, credentials: Path | None) -> str:
    """The folder of an adapter. Raises _FetchError."""
    command = [sys.executable, "-m", "octavo.cli.main", "fetch", "--adapter", "--quiet", "--json", entry.uri]
    for flag, value in (("--revision", entry.revision), ("--digest", entry.digest)):
        if value is not None:
            command.append(f"{flag}={value}")
    environment = {**os.environ, **await asyncio.to_thread(read_credentials, credentials)}
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == 0:
        return str(json.loads(out.splitlines()[-1])["directory"])
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    why = lines[-1].removeprefix("octavo: error: ") if lines else f"exit status {process.returncode}"
    raise _FetchError(why[:500])


def read_credentials(folder: Path | None) -> dict[str, str]:
    """Variables for fetching adapters. Other files of the folder, and unreadable ones, are left out."""
    found = {}
    for name in CREDENTIALS if folder is not None else ():
        with contextlib.suppress(OSError, ValueError):
            found[name] = (folder / name).read_text(encoding="utf-8").strip()  # type: ignore[operator]
    return found
