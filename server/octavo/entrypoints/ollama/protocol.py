"""Request bodies of Ollama's API. Types are strict, and what has no effect here is refused, unless it asks for what
happens anyway."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.fields import schemas
from octavo.entrypoints.fields.shapes import Shapes
from octavo.entrypoints.fields.unsupported import UnsupportedFields
from octavo.entrypoints.fields.values import Count, ImageText, Index, ModelBody, RequestBody, StopField, integral
from octavo.interface import sampling_params as limits

Name = Annotated[str, Field(min_length=1)]
_Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(integral)]
_Format = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]})]
_DURATION = r"^[+-]?(0|(([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|\u00b5s|ms|s|m|h))+)$"  # as Go writes it
_KeepAlive = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": _DURATION}, {"type": "null"}]})
]
Think = bool | Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_OPTIONS = UnsupportedFields(
    {
        **dict.fromkeys(("mirostat", "dynatemp_range"), (0,)),
        **dict.fromkeys(("typical_p", "tfs_z", "tfs"), (1,)),
        "repeat_last_n": (-1,),  # penalties are for all that was generated, and for the prompt
        "penalize_newline": (True,),
        **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), (False,)),
    }
)


class Options(Shapes):
    """Options of sampling. Those of loading a model (num_gpu, num_thread, ...) have no effect: it is loaded."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    num_ctx: Count | None = None
    num_predict: _Integer | None = None  # below 1: as many as fit
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_INT), BeforeValidator(integral)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: _Integer | None = None  # -1: a random one
    stop: StopField = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        reference: dict[str, Any] = handler(core_schema)
        handler.resolve_ref_schema(reference)["patternProperties"] = _OPTIONS.schema()
        return reference

    def check(self) -> None:
        """Raises APIError for an option that would change the answer and is not supported."""
        for name, value in (self.model_extra or {}).items():
            if why := _OPTIONS.why_not(name, value):
                raise bad_request(f"options.{why}", f"options.{name}")


class _Body(ModelBody):
    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields({})

    keep_alive: _KeepAlive = None  # the model stays as long as the server runs
    options: Options | None = None

    def check(self) -> None:
        """Check what the types do not. Raises APIError."""
        super().check()
        if self.options is not None:
            self.options.check()
        keeps = self.keep_alive
        fits = re.fullmatch(_DURATION, keeps) if isinstance(keeps, str) else isinstance(keeps, int | float | None)
        if not fits or isinstance(keeps, bool):
            raise bad_request(
                f'keep_alive must be seconds or a duration such as "5m", got {shown(keeps)}', "keep_alive"
            )

    @property
    def unloads(self) -> bool:
        """``keep_alive`` asks that the model be unloaded at once."""
        keeps = self.keep_alive
        return not re.search("[1-9]", keeps) if isinstance(keeps, str) else keeps == 0


class _GenerationBody(_Body):
    stream: bool | None = None  # None: yes
    format: _Format = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Index | None = None

    @property
    def streams(self) -> bool:
        """The answer comes line by line, unless the client says no."""
        return self.stream is not False


# Where bodies hold images, for `read_body`.
IMAGES = (("messages", None, "images", None), ("images", None))


class GenerateRequest(_GenerationBody):
    """POST /api/generate"""

    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields(
        {
            "template": (),
            "width": (0,),
            "height": (0,),
            "steps": (0,),
            "shift": (False,),
            "truncate": (False,),
        }
    )

    prompt: str | None = None
    suffix: str | None = None  # what follows the text that is asked for: infilling
    system: str | None = None
    images: list[ImageText] | None = None  # in base64
    raw: bool | None = None
    context: Annotated[list[Annotated[int, Field(ge=0)]] | None, Field(max_length=1_000_000)] = None


class ChatRequest(_GenerationBody):
    """POST /api/chat"""

    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields({"shift": (False,)})

    messages: list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(schemas.TOOLS)] = None
    truncate: bool | None = None  # None: yes


class EmbedRequest(_Body):
    """POST /api/embed"""

    input: str | list[str]
    truncate: bool | None = None  # None: yes
    dimensions: Count | None = None


class EmbeddingsRequest(_Body):
    """POST /api/embeddings, the older form"""

    prompt: str


class ShowRequest(RequestBody):
    """POST /api/show. ``name`` is the older name of ``model``."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields({"system": (), "template": (), "options": ()})

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
