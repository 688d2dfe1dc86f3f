"""Types for bodies that consist of typed blocks: Anthropic's and those of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from octavo.entrypoints.errors import shown


def known_types(*types: str, others: Sequence[str] = ()) -> BeforeValidator:
    """Refuses a block of any other type by its name, before pydantic would list what each union's member lacks; the
    error does not recommend ``others``."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else value
        if kind is None and not isinstance(value, dict):
            return value
        if not isinstance(kind, str):
            raise ValueError(f'must be an object with a "type", got {shown(value)}')
        if kind not in types and kind not in others:
            raise ValueError(f"type {shown(kind)} is not supported by this server: use {', '.join(types)}")
        return value

    return BeforeValidator(check)


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class OrId:
    """Beside an object with an id: the id alone."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def as_object(value: Any) -> Any:
            return {"id": value} if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(as_object, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


class OrText:
    """Beside a list of blocks: a string, which stands for the one block that ``block`` makes of it."""

    def __init__(self, block: Callable[[str], dict[str, Any]] = _text_block) -> None:
        self._block = block

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def as_blocks(value: Any) -> Any:
            return [self._block(value)] if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(as_blocks, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {"anyOf": [{"type": "string"}, handler(schema)]}
