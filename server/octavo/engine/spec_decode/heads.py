"""Descriptions of draft heads (EAGLE, Medusa), read before anything is loaded and brought into the words of
`octavo.models`.

EAGLE's checkpoints come in three forms: as their authors release them, the architecture's name with "Eagle" or without;
as vLLM names them ("EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"), the fields perhaps in
an object ``model``; and as the speculators library writes them, the layer's fields in ``transformer_layer_config``
without what transformers takes for granted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import ConfigError
from octavo.fetch.description import stored_shapes
from octavo.interface.architectures import MEDUSA_NAMES, MODELS
from octavo.interface.config_checks import MAX_HEADS, MAX_VOCAB, MAX_WIDTH, Fields
from octavo.interface.engine_config import ModelConfig, SpeculativeConfig
from octavo.interface.model_config import check_config
from octavo.interface.model_files import ModelFiles
from octavo.system.file_reading import read_json

Shapes = Mapping[str, tuple[int, ...]]

# Layers of heads -> the model here, by method.
_MODELS = {
    "eagle": {"LlamaForCausalLM": "EagleModel"},
    "eagle3": {"LlamaForCausalLM": "Eagle3Model", "Qwen3ForCausalLM": "Eagle3Qwen3Model"},
}
_BY_TYPE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Defaults of transformers, which the speculators library therefore leaves out.
_GRANTED: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}
# Their layers' inputs are not one hidden state a token, or not only.
_UNTAPPED = {name for name, module in MODELS.items() if module in ("gemma3n", "gemma4")} | {
    name for name, module in MODELS.items() if module == "text_of_vision" and name.startswith(("Gemma3n", "Gemma4"))
}
_MAX_TAPS = 64
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
_TAPS = "eagle_aux_hidden_state_layer_ids"


def draft_head(
    speculative: SpeculativeConfig, files: ModelFiles, target: ModelConfig, quantization: str | None
) -> ModelConfig:
    """The head in ``files`` as a model of its own, which guesses for ``target``. Raises ModelError, and ConfigError, of
    one line, where it cannot."""
    method = speculative.method
    if files.format == "gguf":
        raise _error(files, f"method {method} reads safetensors with their config.json, not GGUF files")
    shapes = stored_shapes(files)
    if method == "medusa":
        own = _medusa_heads(read_json(files.path / "config.json"), shapes, files, target)
        if own["num_heads"] < speculative.num_speculative_tokens:
            count, asked = own["num_heads"], speculative.num_speculative_tokens
            raise _error(
                files, f"num_speculative_tokens {asked} is more than its {count} heads, which guess a token each"
            )
        return _as_model(own, files, target, quantization)
    config = _common_form(method, read_json(files.path / "config.json"), files)
    if shapes and not any(_plain(name) == "fc.weight" for name in shapes):
        raise _error(files, f"it is no head of method {method}: it has no tensor fc.weight")
    layers = {match[1] for name in shapes if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", name))}
    config.setdefault("num_hidden_layers", max(1, len(layers)))
    own = _checked(method, config, files, target)
    own |= {
        "own_embedding": any(_plain(name).startswith("embed_tokens.") for name in shapes),
        "own_head": any(_plain(name).startswith("lm_head.") for name in shapes) or (not shapes and method == "eagle3"),
        "fc_bias": any(_plain(name) == "fc.bias" for name in shapes),
        "maps_tokens": any(_plain(name) == "d2t" for name in shapes),
        "tie_word_embeddings": False,
    }
    _check_vocabulary(own, bool(shapes), files, target)
    _check_sizes(method, own, files, target)
    return _as_model(own, files, target, quantization)


def _as_model(
    hf_config: dict[str, Any], files: ModelFiles, target: ModelConfig, quantization: str | None
) -> ModelConfig:
    """Return the head's configuration with the dtype and the positions of ``target``."""
    return replace(target, model=files.model, files=files, hf_config=hf_config, quantization=quantization)


def _medusa_heads(config: dict[str, Any], shapes: Shapes, files: ModelFiles, target: ModelConfig) -> dict[str, Any]:
    """Fields for `octavo.models.medusa`: what the tensors say and, where there are none, what config.json does."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        for pattern, replacement in MEDUSA_NAMES:
            name = re.sub(pattern, str(replacement), name)
        found[name] = shape
    blocks = [tuple(map(int, match.groups())) for name in found if (match := _BLOCK.fullmatch(name))]
    if shapes and not blocks:
        raise _error(files, "it has no heads of method medusa (tensors blocks.N.layers.N.weight)")
    fields = Fields(config, str(files.path / "config.json"), str)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for key, size in sizes.items():
        stated = fields.integer(key, 1, MAX_WIDTH if key == "hidden_size" else MAX_VOCAB, optional=True)
        if stated not in (None, size):
            raise _error(files, f"its {key} is {stated}, {target.model} has {size}")
    for key in ("num_heads", "medusa_num_heads"):
        fields.integer(key, 1, MAX_HEADS, optional=True)
    stated = config.get("num_heads") or config.get("medusa_num_heads") or 5
    heads = [shape for name, shape in found.items() if re.fullmatch(r"lm_heads\.\d+\.weight", name)]
    num_heads = 1 + max((head for head, _ in blocks), default=stated - 1)
    if len(heads) not in (0, 1, num_heads):
        raise _error(files, f"it has {num_heads} heads, {len(heads)} of them with a matrix (lm_heads)")
    draft_vocab = heads[0][0] if heads else target.vocab_size
    if draft_vocab != target.vocab_size and "vocabulary.token_map" not in found:
        raise _error(files, f"its heads have {draft_vocab} of {target.vocab_size} tokens and no token_map says which")
    return {
        **sizes,
        "architectures": ["MedusaModel"],
        "num_heads": num_heads,
        "num_lm_heads": len(heads),
        "num_hidden_layers": 1 + max((layer for _, layer in blocks), default=0),
        "draft_vocab_size": draft_vocab,
        "fc_bias": any(name.startswith("blocks.") and name.endswith(".bias") for name in found),
        "maps_tokens": "vocabulary.token_map" in found,
        "num_attention_heads": target.num_heads,
        "head_dim": target.head_size,
    }


def _common_form(method: str, config: dict[str, Any], files: ModelFiles) -> dict[str, Any]:
    """The fields in one object, with the plain architecture of the head's layers."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind != method:
            raise _error(files, f"its config.json says speculators_model_type {kind!r}, not {method}")
        inner = config.get("transformer_layer_config")
        inner = inner if isinstance(inner, dict) else {}
        layer = str(inner.get("model_type", "llama"))
        if layer not in _BY_TYPE:
            raise _error(files, f"layers of type {layer!r} are not supported; those that are: {', '.join(_BY_TYPE)}")
        outer = {key: value for key, value in config.items() if key != "transformer_layer_config"}
        return {**_GRANTED[layer], **inner, **outer, "architectures": [_BY_TYPE[layer]]}
    for key in ("model", "eagle_config"):  # vLLM's and ModelOpt's
        if isinstance(config.get(key), dict):
            config = {**config[key], **{name: value for name, value in config.items() if name != key}}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    number = "3" if re.match(r"Eagle3", name) or name.endswith("Eagle3") else ""
    plain = re.sub(r"^Eagle3?|Eagle3?$", "", name)
    if plain != name and f"eagle{number}" != method:
        raise _error(files, f"{name} is a head of method eagle{number}, not {method}")
    if plain not in _MODELS[method]:
        known = ", ".join(f"{'Eagle3' if method == 'eagle3' else 'Eagle'}{one}" for one in _MODELS[method])
        raise _error(files, f"architecture {name!r} is not supported for method {method}; those that are: {known}")
    return {**config, "architectures": [plain]}


def _checked(method: str, config: dict[str, Any], files: ModelFiles, target: ModelConfig) -> dict[str, Any]:
    """The fields, each of which may be used, under the name of the model here."""
    path = str(files.path / "config.json")
    config = check_config(config, path)
    fields = Fields(config, path, str)
    fields.integer("draft_vocab_size", 1, config["vocab_size"], optional=True)
    fields.integer("target_hidden_size", 1, MAX_WIDTH, optional=True)
    fields.number("logit_scale", 0.0, 1e6, above=True)
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state"):
        fields.flag(key)
    if config.get("use_aux_hidden_state") is False:
        raise _error(files, "use_aux_hidden_state false is not supported")
    own = {**config, "architectures": [_MODELS[method][config["architectures"][0]]]}
    own.setdefault("draft_vocab_size", config["vocab_size"])
    if method == "eagle3":
        own["taps"] = _taps(config, files, target)
        own.setdefault("target_hidden_size", config["hidden_size"])
    return own


def _taps(config: Mapping[str, Any], files: ModelFiles, target: ModelConfig) -> list[int]:
    """Numbers of the layers of ``target`` whose inputs the head reads, as vLLM numbers them."""
    if target.architecture in _UNTAPPED:
        raise _error(files, f"method eagle3 is not there for {target.architecture}, which {target.model} is")
    layers = target.num_layers
    stated = config.get(_TAPS)
    if not stated:
        taps = [2, layers // 2, layers - 3]
        if layers < 7:
            raise _error(files, f"it does not say {_TAPS}, and {target.model} has too few layers for 2, n/2 and n-3")
        return taps
    if not isinstance(stated, list) or any(type(tap) is not int or not 0 <= tap <= layers for tap in stated):
        raise _error(files, f"{_TAPS} must be numbers from 0 to {layers}, the layers of {target.model}")
    taps = sorted(set(stated))
    if len(taps) > _MAX_TAPS:
        raise _error(files, f"{_TAPS} has {len(taps)} layers, {_MAX_TAPS} is the most")
    return taps


def _check_vocabulary(own: Mapping[str, Any], is_stored: bool, files: ModelFiles, target: ModelConfig) -> None:
    ours, theirs = own["vocab_size"], target.vocab_size
    if ours != theirs:
        raise _error(files, f"it is for a vocabulary of {ours} tokens, {target.model} has one of {theirs}")
    if is_stored and own["draft_vocab_size"] != own["vocab_size"] and not (own["maps_tokens"] and own["own_head"]):
        raise _error(
            files, f"its head has {own['draft_vocab_size']} of {own['vocab_size']} tokens and no tensor d2t says which"
        )


def _check_sizes(method: str, own: Mapping[str, Any], files: ModelFiles, target: ModelConfig) -> None:
    read = own["target_hidden_size"] if method == "eagle3" else own["hidden_size"]
    if read != target.hidden_size:
        raise _error(files, f"it reads hidden states of size {read}, those of {target.model} have {target.hidden_size}")
    if own["hidden_size"] != target.hidden_size and not (own["own_embedding"] and own["own_head"]):
        raise _error(
            files,
            f"it has neither embed_tokens nor lm_head for its size {own['hidden_size']}, and {target.model} has "
            f"{target.hidden_size}",
        )


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _error(files: ModelFiles, what: str) -> ConfigError:
    way_out = "give a head that was trained for the model, or another method"
    return ConfigError(f"speculative_config: model {files.model}: {what}; {way_out}")
