"""Measure a model's memory by building it without memory (`octavo.worker.model_memory`).

That imports torch and takes seconds, so results are kept in Octavo's cache: one file for each model, named by a hash of
its configuration and its files' headers, with a result for each way to run it. A damaged file counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.fetch.cache import cache_dir
from octavo.interface.engine_config import EngineConfig, ModelConfig
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.model_files import ModelFiles
from octavo.interface.ranks import ONE_STAGE, Stage
from octavo.interface.state_spec import StateSpec
from octavo.memory.ledger import ModelMemory
from octavo.system.torch_import import import_whole_torch
from octavo.version import __version__

_CODE = ("interface", "layers", "loader", "models")  # rooms that decide what a model takes
_MOST = 256  # results of one model; the oldest go first
_UNMEASURED = ("model", "files", "generation_config", "seed")  # fields of a model's config that change no size


def measure(config: EngineConfig, ranks: int, stage: Stage = ONE_STAGE) -> ModelMemory:
    """See `octavo.memory.dry_run.Measure`. Raises ModelError, and ConfigError also where torch is not installed."""
    path = cache_dir() / "plans" / f"{_digest([_code(), *map(_model_key, _models(config))])}.json"
    key, kept = _way_to_run(config, ranks, stage), _read(path)
    if (known := _loaded(kept.get(key), config)) is not None:
        return known
    try:
        found = _measure_built()(config, ranks, stage, is_described=True)
    except ConfigError as error:
        _write(path, kept, key, {"error": str(error)})
        raise
    _write(path, kept, key, _as_json(found))
    return found


def kv_bytes_per_token(config: EngineConfig) -> int | None:
    """The bytes of a token in the model's default KV cache: all layers, each key and value counted once. None: it has
    none."""
    return sum(spec.bytes_per_token() for spec in measure(config, 1).specs) or None


def _measure_built() -> Callable[..., ModelMemory]:
    try:
        import_whole_torch()
        from octavo.worker.model_memory import measure_built
    except ImportError as error:
        raise ConfigError(
            f"the first plan of a model needs torch, which cannot be imported here ({error}): `pip install octavo` "
            "installs it, and Octavo's server image has it"
        ) from error
    return measure_built


@cache
def _code() -> tuple[str, int]:
    """The release, and when its files last changed: in a checkout they do without a release."""
    files = (file for room in _CODE for file in (Path(__file__).parents[1] / room).rglob("*.py"))
    return __version__, max(file.stat().st_mtime_ns for file in files)


def _models(config: EngineConfig) -> Iterator[ModelConfig]:
    yield config.model
    if config.drafter is not None:
        yield config.drafter.model


def _model_key(model: ModelConfig) -> list[Any]:
    """``max_model_len`` is a way to run it."""
    fields = {name: value for name, value in asdict(model).items() if name not in (*_UNMEASURED, "max_model_len")}
    return [fields, model.files.format, list(_headers(model.files))]


def _headers(files: ModelFiles) -> Iterator[Any]:
    if files.format == "gguf":
        from octavo.gguf.split import open_gguf

        tensors = open_gguf(files.weights[0]).tensors if files.weights else {}
        yield from ([name, info.shape, info.qtype] for name, info in tensors.items())
        return
    for path in files.weights:
        with open(path, "rb") as file:
            length = file.read(8)
            yield hashlib.sha256(file.read(min(int.from_bytes(length, "little"), 100 << 20))).hexdigest()


def _way_to_run(config: EngineConfig, ranks: int, stage: Stage) -> str:
    parallel = config.parallel
    return json.dumps(
        [
            config.device,
            config.load_format,
            config.attention_backend,
            config.cache.kv_cache_dtype,
            config.cache.block_size,
            parallel.enable_expert_parallel,
            parallel.data_parallel_size,
            [model.max_model_len for model in _models(config)],
            ranks,
            asdict(stage),
        ]
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def _write(path: Path, kept: dict[str, Any], key: str, result: dict[str, Any]) -> None:
    """Save a result; if the cache cannot be written, the next plan measures again."""
    kept[key] = result
    whole = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps(dict(list(kept.items())[-_MOST:])))
        whole.replace(path)


def _as_json(memory: ModelMemory) -> dict[str, Any]:
    """Layers alike are one entry and their number."""
    specs = [[asdict(spec), len(list(alike))] for spec, alike in groupby(memory.specs)]
    return {**asdict(replace(memory, specs=[])), "specs": specs}


def _loaded(result: Any, config: EngineConfig) -> ModelMemory | None:
    """None where there is none, or a damaged one. Raises ConfigError where that was the result."""
    if isinstance(result, dict) and "error" in result:
        raise ConfigError(str(result["error"]))
    try:
        specs = [KVCacheSpec(**spec) for spec, count in result["specs"] for _ in range(int(count))]
        numbers = {name: int(result[name]) for name in ("weights", "parameters", "drafter", "num_layers")}
        stage, weight_dtype = Stage(**result["stage"]), str(result["weight_dtype"])
        state = StateSpec(**result["state"]) if result.get("state") else None
    except (KeyError, TypeError, ValueError):
        return None
    return ModelMemory(config.model.model, weight_dtype=weight_dtype, specs=specs, stage=stage, state=state, **numbers)
