"""Types of fields, and the body that those of every dialect derive from. Types are strict: ``true`` is no number.

Validation and schema have one source: pydantic derives both from the type, or the type names both side by side.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, WrapValidator

from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.fields import schemas
from octavo.entrypoints.fields.unsupported import HARMLESS, UnsupportedFields
from octavo.interface import sampling_params as limits
from octavo.multimodal.pieces import Pieces
from octavo.system.logging_setup import log_once

logger = logging.getLogger(__name__)


def integral(value: Any) -> Any:
    """1.0 as 1: JSON has one type of number, and some clients write integers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


FromFloat = BeforeValidator(integral)  # after the limits, or the schema would lose them


def integral_list(value: Any) -> Any:
    """The same for a list; free if it holds integers only."""
    return list(map(integral, value)) if isinstance(value, list) and float in set(map(type, value)) else value


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(integral_list)]
Index = Annotated[int, Field(ge=0, le=limits.MAX_INT), FromFloat]
Count = Annotated[int, Field(ge=1, le=limits.MAX_INT), FromFloat]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), FromFloat]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), FromFloat]


def _truncation(value: Any) -> Any:
    value = integral(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= -1 and value != 0):
        return value
    raise ValueError(f"must be -1 or an integer >= 1, got {shown(value)}")


_TRUNCATION_SCHEMA = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}]}
Truncation = Annotated[int | None, BeforeValidator(_truncation), WithJsonSchema(_TRUNCATION_SCHEMA)]


_WORD = {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_LENGTH}


def _strings(value: Any) -> Any:
    words = [value] if isinstance(value, str) else value
    if words is None:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"must be a string or a list of strings, got {shown(value)}")
    if len(words) > limits.MAX_STOP_STRINGS:
        raise ValueError(f"takes at most {limits.MAX_STOP_STRINGS} strings, got {len(words)}")
    for word in words:
        if not 0 < len(word) <= limits.MAX_STOP_LENGTH:
            raise ValueError(f"must hold strings of 1 to {limits.MAX_STOP_LENGTH} characters, got one of {len(word)}")
    return value


_STOP_SCHEMA = {
    "anyOf": [_WORD, {"type": "array", "items": _WORD, "maxItems": limits.MAX_STOP_STRINGS}, {"type": "null"}]
}
StopField = Annotated[Any, BeforeValidator(_strings), WithJsonSchema(_STOP_SCHEMA)]
MessagesField = Annotated[list[dict[str, Any]], WithJsonSchema(schemas.MESSAGES)]
# Where they hold images, for `read_body`.
IMAGES = (("messages", None, "content", None, "image_url"), ("messages", None, "content", None, "image_url", "url"))
ImageText = Annotated[str, WrapValidator(lambda value, check: value if isinstance(value, Pieces) else check(value))]
TemplateVariables = Annotated[dict[str, Any] | None, WithJsonSchema(schemas.TEMPLATE_VARIABLES)]
TruncationSide = Literal["left", "right"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def with_verbosity(verbosity: str | None, variables: dict[str, Any] | None) -> dict[str, Any]:
    """Variables of the chat template with the length of answers that a request asks for; a variable of the name comes
    first."""
    return {**({} if verbosity is None else {"verbosity": verbosity}), **(variables or {})}


def prompts_in(value: Any, field: str, most: int) -> list[str | list[int]]:
    """The value of a PromptField as a list of at most ``most`` prompts. Raises APIError naming ``field``."""
    prompts: list[str | list[int]] = [value] if isinstance(value, str) or isinstance(value[0], int) else value
    if len(prompts) > most:
        raise bad_request(
            f"{field} takes at most {most} prompts a request, got {len(prompts)}; split the request", field
        )
    return prompts


class RequestBody(BaseModel):
    """Any body. A null is the same as no field."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    UNSUPPORTED: ClassVar[UnsupportedFields]
    CLAMPED: ClassVar[frozenset[str]] = frozenset()  # may ask for more than fits, and get what does
    # A field -> the field that it needs, with its value, or None for any.
    NEEDS: ClassVar[dict[str, tuple[str, bool | None]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        reference: dict[str, Any] = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["patternProperties"] = cls.UNSUPPORTED.schema()
        for name, (other, value) in cls.NEEDS.items():
            if value is None:
                continue  # a schema with that too is more than tools that read schemas take in
            enough = {"const": value}
            options = [{"properties": {name: {"type": "null"}}}, {"required": [other], "properties": {other: enough}}]
            schema.setdefault("dependentSchemas", {})[name] = {"anyOf": options}
        return reference

    def check(self) -> None:
        """Check what the types do not. Raises APIError."""
        for name, value in (self.model_extra or {}).items():
            if why := self.UNSUPPORTED.why_not(name, value):
                raise bad_request(why, name)
            if value is not None and name not in HARMLESS:
                log_once(logger, logging.WARNING, "ignoring unknown request field %r", name[:100])
        for name, (other, needed) in self.NEEDS.items():
            value = getattr(self, other)
            if getattr(self, name) is not None and (value is None or needed not in (None, value)):
                wanted = other if needed is None else f"{other}: {shown(needed)}"
                raise bad_request(f"{name} needs {wanted}; set it or drop {name}", name)


class ModelBody(RequestBody):
    """The body of a request for a model; without a name it is for the one that is served."""

    model: str | None = None
