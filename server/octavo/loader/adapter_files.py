"""Reading LoRA adapters as PEFT saves them, adapter_config.json and adapter_model.safetensors in one folder, or from a
GGUF file (`gguf_adapter`).

What they hold was made elsewhere and is not trusted: sizes are checked before anything is read, and all that this
engine does not compute is refused by its name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile
from octavo.layers.weights import WeightSource
from octavo.loader.gguf_adapter import gguf_matrices
from octavo.loader.matrices import Matrices
from octavo.loader.safetensors_reader import SafetensorsFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG = 1 << 20  # bytes
_PIECE = 1 << 20

# Fields of adapter_config.json that change what is computed: what they stand for.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of A and B",
    "modules_to_save": "whole modules saved beside the matrices",
    "fan_in_fan_out": "weights stored as [inputs, outputs]",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained rows of an embedding",
    "target_parameters": "matrices for parameters, as those of experts",
    "alora_invocation_tokens": "activated LoRA",
}
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_(?:(embedding_)([AB])|([AB])\.weight)")
# A pattern with few repetitions, none of them of a group: matching it takes no time to speak of.
_PATTERN = re.compile(r"(?:[\w.^$|\[\]()-]|\\[.dw]|(?<=[^)*+?])[*+?]){1,200}")
_MAX_REPETITIONS = 3


@dataclass(frozen=True)
class AdapterConfig:
    """What a rank and a name make of ``alpha``: the factor of ``B A``."""

    rank: int
    alpha: float
    is_rank_stabilised: bool = False  # alpha / sqrt(rank)
    ranks: frozenset[int] = frozenset()  # that some modules may have instead
    alphas: dict[str, float] = field(default_factory=dict)  # by a pattern for modules' names

    def scaling(self, module: str, rank: int) -> float:
        """Of a module, by its name in the checkpoint, with matrices of ``rank``."""
        own = (alpha for pattern, alpha in self.alphas.items() if re.match(rf"(.*\.)?({pattern})$", module))
        return next(own, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter(path: str, max_rank: int, max_bytes: int, heads: tuple[int, int]) -> tuple[str, list[Matrices]]:
    """The digest of an adapter's files, and its matrices, unread. Raises ModelError, of one line.

    ``max_bytes``: what A and B of every module would take in float32, with ``max_rank``; ``heads``: the model's, and
    those of keys and values.
    """
    files = _files_of(Path(path))
    digest = hashlib.sha256()
    if len(files) == 2:
        config_bytes = _read_small(files[0])
        config = parse_config(config_bytes, files[0], max_rank)
        digest.update(len(config_bytes).to_bytes(8, "little") + config_bytes)
    weights, most = files[-1], max_bytes + (4 << 20)
    size = _regular(weights).st_size
    if size > most:
        raise ModelError(f"{weights} has {size} bytes; an adapter of rank {max_rank} takes at most {most} here")
    with open(weights, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    if len(files) == 2:
        return digest.hexdigest(), list(_pairs(SafetensorsFile(weights), config))
    found = list(gguf_matrices(GGUFFile(weights), *heads, max_rank))
    if not found:
        raise ModelError(f"{weights} holds no matrices")
    return digest.hexdigest(), found


def signature(path: str) -> tuple[tuple[int, int, int], ...]:
    """What changes when an adapter's files do: inode, size and time of change of each. Raises ModelError."""
    found = map(_regular, _files_of(Path(path)))
    return tuple((stats.st_ino, stats.st_size, stats.st_mtime_ns) for stats in found)


def _files_of(path: Path) -> list[Path]:
    """PEFT's two in a folder, or one GGUF file: ``path``, or the only one in the folder."""
    if path.suffix == ".gguf":
        return [path]
    if not (path / CONFIG).exists() and len(found := [*islice(path.glob("*.gguf"), 2)]) == 1:
        return found
    return [path / CONFIG, path / WEIGHTS]


def parse_config(text: bytes, path: Path, max_rank: int) -> AdapterConfig:
    """Raises ModelError for what is not a LoRA adapter's, or asks for more than A and B."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type {_short(kind)} is not supported; LORA is")
    asked = {name: what for name, what in _REFUSED.items() if config.get(name)}
    asked |= {name: "a variant of LoRA" for name in config if _is_unknown_variant(name) and config[name]}
    if config.get("bias", "none") != "none":
        asked["bias"] = "trained biases"
    for name, what in asked.items():
        raise ModelError(f"{path}: {name} {_short(config[name])} is not supported ({what}); train without it")
    return _factors(config, path, max_rank)


def _factors(config: dict[str, Any], path: Path, max_rank: int) -> AdapterConfig:
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise ModelError(f"{path}: rank_pattern and alpha_pattern must be objects")
    for rank in (config.get("r"), *ranks.values()):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ModelError(f"{path}: r must be an integer above 0, got {_short(rank)}")
        if rank > max_rank:
            raise ModelError(f"{path}: rank {_short(rank)} is above max_lora_rank ({max_rank}); raise --max-lora-rank")
    alpha: Any = config.get("lora_alpha")
    for number in (alpha, *alphas.values()):
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e9:
            raise ModelError(f"{path}: lora_alpha must be a number, got {_short(number)}")
    for pattern in alphas:
        if (
            not _PATTERN.fullmatch(pattern)
            or sum(map(pattern.count, "*+?")) > _MAX_REPETITIONS
            or not _compiles(pattern)
        ):
            raise ModelError(f"{path}: alpha_pattern {_short(pattern)} is not a name or a simple pattern")
    return AdapterConfig(
        config["r"], float(alpha), bool(config.get("use_rslora")), frozenset(ranks.values()),
        {pattern: float(number) for pattern, number in alphas.items()},
    )  # fmt: skip


def _is_unknown_variant(name: str) -> bool:
    return name.startswith("use_") and name not in ("use_rslora", "use_dora")


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _pairs(file: SafetensorsFile, config: AdapterConfig) -> Iterator[Matrices]:
    found: dict[tuple[str, bool], dict[str, WeightSource]] = {}
    for source in file.sources():
        match = _MATRIX.fullmatch(source.name.replace(".default", ""))
        if match is None or len(source.name) > 400:
            raise ModelError(
                f"{file.path}: tensor {_short(source.name)} is not a matrix of LoRA (DoRA, biases and whole modules "
                "are not supported)"
            )
        if source.qtype not in ("F32", "F16", "BF16", "F64"):
            raise ModelError(f"{file.path}: tensor {source.name!r} is stored as {source.qtype}, not in floats")
        module, embedding, of_embedding, of_linear = match.groups()
        found.setdefault((module, bool(embedding)), {})[of_embedding or of_linear] = source
    if not found:
        raise ModelError(f"{file.path} holds no matrices")
    for (module, of_embedding), pair in found.items():
        if len(pair) != 2:
            raise ModelError(f"{file.path}: module {module!r} has A or B alone")
        a, b = pair["A"], pair["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ModelError(
                f"{file.path}: A {list(a.shape)} and B {list(b.shape)} of {module!r} are not [rank, inputs] and "
                "[outputs, rank]"
            )
        rank = a.shape[0]
        if rank != config.rank and rank not in config.ranks:
            raise ModelError(f"{file.path}: {module!r} has rank {rank}, {CONFIG} says {config.rank}")
        yield Matrices(module, a, b, config.scaling(module, rank), of_embedding)


def _read_small(path: Path) -> bytes:
    size = _regular(path).st_size
    if size > _MAX_CONFIG:
        raise ModelError(f"{path} has {size} bytes, at most {_MAX_CONFIG} are read")
    with open(path, "rb") as file:
        return file.read(_MAX_CONFIG)


def _regular(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(path)[:300]}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path} is not a file")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
