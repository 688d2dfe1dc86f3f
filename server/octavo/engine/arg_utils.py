"""vLLM's module of engine arguments: its names here."""

from __future__ import annotations

from octavo.engine.args import EngineArgs as EngineArgs
from octavo.engine.llm_options import AsyncEngineArgs as AsyncEngineArgs
