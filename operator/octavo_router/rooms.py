"""Find out how many requests each replica handles at once: its engine says so on its management port."""

from __future__ import annotations

import asyncio
import math
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

METRIC = "octavo:max_num_seqs"
_SECONDS, _TIMEOUT_SECONDS, _THREADS = 0.25, 2.0, 8
_TRIES = 8  # then a replica that does not answer is taken for one that does not tell
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def follow(
    replicas: Callable[[], Iterable[str]], port: int, on_change: Callable[[Mapping[str, float]], None]
) -> None:
    """Calls `on_change` with the rooms by replica whenever one is new, for ever; infinite: it does not tell. Each is
    asked until it answers, and no more while it is there: an engine does not change it. `port`: of the replicas'
    management, 0: as their API's."""
    pool = ThreadPoolExecutor(_THREADS, "rooms")
    known: dict[str, float] = {}
    tries: Counter[str] = Counter()
    try:
        while True:
            names = set(replicas())
            known = {name: room for name, room in known.items() if name in names}
            tries = Counter({name: many for name, many in tries.items() if name in names})
            if new := sorted(names - known.keys()):
                tries.update(new)
                reading = (asyncio.get_running_loop().run_in_executor(pool, _read, name, port) for name in new)
                for name, room in zip(new, await asyncio.gather(*reading), strict=True):
                    if room is not None or tries[name] >= _TRIES:
                        known[name] = math.inf if room is None else room
                on_change(dict(known))
            await asyncio.sleep(_SECONDS)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read(replica: str, port: int) -> float | None:
    """The room of one replica; None: it does not answer."""
    address = f"{replica.rpartition(':')[0]}:{port}" if port else replica
    url = f"http://{address}/metrics?{urlencode({'name[]': METRIC})}"
    try:
        with _opener.open(url, timeout=_TIMEOUT_SECONDS) as page:
            return parse(page.read().decode())
    except (OSError, ValueError):
        return None


def parse(page: str) -> float:
    """Return the number for all models of the engine together; infinite if it tells of none. Raises ValueError."""
    families = text_string_to_metric_families(page)
    found = [one.value for family in families for one in family.samples if one.name == METRIC]
    return sum(found) if found else math.inf
