"""vLLM's module of `AsyncLLM`: its names here."""

from __future__ import annotations

from octavo.engine.async_llm_engine import AsyncLLM as AsyncLLM
