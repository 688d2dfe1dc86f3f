"""vLLM's module of requests for adapters: its names here."""

from __future__ import annotations

from octavo.interface.lora import LoRARequest as LoRARequest
