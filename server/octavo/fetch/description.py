"""Describe a model by its files: kind, size, precision. Reads headers only; no torch."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.gguf.file_names import all_parts
from octavo.interface.model_files import ModelFiles
from octavo.system.file_reading import read_json

_MAX_HEADER = 100 << 20  # bytes, as the safetensors library allows
# general.file_type of GGUF: the recipe by which types were chosen, tensor by tensor.
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    38: "MXFP4",
}
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PACKED = {"I32": 32, "U8": 8, "I8": 8}  # bits of the integers that hold codes of fewer bits
_CODES = ("qweight", "weight_packed", "weight", "_blocks", "codes")  # ends of names of tensors that are codes


@dataclass(frozen=True)
class Description:
    """``architecture``: as the files name it. ``quantization``: a GGUF type, a method, or the dtype of weights;
    ``num_parameters``: weights, not scales; ``license``: its name, '' where the files do not say."""

    format: str
    architecture: str
    quantization: str
    num_parameters: int
    num_bytes: int
    context_length: int | None = None  # as the files say, None where they do not
    license: str = ""
    name: str = ""

    @property
    def parameter_size(self) -> str:
        """``num_parameters`` as people write it: 135M, 7.2B."""
        return short_count(self.num_parameters)


def short_count(count: int) -> str:
    """135M, 7.2B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            text = f"{count / size:.1f}"
            return text.removesuffix(".0") + unit if count < 100 * size else f"{count / size:.0f}{unit}"
    return str(count)


def describe(files: ModelFiles) -> Description:
    """Raises ModelError for files that cannot be read."""
    num_bytes = sum(os.path.getsize(path) for path in files.weights)
    return _of_gguf(files.weights, num_bytes) if files.format == "gguf" else _of_safetensors(files, num_bytes)


def stored_dtype(files: ModelFiles) -> str | None:
    """Return the most frequent type of plain numbers in a safetensors checkpoint; None without plain numbers."""
    counts = Counter[str]()
    for path in files.weights:
        for _, kind, shape in _safetensors_header(path):
            if kind in _FLOATS:
                counts[_FLOATS[kind]] += prod(shape)
    return counts.most_common(1)[0][0] if counts else None


def stored_shapes(files: ModelFiles) -> dict[str, tuple[int, ...]]:
    """The shapes of a safetensors checkpoint's tensors."""
    return {name: tuple(shape) for path in files.weights for name, _, shape in _safetensors_header(path)}


def describe_path(path: Path) -> Description:
    """Describe a .gguf file, or a folder with config.json and *.safetensors, whether it is supported or not."""
    if path.suffix == ".gguf":
        parts = (path.with_name(part) for part in all_parts(path.name))
        return describe(ModelFiles(path.name, "gguf", str(path.parent), tuple(map(str, parts))))
    weights = tuple(str(file) for file in sorted(path.glob("*.safetensors")))
    return describe(ModelFiles(path.name, "safetensors", str(path), weights))


def _of_safetensors(files: ModelFiles, num_bytes: int) -> Description:
    config = read_json(files.path / "config.json")
    inner = config.get("text_config")
    config = {**config, **inner, "model_type": config.get("model_type")} if isinstance(inner, dict) else config
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method") or "")
    tensors = [tensor for path in files.weights for tensor in _safetensors_header(path)]
    bits = _bits(quantization)
    count = sum(_num_parameters(name, kind, shape, bits if method else None) for name, kind, shape in tensors)
    dtypes = Counter[str]()
    for _, kind, shape in tensors:
        dtypes[kind] += prod(shape)
    dtype = dtypes.most_common(1)[0][0] if dtypes else ""
    precision = dtype
    if method:
        precision = f"{method}-{bits}bit" if bits else method
    kind = str(config.get("model_type") or (config.get("architectures") or [""])[0])
    context = _integer(config.get("max_position_embeddings"))
    return Description("safetensors", kind, precision, count, num_bytes, context)


def _of_gguf(paths: tuple[str, ...], num_bytes: int) -> Description:
    from octavo.gguf.header import GGUFFile

    first = GGUFFile(paths[0])
    tensors = [info for path in paths for info in (first if path == paths[0] else GGUFFile(path)).tensors.values()]
    types = Counter[str]()
    for info in tensors:
        types[info.qtype] += prod(info.shape)
    kind = _FILE_TYPES.get(first.metadata.get("general.file_type", -1))
    most = types.most_common(1)[0][0] if types else ""
    text = {key: str(first.metadata.get(f"general.{key}", "")) for key in ("license", "basename", "name")}
    return Description(
        "gguf",
        first.architecture,
        kind or most,
        sum(types.values()),
        num_bytes,
        _integer(first.metadata.get(f"{first.architecture}.context_length")),
        text["license"],
        text["basename"] or text["name"],
    )


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _bits(quantization: dict[str, Any]) -> int | None:
    """Bits of a weight's code, where the description of a checkpoint names them."""
    if quantization.get("load_in_4bit") or "_load_in_4bit" in quantization:
        return 4 if quantization.get("load_in_4bit", quantization.get("_load_in_4bit")) else 8
    bits = quantization.get("bits", quantization.get("w_bit"))
    for group in (quantization.get("config_groups") or {}).values():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            bits = group["weights"].get("num_bits")
    return bits if isinstance(bits, int) and 0 < bits <= 16 else None


def _num_parameters(name: str, kind: str, shape: list[int], bits: int | None) -> int:
    """Weights of a tensor: of codes several an integer; none of scales and zero points."""
    if bits is None:
        return prod(shape)
    if name.endswith(
        ("scales", "scale", "qzeros", "zero_point", "g_idx", "absmax", "quant_map", "_shape", "quant_state")
    ):
        return 0
    packed = _PACKED.get(kind, 0) // bits if name.endswith(_CODES) else 0
    return prod(shape) * max(1, packed)


def _safetensors_header(path: str) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each tensor."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise ValueError
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, str(tensor["dtype"]), [int(size) for size in tensor["shape"]]
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ModelError(
            f"{Path(path).name} is not a safetensors file: its header is damaged; fetch it again"
        ) from None
