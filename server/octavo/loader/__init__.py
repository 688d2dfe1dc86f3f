"""Finding a model's files, reading its description and streaming its weights.

`sources` finds or fetches, `model_config` reads config.json, `checkpoint` streams tensors (safetensors or GGUF).
Nothing here imports torch before a tensor is asked for, so the API process can find models and build tokenizers
without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.interface.model_files import ModelFiles as ModelFiles
    from octavo.loader.checkpoint import WeightSource as WeightSource
    from octavo.loader.checkpoint import iterate_weights as iterate_weights

_EXPORTS = {
    "iterate_weights": "octavo.loader.checkpoint",
    "WeightSource": "octavo.loader.checkpoint",
    "ModelFiles": "octavo.interface.model_files",
}
__all__ = ["ModelFiles", "WeightSource", "iterate_weights"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'octavo.loader' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
