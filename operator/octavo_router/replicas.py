"""Find the replicas that Envoy would send requests to: read from its admin API, which listens on loopback."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
from collections.abc import Callable
from typing import Any

Replicas = dict[str, set[str]]  # by cluster: "ADDRESS:PORT"

_SECONDS = 0.25  # between two readings while a pool has no replica, or something has just changed
_SETTLED_SECONDS = 1.0  # otherwise: Envoy's own health checks are no more often, and it retries elsewhere
_SHARE = 20  # in any case readings take no more than a twentieth of the time
logger = logging.getLogger(__name__)


def healthy(clusters: dict[str, Any]) -> Replicas:
    """Parse the answer of /clusters?format=json: return for each pool the replicas that are not left out for any
    reason. Names that begin with "_" are the router's own clusters."""
    found: Replicas = {}
    for cluster in clusters.get("cluster_statuses", []):
        if cluster["name"].startswith("_"):
            continue
        pool = found.setdefault(cluster["name"], set())
        for host in cluster.get("host_statuses", []):
            flags = dict(host.get("health_status", {}))
            known = flags.pop("eds_health_status", "HEALTHY") == "HEALTHY"
            if known and not any(flags.values()):
                address = host["address"]["socket_address"]
                name = address["address"]
                pool.add(f"[{name}]:{address['port_value']}" if ":" in name else f"{name}:{address['port_value']}")
    return found


def read(admin: http.client.HTTPConnection) -> Replicas:
    """Asks Envoy; the connection is kept. Raises OSError, ValueError, HTTPException."""
    try:
        admin.request("GET", "/clusters?format=json")
        return healthy(json.load(admin.getresponse()))
    except BaseException:
        admin.close()  # the next reading makes another one
        raise


async def follow(port: int, on_change: Callable[[Replicas], None]) -> None:
    """Calls `on_change` with every other state, for ever. Without an answer from Envoy the last state holds."""
    admin = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    last: Replicas | None = None
    failing = False
    while True:
        began, seconds = time.thread_time(), _SECONDS
        try:
            found = await asyncio.to_thread(read, admin)
            if failing:
                logger.info("Envoy answers again")
            failing = False
            if found != last:
                on_change(found)
                last = found
            elif all(found.values()):
                seconds = _SETTLED_SECONDS
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            if not failing:
                logger.warning("Envoy's list of replicas cannot be read: %s", error)
            failing = True
        await asyncio.sleep(max(seconds, _SHARE * (time.thread_time() - began)))
