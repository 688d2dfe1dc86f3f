"""How many bytes weights take on a device, from their sizes and without torch: what `octavo.layers.quantization` holds
them in. A test keeps both equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.kv_cache_spec import DTYPE_BYTES, KVCacheSpec, latent_specs
from octavo.memory.ledger import ModelMemory, held_in
from octavo.plan.described import Codes
from octavo.plan.packed import GGUF_KINDS, INT8
from octavo.plan.shapes import Linear, Shapes

# How the checkpoint stores the weight of a module: as "BF16" or "Q4_1", or in a described format; None: not known.
Stored = Callable[[str], str | Codes | None]

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BLOCK = 32  # channels that a CPU's kernels take together
_HEAD, _TABLE = "lm_head", "model.embed_tokens"
# Of a CPU's int8 cache (octavo_kernels.cpu.attention).
_KV_BLOCK, _KV_GROUP, _MAX_HEAD_SIZE = 16, 32, 576


def on_device_dtype(config: EngineConfig) -> EngineConfig:
    """As `octavo.worker.device.resolve_dtype`."""
    model = config.model
    if config.device != "cpu" or model.dtype != "float16":
        return config
    return replace(config, model=replace(model, dtype="float32", weight_dtype="float16"))


def memory_of(
    config: EngineConfig, shapes: Shapes, stored: Stored, parameters: int, is_described: bool = False
) -> ModelMemory:
    """Of a rank. ``parameters``: see `count_parameters`; ``is_described``: whether the checkpoint is one of codes.
    Raises ConfigError."""
    model, size = config.model, DTYPE_BYTES[config.model.dtype]
    nbytes = size * shapes.plain + 4 * (shapes.floats + shapes.tables)
    if config.device == "cpu":
        held = _OnCPU(config, stored, is_described)
        nbytes += sum(map(held.linear, shapes.linears)) + held.table(shapes)
        quantized = held.has_codes
    else:
        quantized = model.quantization in ("int8", "fp8") and not is_described
        nbytes += size * shapes.vocab * shapes.embedding
        nbytes += sum(_on_gpu(config, linear, stored, quantized, shapes.tied) for linear in shapes.linears)
    weight_dtype = held_in(model, quantized)
    if is_described:
        codes = (stored(path) for linear in shapes.linears for path in linear.paths if linear.kind != "head")
        weight_dtype = next((found.method for found in codes if isinstance(found, Codes)), weight_dtype)
    specs = cache_specs(config, shapes.specs, quantized and config.device == "cpu")
    return ModelMemory(model.model, nbytes, parameters, weight_dtype, specs)


def count_parameters(shapes: Shapes) -> int:
    """Of the whole model, if ``shapes`` are those of one rank; a tied head's once."""
    total = shapes.plain + shapes.floats + shapes.vocab * shapes.embedding
    for linear in shapes.linears:
        if linear.kind != "head" or not shapes.tied:
            total += linear.count * sum(linear.rows) * (linear.columns + linear.bias)
    return total


class _OnCPU:
    """Bytes of a CPU's weights, in the forms that `octavo.layers.quantization.registry` chooses."""

    def __init__(self, config: EngineConfig, stored: Stored, is_described: bool) -> None:
        asked, model = config.model.quantization, config.model
        self._stored = stored
        self._own = (model.weight_dtype if model.dtype_is_asked else None) or model.dtype
        self._rounds_float16 = model.dtype_is_asked
        self._size = DTYPE_BYTES[model.dtype]
        self._rounds = asked == "int8" or (is_described and asked != "none")  # plain weights become 8 bits
        self._keeps = self._rounds or (model.files.format == "gguf" and asked != "none")  # codes stay codes
        self.has_codes = False  # whether a layer computes on them

    def linear(self, linear: Linear) -> int:
        """Of all of its ``count``; 0 of a head, which goes with the table of tokens."""
        if linear.kind == "head":
            return 0
        types = [self._stored(path) for path in linear.paths]
        bias = 4 * sum(linear.rows) * linear.bias
        if linear.kind == "latent":
            is_plain = not self._packs(types, types)
            size = 2 if is_plain and types == ["BF16"] else self._size
            return linear.count * sum(linear.rows) * linear.columns * size
        if linear.kind == "exact":
            own = DTYPE_BYTES[_FLOATS.get(str(types[0]), "float32")]
            return linear.count * (_dense(sum(linear.rows), linear.columns, own) + bias)
        kept = types
        if linear.kind == "expert":  # those of a layer have one form
            at = linear.paths[0].rpartition(".")[0]
            kept = [self._stored(f"{at}.{part}_proj") for part in ("gate", "up", "down")]
        if self._packs(types, kept):
            return linear.count * (self._packed(linear.rows, linear.columns, types) + bias)
        if linear.kind == "expert" and len(set(types)) > 1:
            types = [None] * len(types)
        dtypes = [self._held(found) for found in types]
        return linear.count * (_values(linear.rows, linear.columns, dtypes, linear.kind == "expert") + bias)

    def table(self, shapes: Shapes) -> int:
        """Of the table of tokens and the head, which may share one."""
        rows, columns, size = shapes.vocab, shapes.embedding, self._size * shapes.vocab * shapes.embedding
        own = self._stored(_TABLE)
        if shapes.tied:
            head = self._matrix(rows, columns, own)
            if self._packs([own], [own]):
                return head + (0 if self._keeps_values(own) else size)
            return head
        found = self._matrix(rows, columns, self._stored(_HEAD))
        if own is None or (self._packs([own], [own], note=False) and not self._keeps_values(own)):
            return found + size
        return found + self._matrix(rows, columns, own, note=False)

    def _matrix(self, rows: int, columns: int, own: str | Codes | None, note: bool = True) -> int:
        if self._packs([own], [own], note):
            return self._packed((rows,), columns, [own])
        return _dense(rows, columns, DTYPE_BYTES[self._held(own)])

    def _packs(
        self, types: Sequence[str | Codes | None], of_form: Sequence[str | Codes | None], note: bool = True
    ) -> bool:
        """Whether parts stored as ``types`` are held in codes; ``of_form``: all that have the same form."""
        if any(isinstance(found, Codes) for found in types):
            packs = self._keeps and all(isinstance(found, Codes) for found in types)
        else:
            packs = self._rounds or (self._keeps and not any(found in _FLOATS for found in of_form))
        self.has_codes |= packs and note
        return packs

    @staticmethod
    def _packed(rows: Sequence[int], columns: int, types: Sequence[str | Codes | None]) -> int:
        kinds = [found.kind if isinstance(found, Codes) else GGUF_KINDS.get(found or "", INT8) for found in types]
        return sum(kind.nbytes(count, columns) for kind, count in zip(kinds, rows, strict=True))

    @staticmethod
    def _keeps_values(own: str | Codes | None) -> bool:
        """Whether a table in these codes has the values that it would have by itself."""
        return isinstance(own, str) and own in GGUF_KINDS

    def _held(self, own: str | Codes | None) -> str:
        """As `octavo.layers.quantization.dense.WeightTypes`."""
        found = _FLOATS.get(own, self._own) if isinstance(own, str) else self._own
        shorter = DTYPE_BYTES[found] > DTYPE_BYTES[self._own]
        rounded = self._own == "bfloat16" and found == "float16" and self._rounds_float16
        return self._own if shorter or rounded else found


def _values(rows: Sequence[int], columns: int, dtypes: Sequence[str], apart: bool) -> int:
    """Of a CPU's parts: neighbours of one dtype lie together, but for those of experts, which are kept ``apart``."""
    if apart:
        return sum(_dense(count, columns, DTYPE_BYTES[dtype]) for count, dtype in zip(rows, dtypes, strict=True))
    runs = groupby(zip(dtypes, rows, strict=True), key=itemgetter(0))
    return sum(_dense(sum(count for _, count in run), columns, DTYPE_BYTES[dtype]) for dtype, run in runs)


def _dense(rows: int, columns: int, size: int) -> int:
    return -(-rows // _BLOCK) * _BLOCK * (columns + columns % 2) * size


def _on_gpu(config: EngineConfig, linear: Linear, stored: Stored, quantized: bool, tied: bool) -> int:
    if linear.kind == "head" and tied:
        return 0
    if linear.kind == "latent":
        return sum(linear.rows) * linear.columns * DTYPE_BYTES[config.model.dtype]
    size, rows = DTYPE_BYTES[config.model.dtype], sum(linear.rows)
    bias = (4 if linear.kind == "expert" else size) * linear.bias
    types = [stored(path) for path in linear.paths] if linear.kind != "exact" else []
    codes = types[0] if types else None
    if isinstance(codes, Codes) and types == [codes] * len(types) and size == 2 and config.model.quantization != "none":
        held = codes.on_gpu(linear.rows, linear.columns, size, linear.kind == "expert")
        return linear.count * (held + rows * bias)
    if quantized and linear.kind in ("linear", "expert"):
        return linear.count * rows * (linear.columns + 4 + size * linear.bias)
    return linear.count * rows * (size * linear.columns + bias)


def cache_specs(config: EngineConfig, specs: list[KVCacheSpec], quantized: bool) -> list[KVCacheSpec]:
    """As `octavo.worker.kv_cache.kv_cache_specs`. Raises ConfigError."""
    model, cache = config.model, config.cache
    asked = cache.kv_cache_dtype
    if asked != "auto":
        problem = _int8_problem(config, asked)
        if problem:
            backend = "cpu" if config.device == "cpu" else "triton"
            way_out = "leave kv_cache_dtype at auto"
            if asked != "int8":
                way_out = "attention_backend='reference' does (slow)"
            raise ConfigError(f"{problem}: the kernel backend {backend!r} does not do this; {way_out}")
    if any(spec.kind == "mla" for spec in specs):
        return latent_specs(specs, asked, quantized, config.device == "cpu")
    if asked == "auto" and quantized:
        asked = "bfloat16" if _int8_problem(config, "int8") else "int8"
    elif asked == "auto" and model.weight_dtype == "float16":
        asked = "bfloat16"
    elif asked == "auto":
        return specs
    scale = max(4, model.head_size // 16) if asked == "int8" else 0
    return [replace(spec, dtype=asked, scale_bytes=scale) for spec in specs]


def _int8_problem(config: EngineConfig, asked: str) -> str | None:
    """What the kernels do not do. As `octavo_kernels.attention_problem`."""
    size, block = config.model.head_size, config.cache.block_size
    if config.device != "cpu":
        return "kv_cache_dtype: an int8 cache is for CPUs; fp8 takes as little memory on a GPU" * (asked == "int8")
    if asked == "float8_e4m3fn":
        return "kv_cache_dtype: an fp8 cache is for GPUs; int8 takes as little memory on a CPU"
    if asked != "int8":
        return None
    if block % _KV_BLOCK:
        return f"block_size={block}: an int8 kv_cache_dtype needs a multiple of {_KV_BLOCK}"
    if size % _KV_GROUP or size > _MAX_HEAD_SIZE:
        return f"head_size={size}: an int8 kv_cache_dtype needs a multiple of {_KV_GROUP} up to {_MAX_HEAD_SIZE}"
    return None
