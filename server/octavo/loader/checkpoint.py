"""Streaming a checkpoint's tensors one by one, under the names that Hugging Face checkpoints use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from octavo.interface.model_files import ModelFiles

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """One tensor of a checkpoint that has not been read yet.

    ``qtype`` is how it is stored ("F32", "BF16", "F8_E4M3", "Q4_1", ...); ``shape`` is the tensor's, not the bytes'.
    """

    name: str
    shape: tuple[int, ...]
    qtype: str

    def load(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read it (dequantised) as ``dtype``, or as it is stored; the tensor belongs to the caller."""
        ...

    def load_into(self, target: torch.Tensor) -> None:
        """Read it (dequantised) into ``target``, which has its shape: without a copy where that can be."""
        ...


def iterate_weights(files: ModelFiles) -> Iterator[tuple[str, WeightSource]]:
    """Every tensor of the checkpoint, in the order of the files; nothing is read before `load`. Raises ModelError."""
    if files.format == "gguf":
        from octavo.gguf.weights import gguf_weights

        yield from gguf_weights(files.weights[0])
    else:
        from octavo.loader.safetensors_reader import SafetensorsFile

        # All tables first: a damaged last file shows before the first one was read.
        for sources in [list(SafetensorsFile(path).sources()) for path in files.weights]:
            yield from ((source.name, source) for source in sources)
