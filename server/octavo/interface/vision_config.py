"""Read and check config.json's vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.interface.config_checks import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields

MAX_SIDE = 1 << 14  # of an image, in pixels
MOST_PATCHES = 8192  # of several images (tiles) at a time: what lies between layers is that large, too
# Towers by model_type that a family may have, the first where config.json does not say.
LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")
LLAVA_ONEVISION_TOWERS = ("siglip_vision_model", "clip_vision_model")
GEMMA3_TOWERS = ("siglip_vision_model",)
IDEFICS3_TOWERS = ("idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm")
PIXTRAL_TOWERS = ("pixtral",)

_CLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "layer_norm_eps": 1e-5,
    "hidden_act": "quick_gelu",
}
_SIGLIP = _CLIP | {"patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_IDEFICS3 = _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "rope_theta": 10000.0,
}
# Defaults of fields that config.json leaves out, by the tower's model_type.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _SIGLIP,
    "idefics3_vision": _IDEFICS3,
    "idefics3": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "pixtral": _PIXTRAL,
}


@dataclass(frozen=True)
class VisionConfig:
    """A tower's sizes; ``table`` is vision_config with the family's defaults."""

    table: dict[str, Any]
    kind: str  # model_type
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    channels: int
    patch_size: int
    image_size: int  # of a side, in pixels, that positions were trained for
    eps: float
    act: str

    @property
    def side(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch_size

    @property
    def has_class(self) -> bool:
        """True if a token for the image's class stands before those of its patches."""
        return self.kind == "clip_vision_model"


def tower_table(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """``vision_config`` of config.json with the defaults of its model_type, unchecked; empty where there is none."""
    found = hf_config.get("vision_config")
    if not isinstance(found, Mapping):
        return {}
    stated = {key: value for key, value in found.items() if value is not None}
    kinds = (stated.get("model_type"), hf_config.get("model_type"))
    defaults = next((_DEFAULTS[kind] for kind in kinds if isinstance(kind, str) and kind in _DEFAULTS), {})
    return {**defaults, **stated}


def vision_config(hf_config: Mapping[str, Any], source: str, kinds: tuple[str, ...]) -> VisionConfig:
    """``vision_config`` of config.json, of one of the model types ``kinds`` (the first, where it does not say). Raises
    ModelError."""
    stated = {key: value for key, value in hf_config["vision_config"].items() if value is not None}
    kind = stated.get("model_type", kinds[0])
    fields = Fields(stated, source, lambda key: f"vision_config.{key}")
    if kind not in kinds:
        fields.refuse("model_type", f"must be {' or '.join(kinds)}, the towers that are supported here")
    table = {**_DEFAULTS[kind], "num_channels": 3, **stated}
    fields.config = table
    fields.number("layer_norm_eps", 0.0, 1.0)
    fields.text("hidden_act")
    width, heads = fields.integer("hidden_size", 2, MAX_WIDTH), fields.integer("num_attention_heads", 1, MAX_HEADS)
    if width % heads:
        raise fields.error(f"vision_config.num_attention_heads ({heads}) must divide its hidden_size ({width})")
    patch, size = fields.integer("patch_size", 1, MAX_SIDE), fields.integer("image_size", 1, MAX_SIDE)
    if patch > size:
        raise fields.error(f"vision_config.patch_size ({patch}) must be at most its image_size ({size})")
    return VisionConfig(
        table,
        kind,
        width,
        fields.integer("intermediate_size", 1, 4 * MAX_WIDTH),
        fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        heads,
        fields.integer("num_channels", 1, 4),
        patch,
        size,
        table.get("layer_norm_eps", 1e-5),
        table["hidden_act"],
    )


def feature_layers(
    hf_config: Mapping[str, Any], source: str, tower: VisionConfig, default: int
) -> tuple[list[int], bool]:
    """Return the tower's states to read (0: before the first layer, -1: after the last), and whether to leave out the
    class's. Raises ModelError."""
    fields = Fields(dict(hf_config), source, str)
    stated = hf_config.get("vision_feature_layer", default)
    layers, least = stated if isinstance(stated, list) else [stated], -tower.num_layers - 1
    if not layers or any(type(layer) is not int or not least <= layer <= tower.num_layers for layer in layers):
        fields.refuse(
            "vision_feature_layer", f"must be one or more of the tower's states, {least} to {tower.num_layers}"
        )
    strategy = hf_config.get("vision_feature_select_strategy", "default" if default == -2 else "full")
    if strategy not in ("default", "full"):
        fields.refuse("vision_feature_select_strategy", 'must be "default" or "full"')
    return layers, strategy == "default"


def axial_theta(config: VisionConfig, source: str) -> float:
    """The base of a Pixtral tower's rotary embeddings. Raises ModelError for ones that it does not have."""
    table = config.table
    fields = Fields(table, source, lambda key: f"vision_config.{key}")
    size = config.hidden_size // config.num_heads
    if size % 4:
        raise fields.error(
            f"vision_config.hidden_size ({config.hidden_size}) / num_attention_heads ({config.num_heads}) must be a "
            f"multiple of 4, as rows and columns turn a pair each, got {size}"
        )
    if table.get("head_dim", size) != size:
        fields.refuse("head_dim", f"must be {size}, hidden_size / num_attention_heads")
    rope = fields.table("rope_parameters") or {}
    stated = {key: value for key, value in rope.items() if value is not None}
    inner = fields.inner("rope_parameters", {"rope_theta": table["rope_theta"], **stated})
    if stated.get("rope_type", "axial") not in ("axial", "default"):
        inner.refuse("rope_type", 'must be "axial"')
    return float(inner.number("rope_theta", 1.0, 1e15, above=True))


def merge_size(hf_config: Mapping[str, Any], source: str) -> int:
    """Patches of a square's side that become one embedding of Mistral 3. Raises ModelError."""
    fields = Fields({"spatial_merge_size": 2, **hf_config}, source, str)
    size: int = fields.integer("spatial_merge_size", 1, 64)
    return size
