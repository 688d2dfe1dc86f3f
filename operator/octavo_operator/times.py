"""Timestamps of the Kubernetes API."""

from __future__ import annotations

from datetime import datetime


def parse_time(text: str) -> float:
    """Seconds since 1970, from RFC 3339."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
