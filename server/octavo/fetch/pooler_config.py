"""Read the pooling from a model's files: sentence-transformers' modules, and labels in config.json. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.interface.architectures import ENCODERS
from octavo.interface.config_checks import Fields
from octavo.interface.model_files import ModelFiles
from octavo.interface.pooling import DenseModule, NormModule, PoolerConfig
from octavo.system.file_reading import read_json, read_json_list
from octavo.text.tokenizer import Tokenizer

# Names of sentence-transformers -> ours; flags in the order in which it puts the vectors of several.
_MODES = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "max": "max",
    "weightedmean": "weightedmean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
# Modules that are not built -> the rest of the sentence that says so.
_REFUSED = {
    "Router": "which sends queries and documents each through modules of their own; serve the folder of each by itself",
    "Asym": "which sends queries and documents each through modules of their own; serve the folder of each by itself",
    "WeightedLayerPooling": "which mixes the states of several layers; take a model that pools those of the last one",
}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_EMBEDDING_GEMMA = "Gemma3TextModel"
_GEMMA_SIZES = (768, 512, 256, 128)  # to which EmbeddingGemma's vectors may be cut
_MAX_WIDTH, _MAX_LABELS = 1 << 16, 1 << 16


def load_pooler_config(files: ModelFiles, hf_config: dict[str, Any]) -> PoolerConfig:
    """Read the pooling of the model whose config.json is ``hf_config``. Raises ModelError for an unsupported module."""
    architecture = str(hf_config["architectures"][0])
    if architecture.endswith("ForSequenceClassification"):
        return _classifier(files, hf_config, architecture)
    answer = None if architecture in ENCODERS else _one_token_answer(files, hf_config)
    if answer is not None:
        return answer
    tasks = ("embed",) if architecture in ENCODERS else ("generate", "embed")
    dimensions = _dimensions(hf_config, str(files.path / "config.json"))
    modules = files.path / "modules.json"
    if not modules.exists():
        by_last = architecture not in ENCODERS and "embed" in files.model.rpartition("/")[2].lower()
        by_last |= architecture.startswith("Qwen3VL")  # as Qwen3-VL-Embedding
        pooling = "last" if by_last else PoolerConfig.pooling
        lacks = _without_dense(files, "modules.json") if architecture == _EMBEDDING_GEMMA else None
        return PoolerConfig(tasks=tasks, pooling=pooling, dimensions=dimensions, lacks=lacks)
    found = _modules(files, modules)
    if architecture == _EMBEDDING_GEMMA and files.format == "gguf" and len(found["dense"]) < 2 and "lacks" not in found:
        found["lacks"] = _without_dense(files, "dense_2 or dense_3")
    if "lacks" in found:
        found["dense"] = ()
    return PoolerConfig(tasks=tasks, dimensions=dimensions, **found)


def _modules(files: ModelFiles, source: Path) -> dict[str, Any]:
    """Read fields of `PoolerConfig` from modules.json, ``source``, and what it points to."""
    found: dict[str, Any] = {"normalize": False, **_prompts(files.path / "config_sentence_transformers.json")}
    layers: list[DenseModule | NormModule] = []
    for module in read_json_list(source):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        path = _folder(files.path, module.get("path", "") if isinstance(module, dict) else "", source)
        if kind in ("Dense", "LayerNorm") and ("pooling" not in found or found["normalize"]):
            side = "behind Normalize" if found["normalize"] else "before Pooling"
            raise ModelError(f"{source} has {kind} {side}; it is built between the two alone: take another model")
        if kind == "Pooling":
            found |= {"pooling": _pooling(path / "config.json"), "pools_prompt": _pools_prompt(path / "config.json")}
        elif kind == "Dense" and not path.is_dir():
            found["lacks"] = _without_dense(files, path.name)
        elif kind in _LAYERS:
            layers.append(_LAYERS[kind](path, files))
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            known = "Transformer, Pooling, Dense, LayerNorm and Normalize"
            why = _REFUSED.get(kind, f"which is not built; known are {known}")
            raise ModelError(f"{source} has a module {kind!r}, {why}")
    return {**found, "dense": tuple(layers)}


def _without_dense(files: ModelFiles, missing: str) -> str:
    """`PoolerConfig.lacks` of files without what is ``missing`` of the layers behind pooling."""
    cure = "take a file that has it, or the safetensors" if files.format == "gguf" else "fetch the whole model"
    return f"{files.model} lacks {missing}, without which vectors miss the dense layers behind pooling: {cure}"


def max_sequence_length(files: ModelFiles) -> int | None:
    """The number of tokens that a sentence-transformers model is made for; None where its files say nothing."""
    path = files.path / "sentence_bert_config.json"
    if not path.exists():
        return None
    length: int | None = Fields(read_json(path), str(path), str).integer("max_seq_length", 1, 1 << 27, optional=True)
    return length


# The prompt that Qwen3-Reranker was trained with.
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def _one_token_answer(files: ModelFiles, hf_config: dict[str, Any]) -> PoolerConfig | None:
    """Read the head of a language model that answers in one of two tokens whether a document matches a query: from its
    modules, from vLLM's ``classifier_from_token``, or from its name. None for other models."""
    modules = files.path / "modules.json"
    listed = read_json_list(modules) if modules.exists() else []
    folders = [
        m.get("path", "") for m in listed if isinstance(m, dict) and str(m.get("type", "")).endswith(".LogitScore")
    ]
    words = hf_config.get("classifier_from_token")
    if folders:
        path = _folder(files.path, folders[0], modules) / "config.json"
        fields = Fields(read_json(path), str(path), str)
        ids = tuple(fields.integer(f"{kind}_token_id", 0, 1 << 24) for kind in ("false", "true"))
    elif words is not None or "qwen3-reranker" in files.model.lower():
        words = ["no", "yes"] if words is None else words
        if not isinstance(words, list) or len(words) != 2:
            raise ModelError(f"classifier_from_token must be two tokens, against and for, got {words!r}")
        found = Tokenizer.from_files(files).convert_tokens_to_ids(words)
        if None in found:
            raise ModelError(f"{files.model}: its vocabulary lacks the answer {words[found.index(None)]!r}")
        ids = tuple(one for one in found if one is not None)
    else:
        return None
    return PoolerConfig(
        tasks=("generate", "classify"),
        pooling="last",
        activation="sigmoid",
        labels=("relevant",),
        token_ids=ids,
        template=_pair_template(files),
    )


def _pair_template(files: ModelFiles) -> str:
    """The model's own chat template where that knows queries and documents, as sentence-transformers asks it to."""
    roles = [{"role": role, "content": f"{{{role}}}"} for role in ("query", "document")]
    try:
        text = Tokenizer.from_files(files).apply_chat_template(roles)
    except (ValueError, ModelError):
        return _QWEN3_RERANKER
    return text if "{query}" in text and "{document}" in text else _QWEN3_RERANKER


def _folder(root: Path, name: Any, source: Path) -> Path:
    if not isinstance(name, str) or name.startswith("/") or ".." in Path(name).parts:
        raise ModelError(f"{source} points to {name!r}, which is not a folder beside it; refused")
    return root / name


def _prompts(path: Path) -> dict[str, Any]:
    """Read what is put before texts, and which of it where a request names none."""
    if not path.exists():
        return {}
    config = read_json(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of texts; correct the file or fetch the model again")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        known = ", ".join(prompts) or "none"
        raise ModelError(f"{path}: default_prompt_name is {default!r:.100}, which prompts ({known}) lacks; correct it")
    return {"prompts": prompts, "default_prompt": default}


def _pools_prompt(path: Path) -> bool:
    return Fields(read_json(path), str(path), str).flag("include_prompt") is not False


def _pooling(path: Path) -> str:
    config = read_json(path)
    stated = config.get("pooling_mode")
    if stated is None:
        is_on = {key for key, value in config.items() if key.startswith("pooling_mode_") and value}
        stated = [*(key for key in _MODES if key in is_on), *sorted(is_on - _MODES.keys())]
    chosen = stated if isinstance(stated, list) else [stated]
    names = [_MODES.get(mode, "") if isinstance(mode, str) else "" for mode in chosen]
    if not names or "" in names or len({*names}) < len(names):
        raise ModelError(
            f"{path} asks for pooling by {' and '.join(map(str, chosen)) or 'nothing'}, which is not supported: known "
            f"are {', '.join(_MODES)}"
        )
    return "+".join(names)


def _dense(folder: Path, files: ModelFiles) -> DenseModule:
    path = folder / "config.json"
    config = read_json(path)
    fields = Fields(config, str(path), str)
    inputs, outputs = fields.integer("in_features", 1, _MAX_WIDTH), fields.integer("out_features", 1, _MAX_WIDTH)
    fields.flag("bias")
    activation = _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"), path)
    if (tensor := fields.text("tensor")) and files.format == "gguf":
        return DenseModule(files.weights[0], inputs, outputs, False, activation, tensor)
    if config.get("use_residual"):
        raise ModelError(f"{path} asks for use_residual, which is not supported")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelError(
                f"{path}: {key} is {config[key]!r:.60}; only sentence_embedding is built: take another model"
            )
    return DenseModule(_weights(folder), inputs, outputs, config.get("bias", True), activation)


def _norm(folder: Path, files: ModelFiles) -> NormModule:
    path = folder / "config.json"
    size = Fields(read_json(path), str(path), str).integer("dimension", 1, _MAX_WIDTH)
    return NormModule(_weights(folder), size)


# Modules that are layers of vectors -> what reads them.
_LAYERS: dict[str, Callable[[Path, ModelFiles], DenseModule | NormModule]] = {"Dense": _dense, "LayerNorm": _norm}


def _weights(folder: Path) -> str:
    """The file of a module's weights. Raises ModelError."""
    weights = folder / "model.safetensors"
    if not weights.exists():
        raise ModelError(
            f"{folder} has no model.safetensors; fetch the model again, or use a safetensors version of it"
        )
    return str(weights)


def _activation(name: Any, path: Path) -> str:
    kind = str(name).rpartition(".")[2].partition("(")[0]
    if kind not in _ACTIVATIONS:
        raise ModelError(f"{path} asks for activation {name!r}; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[kind]


def _dimensions(hf_config: dict[str, Any], source: str) -> tuple[int, ...] | None:
    stated = hf_config.get("matryoshka_dimensions")
    if stated is not None:
        if not isinstance(stated, list) or not stated or any(type(one) is not int or one < 1 for one in stated):
            raise ModelError(f"{source}: matryoshka_dimensions must be a list of positive integers; correct the file")
        return tuple(stated)
    if hf_config["architectures"][0] == _EMBEDDING_GEMMA:  # whose files do not say it
        return tuple(size for size in _GEMMA_SIZES if size <= hf_config.get("hidden_size", 0)) or None
    return () if hf_config.get("is_matryoshka") is True else None


def _classifier(files: ModelFiles, hf_config: dict[str, Any], architecture: str) -> PoolerConfig:
    path = files.path / "config.json"
    count = num_labels(hf_config)
    names = hf_config.get("id2label") or {}
    labels = tuple(str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(count))
    one_of_many = count > 1 and hf_config.get("problem_type") != "multi_label_classification"
    activation = "softmax" if one_of_many else "sigmoid"
    own = hf_config.get("sentence_transformers")
    stated = (
        own.get("activation_fn") if isinstance(own, dict) else hf_config.get("sbert_ce_default_activation_function")
    )
    if stated is not None:
        activation = _activation(stated, path)
    pooling = "last" if architecture not in ENCODERS else hf_config.get("classifier_pooling", "cls")
    if pooling not in ("last", "cls", "mean"):
        raise ModelError(f"{path}: classifier_pooling must be cls or mean, got {pooling!r}; correct the file")
    return PoolerConfig(tasks=("classify",), pooling=pooling, activation=activation, labels=labels)


def num_labels(hf_config: dict[str, Any]) -> int:
    """The classes of a model's head. Raises ModelError."""
    names, stated = hf_config.get("id2label"), hf_config.get("num_labels")
    count = len(names) if isinstance(names, dict) else 2 if stated is None else stated
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_LABELS:
        raise ModelError(f"config.json: num_labels must be an integer from 1 to {_MAX_LABELS}, got {count!r}")
    return count
