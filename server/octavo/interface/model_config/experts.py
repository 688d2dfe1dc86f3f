"""Fields of families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_EXPERTS, MAX_FACTOR, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import declare, flag, integer, number
from octavo.interface.model_config.text import TextConfig


class ExpertsConfig(TextConfig):
    """``num_experts`` 0: there are none (Gemma 4)."""

    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}

    num_experts: int = integer(1, MAX_EXPERTS)
    num_experts_per_tok: int = integer(1, MAX_EXPERTS)
    moe_intermediate_size: int | None = integer(1, MAX_WIDTH * 4, None)
    norm_topk_prob: bool = flag(False)

    @property
    def expert_count(self) -> int:
        """See `TextConfig`."""
        return self.num_experts

    @property
    def expert_size(self) -> int:
        """Width of what lies between an expert's two layers."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def expert_parameters(self) -> int:
        """Numbers of all experts of all layers, about: some layers may have none."""
        return 3 * self.num_experts * self.expert_size * self.hidden_size * self.num_hidden_layers

    @property
    def inner_size(self) -> int:
        """See `TextConfig`."""
        return max(self.intermediate_size, self.num_experts_per_tok * self.expert_size)

    @property
    def stated_groups(self) -> tuple[int, int]:
        """The groups that config.json states, used or not."""
        return 1, 1

    @property
    def groups(self) -> tuple[int, int] | None:
        """The number of expert groups, and how many of them a token may choose from; None: it chooses from all
        experts."""
        return None

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        self.check_experts(fields)

    def check_experts(self, fields: Fields) -> None:
        """Raise ModelError for numbers of experts that do not fit together."""
        count, chosen = self.num_experts, self.num_experts_per_tok
        if chosen > count:
            limit = f"{fields.name('num_experts')} ({count})"
            raise fields.error(f"{fields.name('num_experts_per_tok')} ({chosen}) must be at most {limit}")
        groups, kept = self.stated_groups
        if count % groups or kept > groups or chosen > count // groups * kept:
            raise fields.error(f"{chosen} of {count} experts cannot be chosen from {kept} of n_group ({groups}) groups")


class GroupedExpertsConfig(ExpertsConfig):
    """Experts in groups, beside shared ones, behind some dense layers."""

    n_group: int | None = integer(1, MAX_WIDTH * 4, None)
    topk_group: int | None = integer(1, MAX_WIDTH * 4, None)
    n_shared_experts: int = integer(0, MAX_WIDTH * 4, 1)
    first_k_dense_replace: int = integer(0, MAX_WIDTH * 4, 0)
    routed_scaling_factor: float = number(0.0, MAX_FACTOR, 1.0, above=True)
    num_nextn_predict_layers: Any = declare(lambda fields, key: fields.config[key], None)  # checked where it is used

    @property
    def stated_groups(self) -> tuple[int, int]:
        """See `ExpertsConfig`."""
        return self.n_group or 1, self.topk_group or 1

    @property
    def groups(self) -> tuple[int, int] | None:
        """See `ExpertsConfig`."""
        return None if self.stated_groups == (1, 1) else self.stated_groups
