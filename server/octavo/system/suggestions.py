"""\"Did you mean\": suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable

_MIN_SIMILARITY = 0.6  # 1: equal


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing where no known name is near."""
    best = nearest(name, known)
    return f"; did you mean {best}?" if best is not None else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The most similar known name, None if none is similar. Case, - and _ do not count; prefixes count as similar."""
    from difflib import SequenceMatcher  # imported only when a name is wrong

    matcher = SequenceMatcher(b=_plain(name))
    best, score = None, _MIN_SIMILARITY
    for one in known:
        matcher.set_seq1(_plain(one))
        whole = matcher.ratio()
        matcher.set_seq1(_plain(one)[: len(name)])
        found = max(whole, 0.9 * matcher.ratio() if len(name) > 2 else 0.0)
        if found > score:
            best, score = one, found
    return best


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")
