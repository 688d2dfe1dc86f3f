"""Streaming a checkpoint's tensors one by one, under the names that Hugging Face checkpoints use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.mtp import PredictionConfig
from octavo.interface.model_files import ModelFiles
from octavo.layers.quantization.weight_format import StoredModule
from octavo.layers.weights import WeightSource
from octavo.models.base import CausalLM, Model
from octavo.models.registry import model_class

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # by the weights' own names

# Fields of config.json, and how checkpoints number what they count.
_COUNTED = {
    "num_hidden_layers": re.compile(r"(?:^|\.)(?:layers?|h)\.(\d+)\."),
    "num_experts": re.compile(r"\.experts\.(\d+)\."),
}

# Parts of Qwen3.5's layer for prediction -> DeepSeek's names of them.
_PREDICTION_PARTS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


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


def stored_weights(config: ModelConfig, load_format: str = "auto") -> list[tuple[str, WeightSource]]:
    """The checkpoint's tensors, unread, those of experts one by one; none for a dummy. Raises ModelError."""
    if load_format == "dummy":
        return []
    cls = model_class(config.architecture)
    stored = iterate_weights(config.files)
    if isinstance(config.text, PredictionConfig):
        stored = _prediction_layers(stored, config, config.text)
    elif cls.leaves_out_mtp_layers:
        stored = (entry for entry in stored if _layer_of(entry[0]) < config.num_layers)
    weights = list(chain.from_iterable(cls.experts_apart(name, source, config) for name, source in stored))
    _check_counts(config, [name for name, _ in weights])
    return _with_table(weights, cls, config)


def _with_table(
    weights: list[tuple[str, WeightSource]], cls: type[Model], config: ModelConfig
) -> list[tuple[str, WeightSource]]:
    """``weights`` with the head of a tied model as the table of tokens, where the checkpoint has the head alone."""
    if not issubclass(cls, CausalLM) or not config.text.tie_word_embeddings:
        return weights
    own_names = [cls.weight_name(name) for name, _ in weights]
    if TABLE in own_names or HEAD not in own_names:
        return weights
    return [(TABLE if own == HEAD else name, source) for own, (name, source) in zip(own_names, weights, strict=True)]


def _prediction_layers(
    stored: Iterable[tuple[str, WeightSource]], config: ModelConfig, text: PredictionConfig
) -> Iterator[tuple[str, WeightSource]]:
    """The tensors of layers for multi-token prediction, as those of a model of these alone; embedding and heads, if it
    has such, are the whole model's where the layers have no copies. Raises ModelError for a checkpoint without any."""
    own, shared = dict[str, WeightSource](), dict[str, WeightSource]()
    first, count = text.prediction_layer, text.num_hidden_layers
    heads = ["lm_head.", *(f"model.more_heads.{i}." for i in range(count - 1))]
    for stored_name, source in stored:
        name = _numbered(stored_name, first)
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        layer = int(match[1]) - first if match else -1
        if match and 0 <= layer < count:
            own[_of_prediction(match[2], layer, heads[layer])] = source
        elif name.startswith("model.embed_tokens."):
            shared[name] = source
        elif name.startswith("lm_head."):
            shared |= {head + name.removeprefix("lm_head."): source for head in heads}
    if not own and config.files.weights:
        raise ModelError(
            f"{config.model}: the configuration's {text.counted_by} says that there are layers for multi-token "
            "prediction, and the checkpoint has no tensors of them, as some programs leave them out when they save; "
            "give speculative_config another method than mtp, or none"
        )
    yield from ({**shared, **own} if text.has_tables else own).items()


def _numbered(name: str, first: int) -> str:
    """The name of a tensor for prediction among the model's layers, as DeepSeek has them, where checkpoints keep these
    apart (Qwen3.5)."""
    if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", name):
        return f"model.layers.{first + int(match[1])}.{match[2]}"
    if match := re.fullmatch(r"mtp\.(\w+)\.(.*)", name):
        return f"model.layers.{first}.{_PREDICTION_PARTS.get(match[1], match[1])}.{match[2]}"
    return name


def _of_prediction(part: str, layer: int, head: str) -> str:
    """The name of a tensor of layer ``layer`` among those for prediction, which the checkpoint calls ``part`` there."""
    module, _, leaf = part.partition(".")
    if module == "shared_head":
        kind, _, leaf = leaf.partition(".")
        return head + leaf if kind == "head" else f"model.norms.{layer}.{leaf}"
    if module in ("enorm", "hnorm", "eh_proj"):
        return f"model.{module}.{layer}.{leaf}"
    return f"model.{part}" if module == "embed_tokens" else f"model.layers.{layer}.{part}"


def _check_counts(config: ModelConfig, names: list[str]) -> None:
    """Raise ModelError for more layers or experts than the checkpoint has tensors of: a model of absurdly many would
    take long to build, only to find that tensors are missing."""
    for field, pattern in _COUNTED.items():
        found = {int(match[1]) for name in names if (match := pattern.search(name))}
        asked = config.num_layers if field == "num_hidden_layers" else config.num_experts
        if found and asked > max(found) + 1:
            raise ModelError(
                f"{config.model}: the configuration's {field} is {asked}, the checkpoint has {max(found) + 1}; "
                "the weights and the configuration are not of one model"
            )


def _layer_of(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def linear_modules(
    weights: Iterable[tuple[str, WeightSource]], weight_name: Callable[[str], str | None]
) -> dict[str, StoredModule]:
    """The modules of a checkpoint with these ``weights``, by the names that they have in a model which calls the
    checkpoint's tensors ``weight_name``."""
    found: dict[str, tuple[str, dict[str, WeightSource]]] = {}
    for stored_name, source in weights:
        name = weight_name(stored_name)
        if name is not None:
            module, dot, leaf = name.partition(".weight.")  # bitsandbytes hangs tensors below the weight's own
            leaf = f"weight.{leaf}"
            if not dot:
                module, _, leaf = name.rpartition(".")
            stored_module = stored_name.removesuffix(leaf).removesuffix(".")
            found.setdefault(module, (stored_module, {}))[1][leaf] = source
    return {module: StoredModule(*entry) for module, entry in found.items()}
