"""Patterns of module names in descriptions of quantised checkpoints; no torch."""

from __future__ import annotations

import re

from octavo.errors import ModelError


def compile_pattern(pattern: str, field: str, exact: bool = False) -> re.Pattern[str]:
    """Compile a pattern to search for in a module's name: a name as a whole or in part (at dots), one with ``*``, or a
    regular expression after ``re:``; ``exact``: the whole name. Raises ModelError, which names ``field``."""
    if pattern.startswith("re:"):
        try:
            return re.compile(rf"^(?:{pattern[3:]})")
        except re.error as error:
            raise ModelError(f"{field}: {pattern!r} is no regular expression ({error}); correct the file") from None
    name = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(rf"^{name}$" if exact else rf"(^|\.){name}(\.|$)")
