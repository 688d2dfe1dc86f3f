"""LoRA adapters as users name them, and as the engine tells them apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """The adapter of a request to `octavo.LLM`, with vLLM's fields. ``lora_int_id``, above 0, is not used: what the
    files hold is what tells adapters apart."""

    lora_name: str
    lora_int_id: int
    lora_path: str  # a folder as PEFT saves it, from hf:// and the like too, or a GGUF file as llama.cpp does

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", str(self.lora_path))):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a text that is not empty, got {value!r}")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be an integer above 0, got {self.lora_int_id!r}")
        self.lora_path = str(self.lora_path)


@dataclass(frozen=True)
class Adapter:
    """An adapter that has been read once. ``digest`` is of its files: other weights under its name have another."""

    name: str
    path: str
    digest: str = ""
    rank: int = 0  # the largest of its layers

    @property
    def key(self) -> str:
        """A key for the KV cache and slots, shared with no other adapter."""
        return f"{self.name}@{self.digest}"


@dataclass
class AdapterAnswer:
    """The core's answer to a request to read an adapter."""

    adapter: Adapter
    error: str | None = None  # why it cannot be used
