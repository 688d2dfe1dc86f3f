"""Fields of llama.cpp's samplers that shape a distribution, by their names in SamplingParams."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from octavo.entrypoints.fields.values import FromFloat, Index
from octavo.interface import sampling_params as limits

_Breaker = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
_Share = Annotated[float, Field(ge=0, le=1)]


class Shapes(BaseModel):
    """DRY, XTC and top-n-sigma."""

    dry_multiplier: Annotated[float, Field(ge=0, le=limits.MAX_DRY_MULTIPLIER)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=limits.MAX_DRY_BASE)] | None = None
    dry_allowed_length: Index | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=limits.MAX_INT), FromFloat] | None = None
    dry_sequence_breakers: Annotated[list[_Breaker], Field(max_length=limits.MAX_DRY_BREAKERS)] | None = None
    xtc_probability: _Share | None = None
    xtc_threshold: _Share | None = None
    top_n_sigma: Annotated[float, Field(ge=-1)] | None = None


SHAPES = tuple(Shapes.model_fields)
