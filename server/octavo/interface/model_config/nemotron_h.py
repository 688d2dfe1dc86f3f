"""Nemotron-H."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_FACTOR, Fields
from octavo.interface.model_config.declarations import choice, number
from octavo.interface.model_config.mamba2 import Mamba2Config

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


class NemotronHConfig(Mamba2Config):
    """Layers that are each one thing: Mamba 2, attention without positions, or an MLP of squared rectifiers."""

    is_rotary: ClassVar[bool] = False
    kinds_of_layers: ClassVar[tuple[str, ...]] = (*_ATTENTION, *_MAMBA, "mlp", "moe")
    ignored: ClassVar[frozenset[str]] = frozenset({"time_step_limit"})
    aliases: ClassVar[Mapping[str, str]] = {
        "layers_block_type": "layer_types",
        "layer_norm_epsilon": "rms_norm_eps",
        "mlp_hidden_act": "hidden_act",
        "ssm_state_size": "mamba_d_state",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "mamba_dt_min": "time_step_min",
    }

    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    intermediate_size: int = 21504
    rms_norm_eps: float = 1e-5
    mamba_n_groups: int = 8
    mamba_d_state: int = 128
    mamba_d_head: int | None = 64
    time_step_min: float = number(0.0, MAX_FACTOR, 0.001)
    hidden_act: str = choice(("relu2",), "relu2")
    mamba_hidden_act: str = choice(("silu", "swish"), "silu")

    @classmethod
    def in_common_words(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConfig`. A pattern of letters stands for the kinds of layers, and these for their number."""
        found = super().in_common_words(config)
        pattern = found.pop("hybrid_override_pattern", None)
        if found.get("layer_types") is None and isinstance(pattern, str):
            found["layer_types"] = [_LETTERS.get(letter, letter) for letter in pattern]
        kinds = found.get("layer_types")
        found["num_hidden_layers"] = len(kinds) if isinstance(kinds, list) else 1  # which are refused
        return found

    def kind(self, layer: int) -> str:
        """Return "mamba", "attention" or "mlp"."""
        stated = (self.layer_types or [])[layer]
        return "mamba" if stated in _MAMBA else "attention" if stated in _ATTENTION else stated

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        return self.kind(layer) == "mamba"

    @property
    def mamba_inner_size(self) -> int:
        """See `Mamba2Config`: what heads there are have together."""
        return self.mamba_n_heads * self.mamba_head_size

    @property
    def step_limits(self) -> tuple[float, float]:
        """See `Mamba2Config`."""
        return self.time_step_min, float("inf")

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        if self.layer_types is None:
            raise fields.error("it lacks 'layers_block_type' or 'hybrid_override_pattern', which say what layers are")
        if "moe" in self.layer_types:
            what = f"{fields.name('layers_block_type')} has experts without gates, which are not supported yet"
            raise fields.error(f"{what}; use a dense model (Nemotron-H, Nemotron Nano 2)")
        super().check(fields)

    def check_activation(self, fields: Fields) -> None:
        """See `Mamba2Config`: the mixers' is a field of its own."""
