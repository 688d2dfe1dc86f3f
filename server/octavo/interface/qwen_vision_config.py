"""Read and check config.json's vision tower of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from octavo.interface.config_checks import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from octavo.interface.vision_config import MAX_SIDE

_COMMON: dict[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
# Defaults of fields that config.json leaves out, by the tower's model_type without "_vision".
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _COMMON | {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    "qwen2_5_vl": _COMMON
    | {
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "hidden_act": "silu",
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": _COMMON
    | {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
_DEFAULTS["qwen3_5"] = _DEFAULTS["qwen3_vl"] | {"deepstack_visual_indexes": []}


@dataclass(frozen=True)
class QwenVisionConfig:
    """A tower's sizes."""

    width: int  # of its hidden states
    inner: int  # of its MLPs
    num_layers: int
    num_heads: int
    channels: int
    patch: int
    temporal: int  # frames of a patch
    merge: int  # patches of a side of the squares that become an embedding each
    act: str
    rope_theta: float
    window: int | None = None  # squares of a side of the windows that most layers attend within; None: no layer does
    whole_layers: frozenset[int] = frozenset()  # that attend to the whole image all the same
    side: int = 0  # of the square of learned positions; 0: there are none
    deep_layers: tuple[int, ...] = ()  # whose states are given to the first layers of the language model (DeepStack)


def qwen_vision_config(hf_config: Mapping[str, Any], source: str, kind: str) -> QwenVisionConfig:
    """``vision_config`` of config.json, of the family ``kind`` ("qwen2_5_vl"). Raises ModelError."""
    stated = {key: value for key, value in hf_config["vision_config"].items() if value is not None}
    fields = Fields({**_DEFAULTS[kind], **stated}, source, lambda key: f"vision_config.{key}")
    if str(stated.get("model_type", kind)).removesuffix("_vision").removesuffix("_moe") != kind:
        fields.refuse("model_type", f"must be {kind}_vision, the tower that is supported here")
    out = fields.integer("hidden_size" if kind == "qwen2_vl" else "out_hidden_size", 1, MAX_WIDTH)
    if out != hf_config["hidden_size"]:
        name = fields.name("hidden_size" if kind == "qwen2_vl" else "out_hidden_size")
        raise fields.error(f"{name} ({out}) must be the language model's hidden_size ({hf_config['hidden_size']})")
    width = fields.integer("embed_dim" if kind == "qwen2_vl" else "hidden_size", 4, MAX_WIDTH)
    heads, layers = fields.integer("num_heads", 1, MAX_HEADS), fields.integer("depth", 1, MAX_LAYERS)
    if width % (4 * heads):
        raise fields.error(
            f"vision_config: a width of {width} must be a multiple of 4 times num_heads ({heads}), so that heads have "
            "pairs in height and width"
        )
    merge, patch = fields.integer("spatial_merge_size", 1, 16), fields.integer("patch_size", 1, MAX_SIDE)
    fields.text("hidden_act")
    rope = fields.table("rope_parameters") or {}
    theta = fields.inner("rope_parameters", rope).number("rope_theta", 0, 1e9, above=True)
    common = QwenVisionConfig(
        width,
        _inner(fields, kind, width),
        layers,
        heads,
        fields.integer("in_channels", 1, 4),
        patch,
        fields.integer("temporal_patch_size", 1, 16),
        merge,
        fields.config["hidden_act"],
        10000.0 if theta is None else theta,
    )
    more: dict[str, Any] = {}
    if kind == "qwen2_5_vl":
        pixels = fields.integer("window_size", 1, MAX_SIDE)
        if pixels < merge * patch:
            raise fields.error(
                f"vision_config.window_size ({pixels}) must be at least {merge * patch}, a square's side"
            )
        more = {"window": pixels // merge // patch, "whole_layers": frozenset(_layers(fields, "fullatt_block_indexes"))}
    if kind in ("qwen3_vl", "qwen3_5"):
        count = fields.integer("num_position_embeddings", 1, MAX_SIDE**2)
        if isqrt(count) ** 2 != count:
            fields.refuse("num_position_embeddings", "must be a square")
        most = hf_config["num_hidden_layers"] if kind == "qwen3_vl" else 1
        more = {"side": isqrt(count), "deep_layers": _deep_layers(fields, layers, most)}
    return QwenVisionConfig(**{**vars(common), **more})


def _deep_layers(fields: Fields, layers: int, most: int) -> tuple[int, ...]:
    """Read the layers of DeepStack, fewer than ``most``."""
    key, deep = "deepstack_visual_indexes", _layers(fields, "deepstack_visual_indexes")
    if any(layer >= layers for layer in deep) or len(deep) != len(set(deep)):
        fields.refuse(key, f"must be different layers below depth ({layers})")
    if len(deep) >= most:
        demand = f"must be fewer than the language model's {most} layers" if most > 1 else "must be empty"
        fields.refuse(key, demand)
    return tuple(deep)


def _inner(fields: Fields, kind: str, width: int) -> int:
    if kind == "qwen2_vl":
        return int(width * (fields.number("mlp_ratio", 0, 64, above=True) or 4))
    inner: int = fields.integer("intermediate_size", 1, 4 * MAX_WIDTH)
    return inner


def _layers(fields: Fields, key: str) -> list[int]:
    value = fields.config[key]
    if not isinstance(value, (list, tuple)) or not all(type(one) is int and 0 <= one < MAX_LAYERS for one in value):
        fields.refuse(key, "must be a list of numbers of layers")
    return list(value)
