"""Options of attention beside multiplying queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The options of one layer's attention; they are the same in every step."""

    scale: float | None = None  # of the scores; None: 1 / sqrt(head size)
    window: int | None = None  # a row attends to the last `window` positions, its own included; None: to all
    softcap: float | None = None  # c replaces scores by c * tanh(score / c)
    k_scale: float = 1.0  # an fp8 cache holds k / k_scale and v / v_scale
    v_scale: float = 1.0
    # float32 [Hq]: each head has one more score, which takes part in the softmax and has no value (gpt-oss); it is
    # neither scaled nor capped.
    sinks: Tensor | None = None
    chunked: bool = False  # windows do not slide: they begin at the last multiple of `window` (Llama 4)

    def scale_of(self, head_size: int) -> float:
        """The factor of the scores of heads of ``head_size``."""
        return head_size**-0.5 if self.scale is None else self.scale
