"""vLLM's module of `LLM`: its names here."""

from __future__ import annotations

from octavo.llm import LLM as LLM
