"""The stages of a pipeline in one process, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.ranks import Stage
from octavo.layers.attention import ForwardContext
from octavo.layers.parallel import TensorParallel


class StagedModel:
    """As a model of one stage for `support.paged.logits_of`; ``build`` loads a stage."""

    def __init__(self, count: int, build: Callable[[TensorParallel], Any]) -> None:
        self.stages = [build(TensorParallel(stage=Stage(number, count))) for number in range(count)]

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [spec for stage in self.stages for spec in stage.kv_cache_specs()]

    def state_spec(self) -> None:
        """Recurrent layers are not dealt to stages yet."""

    def __call__(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        caches, states = iter(context.kv_caches), ()
        for stage in self.stages:
            own = [next(caches) for _ in stage.kv_cache_specs()]
            states = stage.begin(input_ids, positions, ForwardContext(context.metadata, own), *states)
        return self.stages[-1].finish(*states)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].compute_logits(hidden)
