"""Find out which replicas have which LoRA adapters: each replica is asked on its management port."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_SECONDS, _MAX_SECONDS = 1.0, 7.0  # between two readings
_SHARE = 4  # readings take no more than a fifth of the time
_TIMEOUT_SECONDS, _THREADS, _MAX_BYTES = 2.0, 8, 1 << 20
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Holders = Mapping[str, frozenset[str]]  # replicas by the names of adapters


def holders(found: Mapping[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    """Replicas by adapter, from adapters by replica."""
    out: dict[str, set[str]] = {}
    for replica, names in found.items():
        for name in names:
            out.setdefault(name, set()).add(replica)
    return {name: frozenset(replicas) for name, replicas in out.items()}


def parse(answer: Any) -> frozenset[str]:
    """The adapters that requests may name, from the body of /v1/adapters. Raises ValueError."""
    try:
        return frozenset(str(one["name"]) for one in answer["adapters"] if one["served"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no adapters: {error!r}") from error


async def follow(replicas: Callable[[], Iterable[str]], port: int, on_change: Callable[[Holders], None]) -> None:
    """Calls `on_change` with every other state, for ever. `port`: of the replicas' management, 0: as their API's. A
    replica without LoRA is asked once; one that does not answer keeps what it had."""
    pool = ThreadPoolExecutor(_THREADS, "adapters")
    known: dict[str, frozenset[str]] = {}
    without: set[str] = set()
    last: Holders = {}
    try:
        while True:
            began, names = time.monotonic(), set(replicas())
            without &= names
            asked = sorted(names - without)
            reading = (asyncio.get_running_loop().run_in_executor(pool, _read, name, port) for name in asked)
            for name, found in zip(asked, await asyncio.gather(*reading), strict=True):
                if found is None:
                    without.add(name)
                elif isinstance(found, frozenset):
                    known[name] = found
            known = {name: found for name, found in known.items() if name in names - without}
            if (now := holders(known)) != last:
                last = now
                on_change(now)
            spent = time.monotonic() - began
            await asyncio.sleep(min(max(_SECONDS, _SHARE * spent), _MAX_SECONDS))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read(replica: str, port: int) -> frozenset[str] | Exception | None:
    """The adapters of one replica; None: it has no LoRA; an error: it does not tell."""
    address = f"{replica.rpartition(':')[0]}:{port}" if port else replica
    try:
        with _opener.open(f"http://{address}/v1/adapters", timeout=_TIMEOUT_SECONDS) as answer:
            return parse(json.loads(answer.read(_MAX_BYTES)))
    except urllib.error.HTTPError as error:
        return None if error.code in (404, 405) else error
    except (OSError, ValueError) as error:
        return error
