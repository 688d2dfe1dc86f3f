"""`generate` of transformers with the weights that Octavo runs: the baseline of comparisons."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.fetch.description import describe
from octavo.interface.engine_config import EngineConfig
from octavo.interface.quantizations import ONLINE
from octavo.plan.measure import measure

WARM_UP_TOKENS = 2  # both sides of a comparison write so many before the clock runs


def transformers_arguments(gguf_file: Path) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` of transformers reads a GGUF file as floats; newer versions
    leave it quantised."""
    import transformers

    unpack = getattr(transformers, "GgufConfig", None)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    return where | ({"quantization_config": unpack(dequantize=True)} if unpack else {})


def precision(config: EngineConfig) -> dict[str, str]:
    """Types of the weights, as the files hold them, of the activations that they are multiplied by, and of the KV
    cache."""
    from octavo.worker.device import choose_device

    config = replace(config, device=choose_device(config.device).type)
    memory = measure(config, 1)
    weights = memory.weight_dtype
    if config.model.quantization not in ONLINE and config.load_format != "dummy":
        filed = describe(config.model.files).quantization
        weights = weights if filed in ("F32", "F16", "BF16") else filed
    activations = config.model.dtype
    if config.device == "cpu" and memory.weight_dtype not in ("float32", "bfloat16", "float16"):
        activations = "int8"
    kv_cache = memory.specs[0].dtype if memory.specs else activations
    return {"weights": weights, "activations": activations, "kv_cache": kv_cache}


def named(types: dict[str, str]) -> str:
    """Describe the result of `precision`."""
    found = types["weights"], types["activations"], types["kv_cache"]
    return found[0] if len(set(found)) == 1 else "{} weights, {} activations, {} KV cache".format(*found)


def load(config: EngineConfig, dtype: str | None = None) -> Any:
    """Load the same weights in transformers on the same device, in ``dtype``, else in Octavo's dtype. Raises
    ConfigError."""
    try:
        import torch
        import transformers
    except ImportError:
        raise ConfigError("Hugging Face generate needs transformers: pip install transformers accelerate") from None
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(config.model.files.path)}
    if config.model.files.format == "gguf":
        where = transformers_arguments(Path(config.model.files.weights[0]))
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    found = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=getattr(torch, dtype or config.model.dtype)
    )
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    return found.train(False).to("cuda" if on_gpu else "cpu")


@dataclass
class Generated:
    """A batch that was generated. Times in seconds from its start. ``tokens``: those of each row."""

    tokens: list[list[int]]
    first_token: float = 0.0
    elapsed: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all rows over the whole time, that of the prompts included."""
        return sum(map(len, self.tokens)) / self.elapsed


class _Streamer:
    """Streamer that `generate` calls with the prompts and then with every step's tokens."""

    def __init__(self, started: float, on_step: Callable[[list[int]], None] | None) -> None:
        self._started, self._on_step = started, on_step
        self.first_token: float | None = None
        self._prompts_seen = False

    def put(self, tokens: Any) -> None:
        if not self._prompts_seen:
            self._prompts_seen = True
            return
        if self.first_token is None:
            self.first_token = time.perf_counter() - self._started
        if self._on_step is not None:
            self._on_step(tokens.tolist())

    def end(self) -> None:
        pass


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    max_tokens: int,
    eos_token_ids: Sequence[int] = (),
    on_step: Callable[[list[int]], None] | None = None,
) -> Generated:
    """Greedy, in one left-padded batch of token ids. Rows end at ``eos_token_ids``; without any, all have
    ``max_tokens``. ``on_step`` gets every step's token of each row."""
    import torch

    longest, started = max(map(len, prompts)), time.perf_counter()
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * empty + prompt for empty, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * empty + [1] * (longest - empty) for empty in padding]
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    settings: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
    settings |= {"eos_token_id": list(eos_token_ids)} if eos_token_ids else {"min_new_tokens": max_tokens}
    streamer = _Streamer(started, on_step)
    with torch.inference_mode():
        found = model.generate(
            **{name: tensor.to(model.device) for name, tensor in inputs.items()}, streamer=streamer, **settings
        )
    elapsed = time.perf_counter() - started
    rows = [_until(row[longest:].tolist(), eos_token_ids) for row in found]
    return Generated(rows, streamer.first_token or elapsed, elapsed)


def _until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """``tokens`` up to the first of ``ends``, which counts."""
    at = next((position for position, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]
