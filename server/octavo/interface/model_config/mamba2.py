"""Mamba 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_HEAD_SIZE, MAX_HEADS
from octavo.interface.model_config.state_space import StateSpaceConfig


class Mamba2Config(StateSpaceConfig):
    """Mamba 2 in every layer, and nothing else: what other families say of attention's heads, this one says of its
    own."""

    is_rotary: ClassVar[bool] = False
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"layer_types", "intermediate_size", "num_key_value_heads", "max_position_embeddings"}
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "layer_norm_epsilon": "rms_norm_eps",
        "head_dim": "mamba_d_head",
        "state_size": "mamba_d_state",
        "num_heads": "mamba_n_heads",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
    }

    num_attention_heads: int = 128
    intermediate_size: int = 1  # there is no MLP
    head_dim: int | None = 64
    rms_norm_eps: float = 1e-5
    mamba_n_heads: int = 128
    mamba_n_groups: int = 8
    mamba_d_state: int = 128
    mamba_d_head: int | None = 64

    @classmethod
    def in_common_words(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConfig`."""
        found = super().in_common_words(config)
        heads = found.setdefault("mamba_n_heads", cls.mamba_n_heads)
        size = found.setdefault("mamba_d_head", cls.mamba_d_head)
        if type(heads) is type(size) is int and 0 < heads <= MAX_HEADS and 1 < size <= MAX_HEAD_SIZE:
            # A wrong one is told by its own name.
            found["num_attention_heads"], found["head_dim"] = heads, size
        return found

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        return True

    @property
    def num_positions(self) -> int:
        """See `TextConfig`: a state has none, so it is what llama.cpp states."""
        return 1 << 20
