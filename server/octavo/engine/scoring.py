"""Scores of pairs of texts: by a model that reads both at once, or by the similarity of their vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.input_processor import InputProcessor
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.pooling_params import PoolingParams, class_pooling, embedding_pooling

# Names what a text is to the user, of its place among queries (False) or documents (True): "documents.3".
FieldName = Callable[[bool, int], str]


@dataclass
class ScorePlan:
    """Requests to run, and the function that makes scores of their results, one for each pair."""

    requests: list[EngineCoreRequest]
    scores: Callable[[Sequence[Sequence[float]]], list[float]]
    token_ids: list[list[int]]  # of each pair


def text_of(value: Any) -> Any:
    """The string of a text in any form: a string, {"text": ...} or {"content": [{"type": "text", "text": ...}]};
    what is none of these as it is."""
    if isinstance(value, dict):
        parts = value.get("content", value.get("text"))
        if isinstance(parts, list) and parts and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
            texts = [part.get("text") for part in parts]
            return "".join(texts) if all(isinstance(text, str) for text in texts) else value
        return parts if isinstance(parts, str) else value
    return value


def check_pairs(queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]) -> None:
    """Raises ValueError unless one query meets all documents, or each its own; ``names`` are the caller's of both."""
    if not queries or not documents:
        raise ValueError(f"{names[bool(queries)]} must not be an empty list")
    if len(queries) not in (1, len(documents)):
        raise ValueError(
            f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}: send one in {names[0]}, or "
            "equally many"
        )


def plan_scores(
    processor: InputProcessor,
    queries: Sequence[str],
    documents: Sequence[str],
    params: PoolingParams,
    new_id: Callable[[], str],
    field: FieldName,
    priority: int = 0,
) -> ScorePlan:
    """Plan the scores of ``queries`` (one, or one for each document) and ``documents``. Raises ValueError, naming the
    text or the field."""
    pooler = processor.pooler

    def prepare(text: str | list[int], pair: str | None, is_document: bool, place: int) -> EngineCoreRequest:
        special = pooler.template is None
        try:
            return processor.process_pooling(
                new_id(),
                text,
                pooling,
                pair=pair,
                priority=priority,
                add_special_tokens=special,
                truncate_prompt_tokens=params.truncate_prompt_tokens,
            )
        except ValueError as error:
            subject, _, rest = str(error).partition(" ")
            raise ValueError(f"{field(is_document, place)} {rest}" if subject == "prompt" else str(error)) from None

    if "classify" in pooler.tasks:
        pooling = class_pooling(pooler, params)
        if len(pooler.labels) > 1:
            raise ValueError(
                f"model has {len(pooler.labels)} classes and so no one score; use /classify or LLM.classify"
            )
        requests = []
        for i, document in enumerate(documents):
            query = queries[min(i, len(queries) - 1)]
            if pooler.template is None:
                requests.append(prepare(query, document, True, i))
            else:
                prompt = pair_prompt(pooler.template, query, document)
                limit = params.truncate_prompt_tokens
                requests.append(
                    prepare(prompt if limit is None else _cut(processor, query, document, limit), None, True, i)
                )
        return ScorePlan(requests, lambda results: [row[0] for row in results], [r.prompt_token_ids for r in requests])
    pooling = embedding_pooling(pooler, params, processor.model.hidden_size)
    first = [prepare(query, None, False, i) for i, query in enumerate(queries)]
    second = [prepare(document, None, True, i) for i, document in enumerate(documents)]

    def cosines(results: Sequence[Sequence[float]]) -> list[float]:
        vectors, others = results[: len(first)], results[len(first) :]
        return [_cosine(vectors[min(i, len(vectors) - 1)], other) for i, other in enumerate(others)]

    pairs = [first[min(i, len(first) - 1)].prompt_token_ids + r.prompt_token_ids for i, r in enumerate(second)]
    return ScorePlan([*first, *second], cosines, pairs)


def pair_prompt(template: str, query: str, document: str) -> str:
    """``template`` with both texts in it, for {query} and {document}; what the texts hold is never replaced."""
    before, _, rest = template.partition("{query}")
    between, _, after = rest.partition("{document}")
    return f"{before}{query}{between}{document}{after}"


def _cut(processor: InputProcessor, query: str, document: str, limit: int) -> list[int]:
    """The ids of `pair_prompt` with as much of the document as fits ``limit`` tokens (-1: those that the model takes).
    Raises ValueError where the query alone is too long."""
    before, _, after = pair_prompt(processor.pooler.template or "", query, "{document}").rpartition("{document}")
    most = processor.longest_pooled if limit == -1 else limit
    ids, end, rest = (processor.tokenize(text, False, most) if text else [] for text in (before, document, after))
    if len(ids) + len(rest) >= most:
        fixed = len(ids) + len(rest)
        raise ValueError(f"truncate_prompt_tokens must be above {fixed}, what query and template take, got {limit}")
    return ids + end[: max(0, most - len(ids) - len(rest))] + rest


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(float.__mul__, one, other)) / lengths if lengths else 0.0
