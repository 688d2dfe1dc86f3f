"""A model in several GGUF files, as llama-gguf-split writes them: the first one's metadata, the tensors of all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.gguf.file_names import all_parts
from octavo.gguf.header import GGUFFile
from octavo.interface.config_checks import shown_value


def open_gguf(path: str | Path) -> GGUFFile:
    """The model at ``path``: of several files any one, whose others lie beside it. Raises ModelError."""
    paths = part_paths(path)
    first = GGUFFile(paths[0])
    count = _number(first, "split.count", 1)
    if max(count, 1) != len(paths):
        raise ModelError(
            f"{first.path} is one part of {count}, its name says {len(paths)}: name the parts as they were called, "
            "PREFIX-00001-of-00003.gguf, or join them with llama-gguf-split --merge"
        )
    if count > 1:
        _join(first, [GGUFFile(other) for other in paths[1:]])
    return first


def part_paths(path: str | Path) -> list[Path]:
    """All files of the model that ``path`` is a file of, by their names alone."""
    path = Path(path)
    return [path.with_name(name) for name in all_parts(path.name)]


def _join(first: GGUFFile, others: list[GGUFFile]) -> None:
    """Put what ``others`` hold beside what ``first`` does. Raises ModelError for parts that are not of one model."""
    digests = [first.header_sha256()]
    for number, part in enumerate([first, *others]):
        if (stated := _number(part, "split.no", -1)) != number:
            raise ModelError(f"{part.path}: split.no is {stated}, by its name it is part {number}; fetch it again")
        if (count := _number(part, "split.count", 1)) != len(others) + 1:
            raise ModelError(f"{part.path} is one part of {count}, beside one of {len(others) + 1}; fetch them again")
        if number == 0:
            continue
        if twice := first.tensors.keys() & part.tensors.keys():
            raise ModelError(f"{part.path}: tensor {min(twice)!r} is in another part, too; fetch them again")
        first.add_part(part)
        digests.append(part.header_sha256())
    total = _number(first, "split.tensors.count", len(first.tensors))
    if total != len(first.tensors):
        raise ModelError(
            f"{first.path} and its other parts have {len(first.tensors)} tensors, split.tensors.count is {total}; they "
            "are not parts of one model: fetch them again"
        )
    first.digest = hashlib.sha256("".join(digests).encode()).hexdigest()


def _number(file: GGUFFile, key: str, default: int) -> int:
    value: Any = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 31:
        raise ModelError(f"{file.path}: {key} must be an integer, got {shown_value(value)}; fetch it again")
    return value
