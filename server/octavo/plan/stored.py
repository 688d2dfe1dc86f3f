"""How a checkpoint stores the weight of each module, by its headers where they are here, else by config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.quantizations import ALIASES
from octavo.plan.described import Codes, Description, described_codes
from octavo.plan.held import Stored

_MAX_HEADER = 100 << 20
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Tensors of a module whose weight is in codes.
_CODES = {"qweight", "weight_packed", "weight_blocks", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB"}
# Modules that tools leave as they are, whether a description lists them or not.
_NEVER_CODES = re.compile(r"(?:^|\.)(?:lm_head|embed_tokens|gate|shared_expert_gate)$")
# Names of modules in checkpoints that differ from the engine's, and of parts that are stored as one.
_RENAMED = (
    (r"^(?:model\.)?language_model\.(?:model\.)?", "model."), (r"^model\.lm_head$", "lm_head"),
    (r"\.block_sparse_moe\.", ".mlp."), (r"(\.experts\.\d+)\.w1$", r"\1.gate_proj"),
    (r"(\.experts\.\d+)\.w2$", r"\1.down_proj"), (r"(\.experts\.\d+)\.w3$", r"\1.up_proj"),
    (r"\.mlp\.router$", ".mlp.gate"), (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
)  # fmt: skip
_MERGED = ((r"\.[qkv]_proj$", ".qkv_proj"), (r"\.(?:gate|up)_proj$", ".gate_up_proj"))


def stored_types(config: EngineConfig, ranks: int, parameters: int) -> Stored | None:
    """None: not known without building the model of so many ``parameters``. Raises ModelError for damaged headers."""
    model = config.model
    asked, table = ALIASES.get(model.quantization or "", model.quantization), model.hf_config.get("quantization_config")
    if model.files.format == "gguf":
        on_cpu = config.device == "cpu"
        if asked not in (None, "none", "gguf", *(("int8",) if on_cpu else ())) or (on_cpu and ranks > 1):
            return None
        return _of_gguf(model.files.weights[0], parameters)
    if config.device == "cpu" and ranks > 1 and (table or asked == "int8"):
        return None
    if table:
        describe = described_codes(table)
        if describe is None or asked not in (None, "none", table.get("quant_method")):
            return None
        if config.load_format == "dummy":
            said = model.hf_config.get("dtype") or model.hf_config.get("torch_dtype") or "bfloat16"
            plain = _NAMES.get(str(said).removeprefix("torch."))
            return lambda path: (None if _NEVER_CODES.search(path) else describe(path)) or plain
        return _of_modules(model.files.weights, describe)
    if asked not in (None, "none", "int8", *(("fp8",) if config.device != "cpu" else ())):
        return None
    if config.load_format == "dummy":
        return lambda path: None
    return _of_files(model.files.weights)


def _of_gguf(path: str, parameters: int) -> Stored | None:
    """None: the tensors are not those of a model with so many ``parameters``."""
    from octavo.gguf.names import joint_type, named_tensors
    from octavo.gguf.split import open_gguf

    named = dict(named_tensors(open_gguf(path)))
    if sum(prod(info.shape) for info in named.values()) != parameters:
        return None
    types = {name.removesuffix(".weight"): info.qtype for name, info in named.items()}
    for path in [path for path in types if path.endswith(".k_b_proj")]:
        values = types.get(path.replace(".k_b_proj", ".v_b_proj"), "")
        types.setdefault(path.replace(".k_b_proj", ".kv_b_proj"), joint_type(types[path], values))
    return _found_in(types.items())


def _of_files(weights: Iterable[str]) -> Stored | None:
    """Of plain safetensors."""
    types = {name: entry["dtype"] for path in weights for name, entry in _header(Path(path)).items()}
    if len(set(types.values())) == 1:
        (only,) = set(types.values())
        return lambda path: only
    return _found_in((_module(name)[0], kind) for name, kind in types.items() if _module(name)[1] == "weight")


def _of_modules(weights: Iterable[str], describe: Description) -> Stored | None:
    """Of safetensors with codes: the tensors say which modules have them."""
    leaves: dict[str, dict[str, str]] = {}
    for path in weights:
        for name, entry in _header(Path(path)).items():
            module, leaf = _module(name)
            leaves.setdefault(module, {})[leaf] = entry["dtype"]
    found: list[tuple[str, str | Codes]] = []
    for module, types in leaves.items():
        own: str | Codes | None = describe(module) if _CODES & set(types) else types.get("weight")
        if isinstance(own, Codes) or (own is not None and own in _NAMES.values()):
            found.append((module, own))
    return _found_in(found)


def _module(name: str) -> tuple[str, str]:
    """A tensor's module, by the engine's name, and the rest of its own."""
    name = re.sub(r"\.(\w+_proj)_(blocks|scales)$", r".\1.weight_\2", name)  # gpt-oss
    module, dot, leaf = name.partition(".weight.")
    leaf = f"weight.{leaf}"
    if not dot:
        module, _, leaf = name.rpartition(".")
        if leaf in ("gate_up_proj", "down_proj"):
            module, leaf = name, "weight"
    for pattern, replacement in _RENAMED:
        module = re.sub(pattern, replacement, module)
    return module, leaf


def _found_in(entries: Iterable[tuple[str, str | Codes]]) -> Stored | None:
    """By path, which raises KeyError where there is none; all experts of a layer as one. None: these differ."""
    types: dict[str, str | Codes] = {}
    for path, kind in entries:
        if types.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", path), kind) != kind:
            return None
    if "lm_head" in types:  # alone it is a tied model's table
        types.setdefault("model.embed_tokens", types["lm_head"])
    return lambda path: _type_of(types, path)


def _type_of(types: Mapping[str, str | Codes], path: str) -> str | Codes:
    if path in types:
        return types[path]
    for pattern, replacement in _MERGED:
        if (merged := re.sub(pattern, replacement, path)) in types:
            return types[merged]
    raise KeyError(path)


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file's table. Raises ModelError."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length)) if length <= _MAX_HEADER else {"": {}}
        header.pop("__metadata__", None)
        if all(isinstance(entry["dtype"], str) for entry in header.values()):
            return dict(header)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        pass
    raise ModelError(f"{path} is damaged: its header is not JSON; fetch it again")
