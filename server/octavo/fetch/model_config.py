"""Reading the JSON files that describe a model. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.interface.architectures import check_architecture
from octavo.interface.config_checks import Fields
from octavo.interface.model_config import check_config, config_class
from octavo.interface.model_files import ModelFiles
from octavo.system.file_reading import read_json

# Files that describe quantised weights: quant_method.
_DESCRIPTIONS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def load_hf_config(
    files: ModelFiles, overrides: Mapping[str, Any] | None = None, rope: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json as Hugging Face writes it (for GGUF: derived from the header), with the fields of ``overrides`` in
    place of its own, and the parameters of rotary embeddings ``rope``. Raises ModelError."""
    path = files.path / "config.json"
    config = _with_quantization({**read_json(path), **(overrides or {})}, files.path)
    for key in ("text_config", "llm_config"):  # models with several inputs keep the language model's part apart
        apart = "vocab_size" not in config or "hidden_size" not in config
        if apart and isinstance(config.get(key), dict):
            kept = ("architectures", "tie_word_embeddings")
            outer: dict[str, Any] = {field: config[field] for field in kept if field in config}
            config = {**config, **config[key], **outer}
    config = _with_rope(config, rope or {}, path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f"{path} does not name the model's architecture (architectures); is it a language model?")
    if config.get("classifier_from_token") is not None:  # its head is that of a language model
        name = architectures[0].replace("ForSequenceClassification", "ForCausalLM")
        config, architectures = {**config, "architectures": [name]}, [name]
    check_architecture(architectures[0])
    aliases = config_class(architectures[0]).aliases
    names = {common: own for own, common in aliases.items() if config.get(own) is not None}
    return check_config(config, str(path), lambda field: names.get(field, field))


def check_before_weights(folder: Path) -> None:
    """Raise ModelError if config.json in ``folder`` names an architecture that is not built, before gigabytes are
    fetched in vain. `load_hf_config` finds other mistakes."""
    try:
        architectures = read_json(folder / "config.json").get("architectures")
    except (ModelError, OSError):
        return
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        check_architecture(architectures[0])


def _with_rope(config: dict[str, Any], rope: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The configuration with ``rope`` as its rope_scaling. Its own base and rotated share stay, wherever they stand.
    Raises ModelError where its parameters differ between layers."""
    if not rope:
        return config
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in stated.values()):
        raise ModelError(f"{path} has rope parameters that differ between layers: change them with hf_overrides")
    if {"type", "rope_type"} & set(rope):  # another way to scale has parameters of its own
        stated = {name: stated[name] for name in ("rope_theta", "partial_rotary_factor") if name in stated}
    return {**config, "rope_scaling": {**stated, **rope}, "rope_parameters": None}


def _with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with the description of quantised weights, which older tools kept in files of their own, as
    ``quantization_config``."""
    if config.get("quantization_config"):
        return config
    if isinstance(config.get("compression_config"), dict):
        return {**config, "quantization_config": {"quant_method": "compressed-tensors", **config["compression_config"]}}
    for name, method in _DESCRIPTIONS.items():
        if (folder / name).exists():
            described = read_json(folder / name)
            if method == "modelopt":  # its own, inside of who made it
                described = described.get("quantization", described)
            if isinstance(described, dict) and described.get("quant_algo", method):
                return {**config, "quantization_config": {"quant_method": method, **described}}
    return config


def load_generation_config(files: ModelFiles) -> dict[str, Any]:
    """generation_config.json over what the model's alias recommends. Raises ModelError."""
    path = files.path / "generation_config.json"
    config = {**files.sampling, **(read_json(path) if path.exists() else {})}
    Fields(config, str(path), str).token_ids("eos_token_id")
    return config


def weight_map_files(index: Path) -> list[str]:
    """File names of a safetensors index. Raises ModelError when one points out of the folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map of tensors to files; fetch the model again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index} points to {json.dumps(name)}, which is not a .safetensors file beside it; refused"
            )
    return names
