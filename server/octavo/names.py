"""\"Did you mean\": the nearest of some names to one that is not among them."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing where no known name is near. Case, - and _ do not count."""
    import difflib  # only where something is wrong

    plain = {_plain(one): one for one in known}
    asked = _plain(name)
    if not asked:
        return ""
    begins = sorted((one for one in plain if one.startswith(asked) or asked.startswith(one)), key=len)
    near = difflib.get_close_matches(asked, plain, n=1, cutoff=0.6)
    best = near[0] if near else begins[0] if begins and len(asked) > 2 else None
    return f"; did you mean {plain[best]}?" if best is not None else ""


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")
