"""The embedded model as transformers reads it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.bench.hugging_face import transformers_arguments


@lru_cache(maxsize=1)
def transformers_model(gguf_file: str) -> PreTrainedModel:
    """The model in a GGUF file, float32, dequantised by gguf's own code."""
    path = Path(gguf_file)
    uncached = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = lru_cache(uncached)  # transformers asks 397 times for it, a third of the load
    try:
        return AutoModelForCausalLM.from_pretrained(**transformers_arguments(path), dtype=torch.float32).eval()
    finally:
        gguf.get_tensor_name_map = uncached
