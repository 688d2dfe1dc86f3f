"""vLLM's module of parameters of pooling: its names here."""

from __future__ import annotations

from octavo.interface.pooling_params import PoolingParams as PoolingParams
