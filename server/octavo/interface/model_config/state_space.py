"""Fields of Mamba 2's recurrence, as hybrid models around it name them."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_HEADS, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import declare, flag, integer
from octavo.interface.model_config.hybrid import MAX_TAPS, HybridConfig
from octavo.interface.state_spec import StateSpec

MAX_STATE_SIZE, MAX_HEAD_SIZE = 256, 256  # as kernels take them
NO_LIMITS = (0.0, float("inf"))
_MAX_EXPANSION = 64


def head_size(fields: Fields, key: str) -> int | None:
    """Read the width of a head; None for "auto"."""
    if fields.config[key] == "auto":
        return None
    size: int = fields.integer(key, 8, MAX_HEAD_SIZE)
    return size


def step_limits(fields: Fields, key: str) -> tuple[float, float]:
    """Read the least and the largest step of time; transformers writes an infinity as an object of one field."""
    try:
        plain = [one["__float__"] if isinstance(one, dict) else one for one in fields.config[key]]
        low, high = (float(one) for one in plain)
    except (TypeError, ValueError, KeyError):
        low, high = -1.0, -1.0
    if not 0.0 <= low <= high:
        fields.refuse(key, "must be two numbers, from 0 on, in order")
    return low, high


class StateSpaceConfig(HybridConfig):
    """A state space with heads that share keys and queries (B and C) within groups."""

    mamba_n_heads: int = integer(1, MAX_HEADS, 128)
    mamba_n_groups: int = integer(1, MAX_HEADS, 1)
    mamba_d_state: int = integer(8, MAX_STATE_SIZE, 256)
    mamba_d_head: int | None = declare(head_size, None)  # None: of equal shares
    mamba_d_conv: int = integer(2, MAX_TAPS, 4)
    mamba_expand: int = integer(1, _MAX_EXPANSION, 2)
    mamba_conv_bias: bool = flag(True)
    mamba_proj_bias: bool = flag(False)
    time_step_limit: tuple[float, float] = declare(step_limits, NO_LIMITS)

    @property
    def mamba_inner_size(self) -> int:
        """Width of all heads together."""
        return self.mamba_expand * self.hidden_size

    def inner_size_name(self, fields: Fields) -> str:
        """Name the fields that say `mamba_inner_size`."""
        return f"{fields.name('mamba_expand')} x {fields.name('hidden_size')}"

    @property
    def mamba_head_size(self) -> int:
        """Width of one head."""
        return self.mamba_d_head or self.mamba_inner_size // self.mamba_n_heads

    @property
    def step_limits(self) -> tuple[float, float]:
        """Bounds of steps of time."""
        return self.time_step_limit

    def state_of(self, ranks: int) -> StateSpec:
        """See `HybridConfig`."""
        return StateSpec(
            self.num_recurrent_layers,
            self.mamba_n_groups // ranks,
            self.mamba_n_heads // ranks,
            self.mamba_d_state,
            self.mamba_head_size,
            self.mamba_d_conv,
        )

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if self.num_recurrent_layers:
            self.check_recurrence(fields)

    def check_recurrence(self, fields: Fields) -> None:
        """Raise ModelError for sizes of the recurrence that do not fit together."""
        heads, groups, inner = self.mamba_n_heads, self.mamba_n_groups, self.mamba_inner_size
        name = fields.name("mamba_n_heads")
        if heads % groups:
            raise fields.error(f"{fields.name('mamba_n_groups')} ({groups}) must divide {name} ({heads})")
        if heads * self.mamba_head_size != inner:
            size = f"{fields.name('mamba_d_head')} ({self.mamba_head_size})"
            raise fields.error(f"{name} ({heads}) of {size} are not {self.inner_size_name(fields)} ({inner})")
        for key, value in (("mamba_d_state", self.mamba_d_state), ("mamba_d_head", self.mamba_head_size)):
            if value % 8 or not 8 <= value <= MAX_WIDTH:
                raise fields.error(f"{fields.name(key)} must be a multiple of 8, got {value}")
        self.check_activation(fields)

    def check_activation(self, fields: Fields) -> None:
        """Raise ModelError for another activation than the mixers have."""
        if self.hidden_act != "silu":
            fields.refuse("hidden_act", "must be 'silu' where layers are recurrent")
