"""\"Did you mean\": the nearest of some names to one that is not among them."""

from __future__ import annotations

from collections.abc import Iterable

_NEAR = 0.6  # of 1: the same


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing where no known name is near."""
    best = nearest(name, known)
    return f"; did you mean {best}?" if best is not None else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is nearest, if one is near. Case, - and _ do not count; a name's beginning is near to it."""
    from difflib import SequenceMatcher  # only where something is wrong

    matcher = SequenceMatcher(b=_plain(name))
    best, score = None, _NEAR
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
