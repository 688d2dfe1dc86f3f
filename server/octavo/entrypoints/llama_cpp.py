"""llama.cpp's POST /infill, as its plugins for editors use it: the text at a cursor, with other files around it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Struct, to_builtins
from pydantic import BaseModel, ConfigDict, Field

from octavo.chat.infill import Around, InfillFile
from octavo.entrypoints.dialect import CheckedRequest, Dialect, Prepared
from octavo.entrypoints.errors import APIError, ErrorResponse
from octavo.entrypoints.fields.shapes import SHAPES, Shapes
from octavo.entrypoints.fields.unsupported import UnsupportedFields
from octavo.entrypoints.fields.values import FromFloat, Index, ModelBody, Seed, StopField
from octavo.entrypoints.generation.infill import infill_prompts
from octavo.entrypoints.generation.run import (
    Generation,
    PromptOptions,
    TokenLimit,
    TopLogprobs,
    prepare_request,
    sampling_params,
)
from octavo.entrypoints.operation import answering
from octavo.entrypoints.transport.sse import event
from octavo.interface import sampling_params as limits
from octavo.interface.outputs import RequestMetrics, RequestOutput
from octavo.interface.sampling_params import RequestOutputKind

_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", *SHAPES}
_ROOM = 256  # for an answer without a limit, where the prompt has to be cut
_MOST_FILES = 1_000


class ExtraFile(BaseModel):
    """Another file, or a piece of one."""

    model_config = ConfigDict(strict=True)

    text: str
    filename: str = "tmp"


class InfillRequest(Shapes, ModelBody):
    """POST /infill. The order of samplers is fixed; prefixes are always cached, in every slot."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = UnsupportedFields(
        {
            **dict.fromkeys(("grammar", "json_schema", "logit_bias", "lora", "multimodal_data"), ()),
            **dict.fromkeys(("n_indent", "n_probs", "mirostat"), (0,)),
            "typical_p": (1,),
        }
    )

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile] | None, Field(max_length=_MOST_FILES)] = None
    prompt: str | None = None  # the line that goes on, behind the prefix
    n_predict: Annotated[int, Field(ge=-2, le=limits.MAX_INT), FromFloat] | None = None  # below 0: as many as fit
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_INT), FromFloat] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopField = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    t_max_predict_ms: Index | None = None  # from the first token on; 0: no limit
    t_max_prompt_ms: Index | None = None  # a prompt is read as fast as it can be
    samplers: list[str] | None = None
    response_fields: list[str] | None = None
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Field(ge=-1, le=limits.MAX_INT), FromFloat] | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if given.get("seed") == -1:
            del given["seed"]
        return given


class Timings(Struct):
    """Tokens and milliseconds of the prompt and of the answer."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Infilling(Struct, kw_only=True):
    """The answer of /infill."""

    content: str
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    has_new_line: bool
    stop_type: str  # "eos", "word", "limit", or "none": it goes on
    stopping_word: str = ""
    timings: Timings
    index: int = 0
    id_slot: int = 0


class TimedGeneration(Generation):
    """One that ends ``seconds`` after its first token, once it has a whole line; 0: never. The engine sends deltas."""

    def __init__(self, prepared: PreparedInfill, seconds: float) -> None:
        super().__init__(prepared.state, prepared.requests, [None])
        self._seconds, self._first, self._has_line = seconds, 0.0, False

    def _with_position(self, output: RequestOutput) -> tuple[int, RequestOutput]:
        position, output = super()._with_position(output)
        (completion,) = output.outputs
        self._first = self._first or time.perf_counter()
        self._has_line |= "\n" in completion.text
        if self._seconds and self._has_line and time.perf_counter() - self._first > self._seconds:
            self.close()
            self._unfinished.clear()
            output.finished, completion.finish_reason = True, completion.finish_reason or "length"
        return position, output

    async def final_outputs(self) -> list[RequestOutput]:
        """The one output, with all of its text. Raises APIError if it failed."""
        text, ids = "", list[int]()
        while True:
            _, output = self._with_position(await self.stream.get())
            (completion,) = output.outputs
            text, ids = text + completion.text, ids + completion.token_ids
            if output.finished:
                completion.text, completion.token_ids = text, ids
                return [output]


@dataclass
class PreparedInfill(Prepared[InfillRequest]):
    """A prompt that is ready for the engine."""

    prompt_only: bool  # n_predict 0: the prompt is put into the cache

    @property
    def streams(self) -> bool:
        """The engine sends deltas in any case."""
        return bool(self.body.stream)

    def generation(self) -> TimedGeneration:
        """Admit the request. Raises APIError."""
        return TimedGeneration(self, (self.body.t_max_predict_ms or 0) / 1e3)


async def _prepare(checked: CheckedRequest[InfillRequest]) -> PreparedInfill:
    state, body = checked.state, checked.body
    wanted = None if body.n_predict is None or body.n_predict < 0 else body.n_predict
    longest = state.engine.config.scheduler.max_model_len
    limit = TokenLimit(None if wanted is None else max(1, wanted), "n_predict", clamps=True)
    params = sampling_params(state, body.sampling_fields(), limit, TopLogprobs(None), stream=True)
    params.output_kind = RequestOutputKind.DELTA
    files = [InfillFile(file.filename, file.text) for file in body.input_extra or ()]
    room = longest - min(max(1, _ROOM if wanted is None else wanted), longest // 2)
    around = Around(body.input_suffix, body.prompt or "", files, room)
    (ids,) = await infill_prompts(state, [body.input_prefix], around, params, "input_suffix")
    request = await prepare_request(state, ids, params, PromptOptions(), limit)
    return PreparedInfill(checked, [request], wanted == 0)


async def _whole(prepared: PreparedInfill, outputs: list[RequestOutput]) -> Any:
    writer = InfillEvents(prepared)
    answer = to_builtins(writer.answer(outputs[0]))
    wanted = prepared.body.response_fields
    if wanted is None:
        return answer
    return {path: value for path in wanted if (value := _at(answer, path)) is not None}


def _at(answer: Any, path: str) -> Any:
    """The value of a field, or of one in an object: "timings/prompt_n"."""
    for name in path.split("/"):
        if not isinstance(answer, Mapping) or name not in answer:
            return None
        answer = answer[name]
    return answer


class InfillEvents:
    """The events of a streamed answer, each with what is new in it."""

    def __init__(self, prepared: PreparedInfill) -> None:
        self._prepared = prepared
        self._num_tokens, self._has_line = 0, False

    def answer(self, output: RequestOutput) -> Infilling:
        """Make the answer, or the next piece of it."""
        (completion,) = output.outputs
        text, tokens = completion.text, len(completion.token_ids)
        if self._prepared.prompt_only:
            text, tokens = "", 0
        self._num_tokens += tokens
        self._has_line |= "\n" in text
        word = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
        kinds = {None: "none", "length": "limit"}
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
        return Infilling(
            content=text,
            stop=completion.finish_reason is not None,
            model=self._prepared.answering_name,
            tokens_predicted=self._num_tokens,
            tokens_evaluated=prompt,
            tokens_cached=prompt + self._num_tokens,
            has_new_line=self._has_line,
            stop_type=kinds.get(completion.finish_reason, "word" if word else "eos"),
            stopping_word=word,
            timings=timings(output.metrics, cached, prompt - cached, self._num_tokens),
        )

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The event of one output; empty if all of its text is held back."""
        piece = self.answer(item[1])
        return event(piece) if piece.content or piece.stop else b""

    def end(self) -> bytes:
        """There is nothing behind the last piece."""
        return b""

    def error(self, error: APIError) -> bytes:
        """An error event."""
        return event(ErrorResponse(error.detail))


def timings(metrics: RequestMetrics | None, cached: int, prompt: int, predicted: int) -> Timings:
    """Make the timings of a request, of which ``cached`` tokens were known and ``prompt`` were not."""
    reading = writing = 0.0
    if metrics is not None and metrics.first_token_time is not None:
        reading = 1e3 * max(0.0, metrics.first_token_time - metrics.arrival_time)
        writing = 1e3 * max(0.0, (metrics.last_token_time or metrics.first_token_time) - metrics.first_token_time)

    def rates(tokens: int, ms: float) -> tuple[float, float]:
        return (ms / tokens if tokens else 0.0), (1e3 * tokens / ms if ms else 0.0)

    return Timings(cached, prompt, reading, *rates(prompt, reading), predicted, writing, *rates(predicted, writing))


INFILL = Dialect("infill", InfillRequest, _prepare, _whole, InfillEvents)
OPERATIONS = (answering("/infill", INFILL, "Complete a text at a cursor (llama.cpp format)", Infilling),)
