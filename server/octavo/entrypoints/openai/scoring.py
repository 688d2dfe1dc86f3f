"""POST /v1/score, /v1/rerank and /classify: scores of pairs of texts, documents that answer a query, and classes.

/v1/rerank has the shape of Jina's and Cohere's; /score, /rerank and /v2/rerank are the same routes by other names. A
text is a string, {"text": "..."} or, as in vLLM, {"content": [{"type": "text", "text": "..."}]}.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, WithJsonSchema

from octavo.engine.scoring import ScorePlan, check_pairs, plan_scores, text_of
from octavo.entrypoints.dialect import CheckedRequest, Dialect, Prepared
from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.fields.unsupported import SCORING, UnsupportedFields
from octavo.entrypoints.fields.values import Index, ModelBody, Priority, Truncation, prompts_in
from octavo.entrypoints.generation.pooled import MAX_INPUTS, PooledOptions, prepare_texts
from octavo.entrypoints.openai.embeddings import EmbeddingUsage, embedding_usage
from octavo.entrypoints.openai.protocol import PromptField
from octavo.interface.pooling_params import PoolingParams, class_pooling


def _check_text(value: Any) -> Any:
    text = text_of(value)
    if not isinstance(text, str):
        raise ValueError(f'must be a string or an object with "text", got {shown(value)}')
    return text


def _check_texts(value: Any) -> Any:
    if not isinstance(value, list):
        return _check_text(value)
    if not value:
        raise ValueError("must not be an empty list")
    texts = list(map(text_of, value))
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f'entry {i} must be a string or an object with "text", got {shown(value[i])}')
    return texts


_STRING = {"type": "string", "minLength": 1}
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": _STRING},
    },
    "minItems": 1,
}
_TEXT = {
    "anyOf": [
        _STRING,
        {"type": "object", "required": ["text"], "properties": {"text": _STRING}, "not": {"required": ["content"]}},
        {"type": "object", "required": ["content"], "properties": {"content": {"anyOf": [_STRING, _PARTS]}}},
    ]
}
_TEXTS = {"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "minItems": 1}]}  # and at most MAX_INPUTS
TextField = Annotated[Any, BeforeValidator(_check_text), WithJsonSchema(_TEXT)]
TextsField = Annotated[Any, BeforeValidator(_check_texts), WithJsonSchema(_TEXTS)]
SideField = Annotated[
    Any,
    BeforeValidator(lambda value: None if value is None else _check_texts(value)),
    WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]}),
]


class _PooledRequest(ModelBody):
    UNSUPPORTED: ClassVar[UnsupportedFields] = SCORING

    user: str | None = None
    truncate_prompt_tokens: Truncation = None
    use_activation: bool | None = None
    priority: Priority | None = None

    def params(self) -> PoolingParams:
        """The fields that pooling knows."""
        return PoolingParams(use_activation=self.use_activation, truncate_prompt_tokens=self.truncate_prompt_tokens)


class _PairRequest(_PooledRequest):
    # How many tokens to keep of each text, 0: all.
    max_tokens_per_query: Index | None = None
    max_tokens_per_doc: Index | None = None


# vLLM's names of the two sides of a score.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreRequest(_PairRequest):
    """Two sides by one of the four pairs of names; one text on the first for all of the second, or equally many."""

    text_1: SideField = None
    text_2: SideField = None
    queries: SideField = None
    documents: SideField = None
    items: SideField = None
    data_1: SideField = None
    data_2: SideField = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        null, text, every = {"type": "null"}, {"not": {"type": "null"}}, {name for names in _SIDES for name in names}
        handler.resolve_ref_schema(reference)["anyOf"] = [
            {"required": list(names), "properties": {name: text if name in names else null for name in every}}
            for names in _SIDES
        ]
        return reference

    def sides(self) -> tuple[str, str]:
        """The names that the request uses. Raises APIError for none, or several."""
        given = {name for names in _SIDES for name in names if getattr(self, name) is not None}
        for names in _SIDES:
            if given == set(names):
                return names
        ways = "; ".join(" and ".join(names) for names in _SIDES)
        raise bad_request(
            f"send the texts under one of these pairs of names: {ways}; got {' and '.join(sorted(given)) or 'none'}",
            next((b if a in given else a for a, b in _SIDES if {a, b} & given), "text_1"),
        )


class RerankRequest(_PairRequest):
    """The ``top_n`` best of ``documents`` are returned (0: all)."""

    query: TextField
    documents: TextsField
    top_n: Index | None = None
    return_documents: bool | None = None


class ClassifyRequest(_PooledRequest):
    """Texts, or token ids, as in /v1/embeddings."""

    input: PromptField
    add_special_tokens: bool | None = None


class Score(Struct):
    """One pair's."""

    index: int
    score: float
    object: str = "score"


class ScoreList(Struct):
    """The response of /v1/score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class RerankedDocument(Struct):
    """A document's text."""

    text: str


class RerankResult(Struct):
    """A document's place in the request and its score."""

    index: int
    relevance_score: float
    document: RerankedDocument | UnsetType = UNSET


class RerankResponse(Struct):
    """The response of /v1/rerank: the best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class Classification(Struct):
    """One text's: the likeliest class's name, and a number for each class."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(Struct):
    """The response of /classify."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
    object: str = "list"


@dataclass
class _PreparedPairs(Prepared[Any]):
    plan: ScorePlan
    documents: list[str]


async def _prepare_score(checked: CheckedRequest[ScoreRequest]) -> _PreparedPairs:
    body = checked.body
    names = body.sides()
    given = getattr(body, names[0]), getattr(body, names[1])
    queries, documents = (_listed(texts, name) for texts, name in zip(given, names, strict=True))
    check_pairs(queries, documents, names)
    return await _plan(checked, queries, documents, names, given)


async def _prepare_rerank(checked: CheckedRequest[RerankRequest]) -> _PreparedPairs:
    body, documents = checked.body, _listed(checked.body.documents, "documents")
    given = body.query, body.documents
    return await _plan(checked, [body.query], documents, ("query", "documents"), given)


async def _prepare_classify(checked: CheckedRequest[ClassifyRequest]) -> Prepared[ClassifyRequest]:
    state, body = checked.state, checked.body
    pooling = class_pooling(state.engine.input_processor.pooler, body.params())
    options = PooledOptions(body.priority or 0, body.add_special_tokens is not False, body.truncate_prompt_tokens)
    texts = prompts_in(body.input, "input", MAX_INPUTS)
    return Prepared(checked, await prepare_texts(state, pooling, texts, options))


def _listed(texts: str | list[str], field: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else texts
    if len(listed) > MAX_INPUTS:
        raise bad_request(f"{field} takes at most {MAX_INPUTS} texts, got {len(listed)}; split the request", field)
    return listed


async def _plan(
    checked: CheckedRequest[Any],
    queries: Sequence[str],
    documents: list[str],
    fields: tuple[str, str],
    given: tuple[Any, Any],
) -> _PreparedPairs:
    def name(is_document: bool, place: int) -> str:
        field, value = fields[is_document], given[is_document]
        return field if isinstance(value, str) else f"{field}.{place}"

    state, body = checked.state, checked.body
    processor = state.engine.input_processor

    def make() -> ScorePlan:
        first, second = (
            [processor.first_tokens(text, limit) for text in side] if limit else side
            for side, limit in ((queries, body.max_tokens_per_query), (documents, body.max_tokens_per_doc))
        )
        params = replace(body.params(), pooling=state.args.embedding_pooling)
        return plan_scores(processor, first, second, params, _new_id, name, body.priority or 0)

    try:
        plan = await state.engine.run_in_thread(make)
    except ValueError as error:
        subject = str(error).partition(" ")[0]
        raise bad_request(error, subject if subject.startswith(fields) else None) from None
    return _PreparedPairs(checked, plan.requests, plan, documents)


async def _scores(prepared: _PreparedPairs, results: list[list[float]]) -> ScoreList:
    data = [Score(i, score) for i, score in enumerate(prepared.plan.scores(results))]
    used = embedding_usage(prepared.requests)
    return ScoreList(f"score-{_new_id()}", int(time.time()), prepared.state.model_name, data, used)


async def _ranking(prepared: _PreparedPairs, results: list[list[float]]) -> RerankResponse:
    body, scores = prepared.body, prepared.plan.scores(results)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    shows = body.return_documents is not False
    ranked = [RerankResult(i, scores[i], RerankedDocument(prepared.documents[i]) if shows else UNSET) for i in order]
    return RerankResponse(f"rerank-{_new_id()}", prepared.state.model_name, ranked, embedding_usage(prepared.requests))


async def _classes(prepared: Prepared[ClassifyRequest], results: list[list[float]]) -> ClassificationList:
    state = prepared.state
    labels = state.engine.config.model.pooler.labels
    data = []
    for i, probs in enumerate(results):
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append(Classification(i, labels[best] if best < len(labels) else str(best), probs, len(probs)))
    used = embedding_usage(prepared.requests)
    return ClassificationList(f"classify-{_new_id()}", int(time.time()), state.model_name, data, used)


def _new_id() -> str:
    return uuid.uuid4().hex


SCORE = Dialect("score", ScoreRequest, _prepare_score, _scores)
RERANK = Dialect("rerank", RerankRequest, _prepare_rerank, _ranking)
CLASSIFY = Dialect("classify", ClassifyRequest, _prepare_classify, _classes)
