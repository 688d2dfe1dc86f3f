"""Falcon-H1."""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_FACTOR, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import declare, flag, integer, number
from octavo.interface.model_config.state_space import StateSpaceConfig


def _factors(count: int) -> Any:
    def read(fields: Fields, key: str) -> list[float]:
        value = fields.config[key]
        stated = value if isinstance(value, list | tuple) else []
        if len(stated) != count or any(type(one) not in (int, float) or not 0 < one <= MAX_FACTOR for one in stated):
            fields.refuse(key, f"must be {count} numbers above 0, at most {MAX_FACTOR:g}")
        return [float(one) for one in stated]

    return declare(read, [1.0] * count)


def _factor() -> Any:
    return number(0.0, MAX_FACTOR, 1.0, above=True)


class FalconH1Config(StateSpaceConfig):
    """Attention and Mamba 2 side by side in every layer, with multipliers (muP) of what linear layers give: of the five
    parts of Mamba's input projection, of gates and of the MLP's results."""

    ignored: ClassVar[frozenset[str]] = frozenset({"layer_types", "layers_block_type"})

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    mamba_d_ssm: int | None = integer(8, MAX_WIDTH, 1024, null=True)  # None: mamba_expand x hidden_size
    mamba_rms_norm: bool = flag(False)
    mamba_norm_before_gate: bool = flag(True)
    projectors_bias: bool = flag(False)
    embedding_multiplier: float = _factor()
    lm_head_multiplier: float = _factor()
    attention_in_multiplier: float = _factor()
    attention_out_multiplier: float = _factor()
    key_multiplier: float = _factor()
    ssm_in_multiplier: float = _factor()
    ssm_out_multiplier: float = _factor()
    ssm_multipliers: list[float] = _factors(5)
    mlp_multipliers: list[float] = _factors(2)

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        return True

    @property
    def mamba_inner_size(self) -> int:
        """See `StateSpaceConfig`."""
        return self.mamba_d_ssm or super().mamba_inner_size

    def inner_size_name(self, fields: Fields) -> str:
        """See `StateSpaceConfig`."""
        return super().inner_size_name(fields) if self.mamba_d_ssm is None else fields.name("mamba_d_ssm")
