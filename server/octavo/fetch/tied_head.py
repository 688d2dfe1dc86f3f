"""Detect whether a checkpoint's head is its embedding table, from its tensors if config.json is wrong."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from octavo.interface.model_files import ModelFiles
from octavo.system.file_reading import read_into

logger = logging.getLogger(__name__)

_HEAD = re.compile(r"(?:(?:.*\.)?(?:lm_head|embed_out)|(?:language_model\.)?output)\.(\w+)")
_TABLE = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
_OF_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d")
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of floats, in bytes
_MAX_HEADER = 100 << 20
_PIECE = 1 << 20  # numbers that are compared at a time


def follow_tied_head(files: ModelFiles, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with ``tie_word_embeddings`` false, where a checkpoint that should have one table for both holds two
    that differ, as transformers reads it; says so in the log. Files that cannot be read are left to the loader."""
    if files.format != "safetensors" or config.get("tie_word_embeddings", True) is False:
        return config
    found = _tables(files)
    if found is None:
        return config
    table, head, name = found
    if head is not None and _is_equal(table, head):
        return config
    if config.get("tie_word_embeddings"):
        logger.warning(
            "%s: config.json says tie_word_embeddings, but the checkpoint has a %s of its own: it is the head",
            files.model,
            name,
        )
    return {**config, "tie_word_embeddings": False}


class _Stored:
    """A tensor of floats in a file."""

    def __init__(self, path: Path, start: int, entry: Mapping[str, Any]) -> None:
        self.path, self.qtype, self.shape = path, entry["dtype"], tuple(entry["shape"])
        self.offset = start + entry["data_offsets"][0]

    def read(self, first: int, count: int) -> bytearray:
        """The bytes of ``count`` numbers from number ``first`` on."""
        size = _SIZES[self.qtype]
        found = bytearray(count * size)
        read_into(memoryview(found), self.path, self.offset + first * size, "a table of tokens")
        return found


def _tables(files: ModelFiles) -> tuple[_Stored, _Stored | None, str] | None:
    """The table, the head (None: it is no tensor of floats) and its name; None: one of them is not there."""
    table: _Stored | None = None
    heads: dict[str, _Stored | None] = {}
    for path in map(Path, files.weights):
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length <= _MAX_HEADER else {}
            for name, entry in header.items():
                if _OF_LAYER.search(name) or not (_HEAD.fullmatch(name) or _TABLE.fullmatch(name)):
                    continue
                stored = _Stored(path, 8 + length, entry) if entry["dtype"] in _SIZES else None
                if match := _HEAD.fullmatch(name):
                    heads[name] = stored if match[1] == "weight" else None
                else:
                    table = stored
        except (OSError, ValueError, RecursionError, AttributeError, TypeError, LookupError):
            return None
    heads = {name: stored for name, stored in heads.items() if not name.endswith(".bias")}
    if table is None or not heads:
        return None
    (name, head), *more = heads.items()
    return table, None if more else head, name  # codes have scales beside them


def _is_equal(table: _Stored, head: _Stored) -> bool:
    if table.shape != head.shape:
        return False
    total = prod(table.shape)
    for first in range(0, total, _PIECE):
        count = min(_PIECE, total - first)
        ours, theirs = table.read(first, count), head.read(first, count)
        if ours != theirs and (table.qtype == head.qtype or not _are_equal(ours, table.qtype, theirs, head.qtype)):
            return False
    return True


def _are_equal(ours: bytearray, qtype: str, theirs: bytearray, other: str) -> bool:
    """Return whether numbers of different types are equal."""
    import numpy as np

    def numbers(data: bytearray, kind: str) -> Any:
        if kind == "BF16":  # the upper half of float32
            return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype("<f8")
        return np.frombuffer(data, f"<f{_SIZES[kind]}").astype("<f8")

    return bool(np.array_equal(numbers(ours, qtype), numbers(theirs, other)))
