"""Streaming a checkpoint's tensors one by one, under the names that Hugging Face checkpoints use."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.interface.model_files import ModelFiles
from octavo.layers.weights import WeightSource


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
