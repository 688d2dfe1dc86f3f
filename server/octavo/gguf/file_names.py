"""Interpret names of GGUF files: models, parts of one model, and the quantisation of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from octavo.errors import ModelError

_PART = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
# Towers for images, statistics of quantisation, and layers that guess for a model.
_COMPANION = re.compile(r"mmproj|imatrix|^(?:mtp|eagle3|dflash|dspark)-", re.IGNORECASE)
_MAX_PARTS = 1000
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # that are taken where nobody has chosen, as llama.cpp does


def all_parts(name: str) -> list[str]:
    """The names of all files of the model that ``name`` is a file of, first part first; itself where it is whole."""
    match = _PART.fullmatch(name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count <= _MAX_PARTS:
        return [name]
    return [f"{match['prefix']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Select the models among ``names``: the first part's name (existing or not) -> the existing parts. Vision
    encoders, statistics and draft layers are not models."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _COMPANION.search(name.rpartition("/")[2]):
            found.setdefault(all_parts(name)[0], []).append(name)
    return found


def quantised_as(names: Iterable[str], quant: str) -> list[str]:
    """Select the models whose name ends with the word ``quant`` (model.Q4_K_M.gguf, model-q4_k_m-00001-of-00002.gguf),
    or whose folder has that name."""
    word = re.compile(rf"(?:^|[.\-_/]){re.escape(quant)}$", re.IGNORECASE)
    return [name for name in names if word.search(_stem(name)) or _folder(name).lower() == quant.lower()]


def by_default(models: Sequence[str]) -> str | None:
    """Choose the default of several models; None if the user has to choose."""
    for quant in DEFAULT_QUANTS:
        if len(found := quantised_as(models, quant)) == 1:
            return found[0]
    return None


def check_whole(models: Mapping[str, Sequence[str]], model: str, where: str) -> list[str]:
    """All parts of ``model`` of `models_of`. Raises ModelError where ``where`` lacks some."""
    parts = all_parts(model)
    if missing := [name for name in parts if name not in models.get(model, ())]:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"{where} lacks {len(missing)} of {len(parts)} parts of a model: {shown}; fetch them, too")
    return parts


def _stem(name: str) -> str:
    match = _PART.fullmatch(name)
    return match["prefix"] if match else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def _folder(name: str) -> str:
    return Path(name).parent.name
