"""Small models that a first visitor may want next: what the hub has of them, and how long they take to come."""

from __future__ import annotations

import threading

from octavo.fetch.progress import format_bytes

# In the order of their size: what a laptop's CPU talks with at reading speed.
SMALL_MODELS = (
    "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
    "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
)
_BYTES_A_SECOND = 12_500_000  # of a line of 100 Mbit/s
_PATIENCE = 2.0  # seconds for the hub to answer


class Offers:
    """Asks the hub in the background, from the first moment; without a hub there are no offers."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._threads = [threading.Thread(target=self._ask, args=(name,), daemon=True) for name in SMALL_MODELS]
        for thread in self._threads:
            thread.start()

    def wait(self) -> str:
        """Name the models that the hub has, each with its size and a rough time; empty where it does not answer."""
        for thread in self._threads:
            thread.join(_PATIENCE / len(self._threads))
        sizes = dict(self._sizes)
        return ", ".join(f"{name} ({_cost(sizes[name])})" for name in SMALL_MODELS if name in sizes)

    def _ask(self, name: str) -> None:
        from octavo.errors import OctavoError
        from octavo.fetch.download import ResponseError, UnreachableError
        from octavo.fetch.huggingface import bytes_to_fetch

        try:
            self._sizes[name] = bytes_to_fetch(name, _PATIENCE)
        except (OctavoError, ResponseError, UnreachableError, OSError):
            pass


def _cost(size: int) -> str:
    seconds = size / _BYTES_A_SECOND
    time = f"{max(1, round(seconds / 10)) * 10} s" if seconds < 90 else f"{round(seconds / 60)} min"
    return f"{format_bytes(size)}, about {time} at 100 Mbit/s"
