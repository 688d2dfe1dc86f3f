"""``kv_events_config``, vLLM's name and keys: whether and where the engine publishes what its prefix cache holds."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import fields
from typing import Any

from octavo.errors import ConfigError
from octavo.interface.engine_config import KVEventsConfig
from octavo.system.suggestions import did_you_mean

_TCP = re.compile(r"tcp://(?P<host>\[[^\[\]]*\]|[^:/\[\]]+):(?P<port>\d{1,5})")
_NONE_IS_DEFAULT = ("publisher", "replay_endpoint")


def parse_kv_events_config(values: Any) -> KVEventsConfig:
    """Check a JSON object as it was given; None: no events. Raises ConfigError."""
    if values is None:
        return KVEventsConfig()
    if not isinstance(values, dict):
        raise ConfigError(f"kv_events_config must be a JSON object, got {values!r}")
    values = {name: value for name, value in values.items() if value is not None or name not in _NONE_IS_DEFAULT}
    known = [field.name for field in fields(KVEventsConfig)]
    for name, value in values.items():
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ConfigError(f"kv_events_config has no key {name!r}{near or '; it has ' + ', '.join(known)}")
        _check(name, value)
    config = KVEventsConfig(**values)
    if config.replay_endpoint == config.endpoint:
        raise ConfigError(f"kv_events_config: endpoint and replay_endpoint are both {config.endpoint!r}: give two")
    return config


def _check(name: str, value: Any) -> None:
    """Raises ConfigError unless it is a value of that key."""

    def refuse(wanted: str) -> ConfigError:
        return ConfigError(f"kv_events_config: {name} must be {wanted}, got {value!r}")

    if name == "enable_kv_cache_events":
        if not isinstance(value, bool):
            raise refuse("true or false")
    elif name in ("buffer_steps", "hwm", "max_queue_size"):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise refuse("an integer from 1 to 2147483647")
    elif not isinstance(value, str):
        raise refuse("a string")
    elif name == "publisher":
        if value not in ("zmq", "null"):
            raise refuse("zmq or null")
    elif name != "topic" and not is_endpoint(value):
        raise refuse("tcp://HOST:PORT or ipc://PATH, as tcp://127.0.0.1:5557 (tcp://*:5557: every address)")


def is_endpoint(endpoint: str) -> bool:
    """True if ZeroMQ can bind or connect to it."""
    match = _TCP.fullmatch(endpoint)
    if match:
        return 1 <= int(match["port"]) < 65536
    path = endpoint.removeprefix("ipc://")
    return path != endpoint and 0 < len(path.encode()) < 108  # sun_path


def binds(endpoint: str) -> bool:
    """True if the engine binds to it, so that subscribers connect, rather than connecting to a subscriber there. As in
    vLLM, which binds to ``*``, ``::`` and sockets of files; here to addresses of this machine's loopback, too."""
    match = _TCP.fullmatch(endpoint)
    if not match:
        return True
    host = match["host"].strip("[]")
    if host in ("*", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_unspecified or address.is_loopback
