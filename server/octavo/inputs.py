"""vLLM's module of prompts: its names here."""

from __future__ import annotations

from octavo.interface.prompts import PromptType as PromptType
from octavo.interface.prompts import TextPrompt as TextPrompt
from octavo.interface.prompts import TokensPrompt as TokensPrompt
