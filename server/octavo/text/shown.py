"""Refused values as error messages repeat them."""

from __future__ import annotations

from typing import Any

MAX_SHOWN = 200  # characters


def shown(value: Any) -> str:
    """A value as JSON for a message, truncated if long."""
    if isinstance(value, (dict, list)) and len(value) > 20:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    try:
        import msgspec  # which `LLM` can do without: errors are rare

        text = msgspec.json.encode(_shortened(value)).decode()
    except (ImportError, TypeError, ValueError, OverflowError, RecursionError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _shortened(value: Any, depth: int = 3) -> Any:
    """The value without most of its long texts: encoding an image that is shown to nobody would hold up everybody."""
    if isinstance(value, str):
        return value[: MAX_SHOWN + 1]
    if hasattr(value, "begin"):  # a text in pieces
        return value.begin(MAX_SHOWN + 1)
    if depth and isinstance(value, dict):
        return {_shortened(key): _shortened(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list):
        return [_shortened(item, depth - 1) for item in value[: MAX_SHOWN + 1]]
    return value
