"""Times as the API server writes them."""

from __future__ import annotations

from datetime import datetime


def parse_time(text: str) -> float:
    """Seconds since 1970."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
