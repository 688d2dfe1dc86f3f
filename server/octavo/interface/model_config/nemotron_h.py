"""Nemotron-H and Nemotron 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_FACTOR, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import choice, integer, number
from octavo.interface.model_config.experts import ExpertsConfig, GroupedExpertsConfig
from octavo.interface.model_config.state_space import StateSpaceConfig

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


class NemotronHConfig(StateSpaceConfig, GroupedExpertsConfig):
    """Layers that are each one thing: Mamba 2, attention without positions, an MLP of squared rectifiers, or such
    experts beside one that is shared."""

    is_rotary: ClassVar[bool] = False
    kinds_of_layers: ClassVar[tuple[str, ...]] = (*_ATTENTION, *_MAMBA, "mlp", "moe")
    ignored: ClassVar[frozenset[str]] = frozenset({"time_step_limit"})
    aliases: ClassVar[Mapping[str, str]] = {
        **ExpertsConfig.aliases,
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
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = 7688
    moe_shared_expert_intermediate_size: int = integer(1, MAX_WIDTH * 4, 7688)
    moe_latent_size: int | None = integer(1, MAX_WIDTH, None)  # of what experts read; None: the hidden size
    norm_topk_prob: bool = True
    n_group: int | None = 1
    topk_group: int | None = 1
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
        """Return "mamba", "attention", "mlp" or "moe"."""
        stated = (self.layer_types or [])[layer]
        return "mamba" if stated in _MAMBA else "attention" if stated in _ATTENTION else stated

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        return self.kind(layer) == "mamba"

    @property
    def mamba_inner_size(self) -> int:
        """See `StateSpaceConfig`: what heads there are have together."""
        return self.mamba_n_heads * self.mamba_head_size

    @property
    def has_experts(self) -> bool:
        """True if there is a layer of experts; else fields say what they would be like."""
        return "moe" in (self.layer_types or ())

    @property
    def expert_count(self) -> int:
        """See `TextConfig`."""
        return self.num_experts if self.has_experts else 0

    @property
    def expert_parameters(self) -> int:
        """See `ExpertsConfig`; without gates."""
        layers = sum(kind == "moe" for kind in self.layer_types or ())
        return 2 * self.num_experts * self.expert_size * (self.moe_latent_size or self.hidden_size) * layers

    @property
    def inner_size(self) -> int:
        """See `TextConfig`."""
        widths = {"mlp": self.intermediate_size}
        if self.has_experts:
            chosen = self.num_experts_per_tok * self.expert_size
            widths["moe"] = max(chosen, self.moe_shared_expert_intermediate_size)
        return max((widths.get(kind, 1) for kind in self.layer_types or ()), default=1)

    @property
    def step_limits(self) -> tuple[float, float]:
        """See `StateSpaceConfig`."""
        return self.time_step_min, float("inf")

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        if self.layer_types is None:
            raise fields.error("it lacks 'layers_block_type' or 'hybrid_override_pattern', which say what layers are")
        super().check(fields)

    def check_experts(self, fields: Fields) -> None:
        """See `ExpertsConfig`."""
        if self.has_experts:
            super().check_experts(fields)

    def check_activation(self, fields: Fields) -> None:
        """See `StateSpaceConfig`: the mixers' is a field of its own."""
