"""GPT-NeoX, Pythia and Dolly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.model_config.declarations import flag, number
from octavo.interface.model_config.text import PartialRotaryConfig


class GPTNeoXConfig(PartialRotaryConfig):
    """Attention and MLP side by side or one behind the other."""

    aliases: ClassVar[Mapping[str, str]] = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    ignored: ClassVar[frozenset[str]] = frozenset({"head_dim", "num_key_value_heads"})

    partial_rotary_factor: float = 0.25
    hidden_act: str = "gelu"
    layer_norm_eps: float = number(0.0, 1.0, 1e-5)
    attention_bias: bool = True
    use_parallel_residual: bool = flag(True)
