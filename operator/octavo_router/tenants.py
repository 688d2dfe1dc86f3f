"""Follows what limits tenants: the file of the limits, and the tokens that engines have counted."""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

from octavo_router.admission import Tenants
from octavo_router.limits import Account, read_limits

METRIC = "octavo:tenant_tokens"
_FILE_SECONDS, _IDLE_SECONDS, _ENGINES_SECONDS, _MAX_SECONDS = 1.0, 0.25, 2.0, 7.0
_SHARE = 4  # readings take no more than a fifth of the time
_TIMEOUT_SECONDS, _THREADS = 2.0, 8
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
logger = logging.getLogger(__name__)


async def follow_limits(path: Path, tenants: Tenants, on_change: Callable[[], None]) -> None:
    """Reads the file again whenever it changes, for ever. One that cannot be read leaves the last limits in force."""
    last: str | None = None
    while True:
        try:
            if (text := path.read_text()) != last:
                last = text
                tenants.limits, tenants.routers = read_limits(text)
                on_change()
        except (OSError, ValueError) as error:
            if last is None or not isinstance(error, OSError):
                logger.warning("limits of tenants: %s", error)
        await asyncio.sleep(_FILE_SECONDS)


async def follow_usage(
    tenants: Tenants, replicas: Callable[[], Iterable[str]], port: int, on_read: Callable[[bool], None]
) -> None:
    """Reads the counters of all replicas, for ever, while a tenant's tokens are limited. `port`: of their metrics, 0:
    the same as their API's."""
    pool = ThreadPoolExecutor(_THREADS, "usage")
    try:
        while True:
            began = time.monotonic()
            if tenants.limits_tokens:
                names = sorted(set(replicas()))
                reading = (asyncio.get_running_loop().run_in_executor(pool, _read, name, port) for name in names)
                for name, found in zip(names, await asyncio.gather(*reading), strict=True):
                    on_read(found is not None)
                    if found is not None:
                        tenants.usage.update(name, found, time.monotonic())
                spent = time.monotonic() - began
                await asyncio.sleep(min(max(_ENGINES_SECONDS, _SHARE * spent), _MAX_SECONDS))
            else:
                await asyncio.sleep(_IDLE_SECONDS)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read(replica: str, port: int) -> dict[Account, float] | None:
    """The counters of one replica; None: it does not tell them."""
    address = f"{replica.rpartition(':')[0]}:{port}" if port else replica
    try:
        url = f"http://{address}/metrics?{urlencode({'name[]': f'{METRIC}_total'})}"
        with _opener.open(url, timeout=_TIMEOUT_SECONDS) as answer:
            return parse(answer.read().decode())
    except (OSError, ValueError):
        return None


def parse(page: str) -> dict[Account, float]:
    """Tokens by account, of prompts and answers together, of all models of the engine."""
    found: dict[Account, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{METRIC}_total":
                account = sample.labels.get("tenant", ""), sample.labels.get("account", "")
                found[account] = found.get(account, 0.0) + sample.value
    return found
