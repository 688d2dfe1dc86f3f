"""Parameters of `LLM.embed`, `encode`, `classify` and `score` beside the prompts; vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.interface.pooling import POOLINGS, PoolerConfig, Pooling, parts_of

# What a text is for, also in Cohere's words -> names that prompts have for it, in any case.
INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    "query": (queries := ("query", "search_query", "retrieval-query", "s2p_query")),
    "search_query": queries,
    "document": (documents := ("document", "passage", "search_document", "retrieval-document", "corpus")),
    "passage": documents,
    "search_document": documents,
    "classification": ("classification",),
    "clustering": ("clustering",),
}


@dataclass
class PoolingParams:
    """``dimensions``: cut vectors to so many numbers (models made for that, Matryoshka). ``normalize``, or
    ``use_activation``: vectors of length 1 (None: as the model's files say). ``use_activation`` of classes: as
    probabilities, not logits (None: yes). ``truncate_prompt_tokens``: tokens of a prompt to keep, -1 for as many as the
    model takes (None: longer ones are refused). ``pooling``: one of POOLINGS (None: the model's own).
    ``prompt_name``: the prompt of the model's files that is put before the text, or ``input_type``, one of INPUT_TYPES,
    what the text is for (None: the model's default prompt)."""

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    pooling: str | None = None
    prompt_name: str | None = None
    input_type: str | None = None


def embedding_pooling(config: PoolerConfig, params: PoolingParams, hidden_size: int) -> Pooling:
    """Return the pooling for a vector. Raises ValueError, naming the field, for a request that the model cannot
    serve."""
    if "embed" not in config.tasks:
        raise ValueError(_cannot(config, "make vectors"))
    if config.lacks is not None and params.pooling is None:
        raise ValueError(_lacking(config.lacks))
    pooling, asked = params.pooling or config.pooling, params.dimensions
    if pooling != config.pooling and pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    if (
        pooling != config.pooling
        and config.dense
        and (made := hidden_size * len(parts_of(pooling))) != config.dense[0].inputs
    ):
        raise ValueError(
            f"pooling must be left out: {pooling} gives {made} numbers, and the model's layers behind it take "
            f"{config.dense[0].inputs} (of {config.pooling})"
        )
    size = replace(config, pooling=pooling).width(hidden_size)
    if asked is not None and asked != size:
        if config.dimensions is None:
            raise ValueError(
                f"dimensions must be {size}, got {asked}: the model's vectors cannot be truncated; drop it"
            )
        if not 1 <= asked <= size or (config.dimensions and asked not in config.dimensions):
            allowed = f"one of {', '.join(map(str, config.dimensions))}" if config.dimensions else f"from 1 to {size}"
            raise ValueError(f"dimensions must be {allowed}, got {asked}")
    stated = params.use_activation if params.normalize is None else params.normalize
    if params.use_activation not in (None, stated):
        raise ValueError("normalize contradicts use_activation, its newer name: set one of them")
    activate = config.normalize if stated is None else stated
    return Pooling("embed", pooling, activate, None if asked == size else asked)


def prompt_before(config: PoolerConfig, params: PoolingParams) -> str:
    """Return what is put before a text. Raises ValueError, naming the field, for a prompt that the model does not
    have; texts of a type that has none have the default prompt."""
    asked, kind = params.prompt_name, params.input_type
    if asked is not None and kind is not None:
        raise ValueError("prompt_name says what input_type says: set one of them")
    if asked is not None and asked not in config.prompts:
        raise ValueError(f"prompt_name must be {_names(config)}, got {asked!r:.100}")
    if kind is not None:
        if kind not in INPUT_TYPES:
            raise ValueError(f"input_type must be one of {', '.join(INPUT_TYPES)}, got {kind!r:.100}")
        if not config.prompts:
            raise ValueError("input_type must be left out: the model's files have no prompts")
        known = {name.lower(): name for name in config.prompts}
        asked = next((known[name] for name in INPUT_TYPES[kind] if name in known), None)
    name = config.default_prompt if asked is None else asked
    return "" if name is None else config.prompts[name]


def _names(config: PoolerConfig) -> str:
    return f"one of {', '.join(config.prompts)}" if config.prompts else "left out: the model's files have no prompts"


def _lacking(what: str) -> str:
    """The error for a model of which ``what`` says what its files lack."""
    return f"{what}; for vectors without them set pooling (of a server: --embedding-pooling) to mean"


def class_pooling(config: PoolerConfig, params: PoolingParams) -> Pooling:
    """Return the pooling for classes. Raises ValueError if the model has none."""
    if "classify" not in config.tasks:
        raise ValueError(_cannot(config, "classify"))
    return Pooling("classify", config.pooling, params.use_activation is not False)


def check_generates(config: PoolerConfig) -> None:
    """Raises ValueError for a model that writes no text."""
    if "generate" not in config.tasks:
        raise ValueError(_cannot(config, "generate text"))


def _cannot(config: PoolerConfig, what: str) -> str:
    routes = {
        "generate": "text (/v1/chat/completions, /v1/completions, LLM.generate)",
        "embed": "vectors and scores of similarity (/v1/embeddings, /v1/score, /v1/rerank, LLM.embed, LLM.score)",
        "classify": "scores and classes (/v1/score, /v1/rerank, /classify, LLM.score, LLM.classify)",
    }
    can = " and ".join(routes[task] for task in config.tasks)
    return f"model cannot {what}: it gives {can}"
