"""Reading LoRA adapters as PEFT saves them, adapter_config.json and adapter_model.safetensors in one folder, or from a
GGUF file as llama.cpp's convert_lora_to_gguf.py writes it: ``blk.0.attn_q.weight.lora_a`` [R, K] and ``.lora_b`` [N,
R], with the rows of B where the base model's file has those of its weight.

What they hold was made elsewhere and is not trusted: sizes are checked before anything is read, and all that this
engine does not compute is refused by its name.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from octavo.errors import ModelError
from octavo.gguf.families import INTERLEAVED, layout_of
from octavo.gguf.header import GGUFFile, TensorInfo
from octavo.gguf.names import hf_name
from octavo.gguf.weights import GGUFWeight
from octavo.layers.weights import Transposed, WeightSource
from octavo.loader.matrices import Matrices
from octavo.loader.peft_config import AdapterConfig, parse_config, short
from octavo.loader.safetensors_reader import SafetensorsFile

_FLOATS = ("F32", "F16", "BF16")


def gguf_matrices(file: GGUFFile, heads: int, kv_heads: int, max_rank: int) -> Iterator[Matrices]:
    """The file's pairs, unread, for a model with so many heads. Raises ModelError for what is not a LoRA adapter."""
    kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise ModelError(f"{file.path} is not a LoRA adapter: general.type and adapter.type are {kind}")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise ModelError(f"{file.path}: adapter.lora.alpha must be a number, got {alpha!r:.80}")
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in file.tensors.items():
        base, _, matrix = name.rpartition(".lora_")
        if not base or matrix not in ("a", "b") or len(info.shape) != 2 or info.qtype not in _FLOATS:
            raise ModelError(f"{file.path}: tensor {name[:200]!r} is not a matrix of LoRA in floats")
        pairs.setdefault(base, {})[matrix] = info
    for base, pair in pairs.items():
        weight = hf_name(base, layout_of(file))
        if weight is None or not weight.endswith(".weight"):
            raise ModelError(f"{file.path}: tensor {base[:200]!r} is not part of architecture {file.architecture!r}")
        if len(pair) != 2:
            raise ModelError(f"{file.path}: {base!r} has A or B alone")
        module, of_embedding = weight.removesuffix(".weight"), base == "token_embd.weight"
        turned = None
        if file.architecture in INTERLEAVED and (match := re.search(r"\.([qk])_proj$", module)):
            turned = heads if match[1] == "q" else kv_heads
        a: WeightSource = GGUFWeight(pair["a"].name, file, pair["a"], None)
        b = GGUFWeight(pair["b"].name, file, pair["b"], turned)
        rank = b.shape[1]
        if of_embedding and a.shape[1] == rank:  # stored by id
            a = Transposed(a)
        if a.shape[0] != rank or (turned and b.shape[0] % (2 * turned)):
            raise ModelError(
                f"{file.path}: A {list(a.shape)} and B {list(b.shape)} of {base!r} are not [rank, inputs] and "
                "[outputs, rank]"
            )
        if rank > max_rank:
            raise ModelError(f"{file.path}: rank {rank} is above max_lora_rank ({max_rank}); raise --max-lora-rank")
        yield Matrices(module, a, b, alpha / rank if alpha else 1.0, of_embedding)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG = 1 << 20  # bytes
_PIECE = 1 << 20

_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_(?:(embedding_)([AB])|([AB])\.weight)")
_MATRIX_TYPES = ("F32", "F16", "BF16", "F64")
# A module before it was wrapped: saved for tables of tokens, by default.
_COPY = re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight")
_OF_TRAINING = re.compile(r".*\.lora_(?:velora|monteclora)_.*")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter's files, unread. ``copies``: weights of the base, by the module's name in the checkpoint."""

    digest: str
    pairs: list[Matrices]
    copies: dict[str, WeightSource] = field(default_factory=dict)


def read_adapter(path: str, max_rank: int, max_bytes: int, heads: tuple[int, int]) -> AdapterFile:
    """Read an adapter's files. Raises ModelError, of one line.

    ``max_bytes``: what A and B of every module would take in float32, with ``max_rank``, and copies of tables;
    ``heads``: the model's, and those of keys and values.
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
        copies: dict[str, WeightSource] = {}
        return AdapterFile(digest.hexdigest(), list(_pairs(SafetensorsFile(weights), config, copies)), copies)
    found = list(gguf_matrices(GGUFFile(weights), *heads, max_rank))
    if not found:
        raise ModelError(f"{weights} holds no matrices")
    return AdapterFile(digest.hexdigest(), found)


def signature(path: str) -> tuple[tuple[int, int, int], ...]:
    """Return a value that changes with an adapter's files: inode, size and modification time of each. Raises
    ModelError."""
    found = map(_regular, _files_of(Path(path)))
    return tuple((stats.st_ino, stats.st_size, stats.st_mtime_ns) for stats in found)


def _files_of(path: Path) -> list[Path]:
    """PEFT's two in a folder, or one GGUF file: ``path``, or the only one in the folder."""
    if path.suffix == ".gguf":
        return [path]
    if not (path / CONFIG).exists() and len(found := [*islice(path.glob("*.gguf"), 2)]) == 1:
        return found
    return [path / CONFIG, path / WEIGHTS]


def _pairs(file: SafetensorsFile, config: AdapterConfig, copies: dict[str, WeightSource]) -> Iterator[Matrices]:
    """Its pairs; what may be the base's own goes into ``copies``."""
    found: dict[tuple[str, bool], dict[str, WeightSource]] = {}
    for source in file.sources():
        name = source.name.replace(".default", "")
        if _OF_TRAINING.fullmatch(name):
            continue
        match, copy = _MATRIX.fullmatch(name), _COPY.fullmatch(name)
        if match is None and copy and ".lora_" not in name and len(name) <= 400:
            copies[copy[1]] = source
            continue
        if match is None or len(name) > 400:
            raise ModelError(
                f"{file.path}: tensor {short(source.name)} is not a matrix of LoRA (DoRA, biases and whole modules "
                "are not supported)"
            )
        if source.qtype not in _MATRIX_TYPES:
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
