"""Find the field managers of fields, from `metadata.managedFields`.

Server-side apply restores our fields but keeps what others added: a container, a variable, a node selector. The
operator owns the whole spec of its objects, so such additions are found here, to be removed. Labels and annotations
are shared, those of pod templates too (`kubectl rollout restart` writes one).
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator
from typing import Any

Json = Any
Path = tuple[str, ...]

_SHARED = (("f:spec", "f:template", "f:metadata", "f:annotations"), ("f:spec", "f:template", "f:metadata", "f:labels"))


def foreign_additions(live: Json, manager: str) -> list[str]:
    """JSON pointers of what managers other than `manager` added to `live["spec"]`, deepest and last first."""
    applied: set[Path] = set()
    updated: set[Path] = set()  # by our own removals, to which the API server may add defaults
    others: set[Path] = set()
    for entry in live.get("metadata", {}).get("managedFields") or []:
        if entry.get("subresource"):
            continue
        paths = _leaves(entry.get("fieldsV1") or {}, ())
        if entry.get("manager") != manager:
            others.update(path for path in paths if path[0] == "f:spec")
        elif entry.get("operation") == "Apply":
            for path in paths:
                applied.update(path[:length] for length in range(1, len(path) + 1))
        else:
            updated.update(path for path in paths if path[0] == "f:spec")
    found = set()
    for path in others | updated:
        if path in applied or any(path[: len(kept)] == kept for kept in _SHARED):
            continue
        added = next(path[:length] for length in range(1, len(path) + 1) if path[:length] not in applied)
        if path in updated and added[-1].startswith("f:"):
            continue  # a default; items of lists are never defaults
        if len(added) > 1 and (pointer := _pointer(added, live)) is not None:
            found.add(pointer)
    tops = [p for p in found if not any(p[:length] in found for length in range(1, len(p)))]
    return ["".join(f"/{_escape(part)}" for part in pointer) for pointer in sorted(tops, key=_order, reverse=True)]


def is_allowed(pointer: str, live: Json, allowed: Iterable[str]) -> bool:
    """True if one of the paths of spec.foreignFields covers an addition at `pointer`: the same path or one above it,
    list items by name (or index), `*` for any text within a segment."""
    found = _spellings(pointer, live)
    for path in allowed:
        segments = path.split("/")[1:]
        if len(segments) <= len(found) and all(
            any(fnmatch.fnmatchcase(spelling, segment) for spelling in spellings)
            for segment, spellings in zip(segments, found, strict=False)
        ):
            return True
    return False


def _spellings(pointer: str, live: Json) -> list[tuple[str, ...]]:
    """Each segment of a JSON pointer, and for the index of a list item its name as well."""
    out: list[tuple[str, ...]] = []
    here = live
    for segment in pointer.split("/")[1:]:
        part = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list):
            here = here[int(part)] if part.isdigit() and int(part) < len(here) else None
            name = here.get("name") if isinstance(here, dict) else None
            out.append((segment, str(name)) if name else (segment,))
        else:
            here = here.get(part) if isinstance(here, dict) else None
            out.append((segment,))
    return out


def other_managers(live: Json, manager: str) -> list[str]:
    """Managers other than `manager` that have set something in `live["spec"]`."""
    entries = live.get("metadata", {}).get("managedFields") or []
    of_spec = [one for one in entries if not one.get("subresource") and "f:spec" in one.get("fieldsV1", {})]
    return sorted({one.get("manager", "") for one in of_spec} - {manager})


def _leaves(fields: Json, path: Path) -> Iterator[Path]:
    inner = [key for key in fields if key != "."]
    if path and (not inner or "." in fields):
        yield path
    for key in inner:
        yield from _leaves(fields[key], (*path, key))


def _pointer(path: Path, live: Json) -> tuple[str | int, ...] | None:
    """The path in the object of a path of managedFields; None when it is no longer there."""
    out: list[str | int] = []
    here = live
    for part in path:
        kind, _, rest = part.partition(":")
        if kind == "f":
            if not isinstance(here, dict) or rest not in here:
                return None
            out.append(rest)
            here = here[rest]
            continue
        if not isinstance(here, list):
            return None
        wanted = json.loads(rest)
        if kind == "i":
            index = wanted
        elif kind == "k":
            index = _find(
                here, lambda item, w=wanted: isinstance(item, dict) and all(item.get(k) == v for k, v in w.items())
            )
        else:
            index = _find(here, lambda item, w=wanted: item == w)
        if index is None or index >= len(here):
            return None
        out.append(index)
        here = here[index]
    return tuple(out)


def _find(items: list[Json], fits: Any) -> int | None:
    return next((index for index, item in enumerate(items) if fits(item)), None)


def _order(pointer: tuple[str | int, ...]) -> tuple[tuple[int, int, str], ...]:
    return tuple((1, part, "") if isinstance(part, int) else (0, 0, part) for part in pointer)


def _escape(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")
