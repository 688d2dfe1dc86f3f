"""Convert the pooling of a GGUF file to the configuration files of sentence-transformers."""

from __future__ import annotations

from typing import Any

from octavo.errors import ModelError
from octavo.gguf.encoders import ENCODERS
from octavo.gguf.header import GGUFFile
from octavo.interface.config_checks import shown_value

_NONE, _MEAN, _CLS, _LAST, _RANK = range(5)
_MODES = {_MEAN: "mean", _CLS: "cls", _LAST: "lasttoken"}
# Folder as in sentence-transformers' checkpoints -> the layer's weight.
DENSE = {f"{number}_Dense": f"dense_{number}.weight" for number in (2, 3)}
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
    if stated == _NONE and (file.architecture in ENCODERS or file.architecture == "gemma-embedding"):
        stated = _MEAN
    if stated == _NONE and any("embed" in str(file.metadata.get(name, "")).lower() for name in _NAMES):
        stated = _LAST  # decoders are trained to put a text's meaning into the state of its last token
    if stated not in _MODES:
        return {}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **dict.fromkeys(dense := _dense(file), "Dense")}
    kinds[f"{len(kinds)}_Normalize"] = "Normalize"
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    configs = {f"{path}/config.json": config for path, config in dense.items()}
    return {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": _MODES[stated]}, **configs}


def _dense(file: GGUFFile) -> dict[str, dict[str, Any]]:
    """Folder and config.json of each linear layer behind pooling, whose weights stay in the file."""
    found = {}
    for folder, name in DENSE.items():
        info = file.tensors.get(name)
        if info is None:
            continue
        if len(info.shape) != 2:
            raise ModelError(f"{file.path}: {name} is {list(info.shape)}, not a matrix; the file is damaged")
        outputs, inputs = info.shape
        identity = "torch.nn.modules.linear.Identity"
        sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
        found[folder] = {**sizes, "activation_function": identity, "tensor": name}
    return found


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
