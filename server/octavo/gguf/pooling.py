"""Convert the pooling of a GGUF file to the configuration files of sentence-transformers."""

from __future__ import annotations

from typing import Any

from octavo.errors import ModelError
from octavo.gguf.encoders import ENCODERS
from octavo.gguf.header import GGUFFile
from octavo.interface.config_checks import shown_value

_NONE, _MEAN, _CLS, _LAST, _RANK = range(5)
_MODES = {_MEAN: "mean", _CLS: "cls", _LAST: "lasttoken"}
_NAMES = ("general.name", "general.basename", "general.finetune")


def pooling_modules(file: GGUFFile) -> dict[str, Any]:
    """Names and contents of modules.json and what it points to; none where the file does not say how it pools. Raises
    ModelError."""
    stated = file.metadata.get(f"{file.architecture}.pooling_type", _NONE)
    if isinstance(stated, bool) or not isinstance(stated, int) or not _NONE <= stated <= _RANK:
        raise ModelError(
            f"{file.path}: {file.architecture}.pooling_type must be from 0 to 4, got {shown_value(stated)}; "
            "fetch the file again"
        )
    if stated == _NONE and file.architecture in ENCODERS:
        stated = _MEAN
    if stated == _NONE and any("embed" in str(file.metadata.get(name, "")).lower() for name in _NAMES):
        stated = _LAST  # decoders are trained to put a text's meaning into the state of its last token
    if stated not in _MODES:
        return {}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    return {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": _MODES[stated]}}


def answer_words(file: GGUFFile) -> list[str] | None:
    """The two tokens, against and for, of a model that ranks documents by one of them; None: it does not rank. Raises
    ModelError for one that ranks otherwise."""
    arch = file.architecture
    if file.metadata.get(f"{arch}.pooling_type") != _RANK or arch in ENCODERS:
        return None
    labels = file.metadata.get(f"{arch}.classifier.output_labels")
    if not isinstance(labels, list) or sorted(map(str.lower, labels)) != ["no", "yes"]:
        raise ModelError(
            f"{file.path}: it ranks documents ({arch}.pooling_type 4) by labels {shown_value(labels)}; only answers "
            "yes and no are supported: take the safetensors"
        )
    return ["no", "yes"]
