"""POST /v2/embed: Cohere's form of embeddings."""

from __future__ import annotations

import uuid
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType, field
from pydantic import Field

from octavo.entrypoints.dialect import CheckedRequest, Dialect, Prepared
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.unsupported import UnsupportedFields
from octavo.entrypoints.fields.values import Count, ModelBody, Priority
from octavo.entrypoints.generation.context import in_words_of
from octavo.entrypoints.generation.pooled import MAX_INPUTS
from octavo.entrypoints.openai.byte_vectors import IN_BYTES
from octavo.entrypoints.openai.embeddings import EmbeddingRequest, embedding_usage, prepare_embeddings
from octavo.entrypoints.openai.float_vectors import as_base64

_NAMES = {"truncate_prompt_tokens": "truncate", "truncation_side": "truncate", "dimensions": "output_dimension"}


_Form = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class EmbedByTypeRequest(ModelBody):
    """Cohere's fields. ``input_type`` chooses among the prompts of the model's files, where it has some."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields({"images": (), "inputs": ()})
    CLAMPED: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    texts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)]
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: Annotated[list[_Form], Field(min_length=1, max_length=6)] | None = None
    output_dimension: Count | None = None
    truncate: Literal["NONE", "START", "END"] | None = None  # None: END
    max_tokens: Count | None = None
    priority: Priority | None = None


class Vectors(Struct):
    """Vectors in the forms that were asked for, see `IN_BYTES`; base64 is of little-endian float32."""

    float_: list[list[float]] | UnsetType = field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class ApiVersion(Struct):
    """The version of Cohere's API."""

    version: str = "2"


class BilledUnits(Struct):
    """Tokens of the request."""

    input_tokens: int


class EmbedMeta(Struct):
    """About the request."""

    billed_units: BilledUnits
    api_version: ApiVersion = field(default_factory=ApiVersion)


class EmbedByType(Struct):
    """The response of /v2/embed."""

    id: str
    embeddings: Vectors
    texts: list[str]
    meta: EmbedMeta
    response_type: str = "embeddings_by_type"


async def _prepare(checked: CheckedRequest[EmbedByTypeRequest]) -> Prepared[EmbedByTypeRequest]:
    state, body = checked.state, checked.body
    cut = body.truncate != "NONE"
    longest = state.engine.input_processor.longest_pooled
    limit = min(body.max_tokens or longest, longest)
    asked = EmbeddingRequest(
        input=body.texts,
        dimensions=body.output_dimension,
        priority=body.priority,
        input_type=body.input_type if state.engine.config.model.pooler.prompts else None,
        truncate_prompt_tokens=limit if cut else None,
        truncation_side=("left" if body.truncate == "START" else "right") if cut else None,
    )
    with in_words_of(names=_NAMES):
        requests = await prepare_embeddings(state, asked, "texts")
    for number, request in enumerate(requests):
        if (length := len(request.prompt_token_ids)) > limit:
            raise bad_request(
                f"texts.{number} has {length} tokens, but max_tokens is {limit}; raise it, or set truncate to END",
                f"texts.{number}",
            )
    return Prepared(checked, requests)


async def _whole(prepared: Prepared[EmbedByTypeRequest], vectors: list[list[float]]) -> EmbedByType:
    kinds = {*(prepared.body.embedding_types or ["float"])}

    def make() -> Vectors:
        return Vectors(
            vectors if "float" in kinds else UNSET,
            [as_base64(vector) for vector in vectors] if "base64" in kinds else UNSET,
            **{kind: [*map(IN_BYTES[kind], vectors)] for kind in kinds if kind in IN_BYTES},
        )

    found = await prepared.state.engine.run_in_thread(make)
    units = BilledUnits(embedding_usage(prepared.requests).total_tokens)
    return EmbedByType(str(uuid.uuid4()), found, prepared.body.texts, EmbedMeta(units))


DIALECT = Dialect("embed_by_type", EmbedByTypeRequest, _prepare, _whole)
