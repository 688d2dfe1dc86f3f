"""Turn checked fields into outputs of the engine: sampling parameters, requests and their generation."""

from __future__ import annotations

import asyncio
import logging
import uuid
import weakref
from collections.abc import Callable, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from msgspec import Raw, Struct
from starlette.requests import Request

from octavo.chat.structured import Constraint
from octavo.engine.async_llm import OutputStream
from octavo.engine.input_processor import Prompt
from octavo.entrypoints.admission import check_queue, check_serving, claim_id
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.generation.heard import Listener
from octavo.entrypoints.lora.served import current_adapter
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.tenants import combined_salt, current_tenant
from octavo.entrypoints.transport.responses import encode_json
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams
from octavo.interface.structured_output import StructuredOutputsParams

logger = logging.getLogger(__name__)

_DEFAULTS = SamplingParams()
_request_id: ContextVar[str] = ContextVar("request_id")  # that clients know: of the header or the body
_START_BATCH = 16  # requests that are handed to the core in one turn of the event loop
_THREAD_COST = 2_000  # from which choices are encoded in a thread


class TokenLimit(NamedTuple):
    """The number of tokens that an answer may have, and the field in which the client set it."""

    value: int | None  # None: as many as fit
    field: str = "max_tokens"
    clamps: bool = False  # a number that does not fit beside the prompt is lowered, not refused


class TopLogprobs(NamedTuple):
    """The number of alternatives whose log-probabilities an answer has, and the field in which the client set it."""

    number: int | None  # None: no log-probabilities
    field: str = "logprobs"


@dataclass(frozen=True)
class PromptOptions:
    """Options that tokenise and queue a prompt."""

    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # -1: to max_model_len
    truncation_side: Literal["left", "right"] = "left"

    @property
    def for_tenant(self) -> PromptOptions:
        """Add the salt that the request's gateway sets."""
        return replace(self, cache_salt=combined_salt(self.cache_salt))


def sampling_params(
    state: ServerState,
    given: dict[str, Any],
    limit: TokenLimit,
    logprobs: TopLogprobs,
    stream: bool,
) -> SamplingParams:
    """The model's defaults under what the request sets: ``given`` are fields of SamplingParams. Raises ValueError,
    APIError naming the field."""
    n, max_n = given.get("n", 1), state.max_n
    if not 1 <= n <= max_n:
        raise bad_request(f"n must be between 1 and {max_n}, got {n}", "n")
    longest = state.engine.config.scheduler.max_model_len - 1
    if given.get("min_tokens", 0) > longest:
        message = f"min_tokens must be at most {longest} (max_model_len - 1), got {given['min_tokens']}"
        raise bad_request(message, "min_tokens")
    most = state.args.max_logprobs
    for name, value in ((logprobs.field, logprobs.number), ("prompt_logprobs", given.get("prompt_logprobs"))):
        if value is not None and not 0 <= value <= most:
            raise bad_request(f"{name} must be between 0 and {most} (--max-logprobs), got {value}", name)
    if logprobs.number is not None and "logprob_token_ids" not in given:
        given["logprobs"] = logprobs.number
    processor = state.engine.input_processor
    if limit.value is not None or not processor.generation_config.get("max_new_tokens"):
        given["max_tokens"] = limit.value
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return processor.default_sampling_params(**given, output_kind=kind)


async def prepare_request(
    state: ServerState,
    prompt: Prompt,
    params: SamplingParams,
    options: PromptOptions,
    limit: TokenLimit,
    constraint: Constraint | None = None,
    make_grammar: Callable[[], str | None] | None = None,
) -> EngineCoreRequest:
    """A request for the engine core, with an id of its own, since ids that clients choose may repeat.

    ``make_grammar`` gives the grammar of the whole output where it is more than that of the ``constraint``, or where
    only the calls of tools are held. Raises ValueError, and APIError if the tokens of ``limit`` cannot fit.
    """
    request_id, options, adapter = uuid.uuid4().hex, options.for_tenant, current_adapter.get()
    if constraint is None and make_grammar is None:
        request = await state.engine.prepare(request_id, prompt, params, adapter=adapter, **vars(options))
    else:
        params.structured_outputs = None if constraint is None else constraint.params

        def process() -> EngineCoreRequest:
            if make_grammar is not None:
                grammar = make_grammar()
            else:
                grammar = None if constraint is None else constraint.grammar(state.args.strict_json_schema)
            return state.engine.input_processor.process(
                request_id,
                prompt,
                params,
                grammar=grammar,
                grammar_field=constraint.field if constraint else "tools",
                adapter=adapter,
                **vars(options),
            )

        request = await state.engine.run_in_thread(process)
    longest, length = state.engine.config.scheduler.max_model_len, len(request.prompt_token_ids)
    clamps = limit.clamps or state.args.clamp_max_tokens
    if limit.value is not None and not clamps and length + limit.value > longest:
        raise bad_request(
            f"{limit.field} ({limit.value}) plus the prompt's {length} tokens exceeds max_model_len ({longest}); lower "
            f"{limit.field} to at most {longest - length}",
            limit.field,
            code="context_length_exceeded",
        )
    return request


class Generation:
    """Admitted requests and their outputs, to which ``heard`` listens. `start` hands them to the core, `close` aborts
    those that have not finished.

    The constructor raises APIError if the server does not admit them; ``admit`` False skips that, for further parts of
    an admitted request.
    """

    def __init__(
        self,
        state: ServerState,
        requests: Sequence[EngineCoreRequest],
        texts: Sequence[str | None],
        admit: bool = True,
        heard: Listener | None = None,
    ) -> None:
        if admit:
            check_serving(state)
            check_queue(state, sum(request.sampling_params.n for request in requests))
        self._engine = state.engine
        self._requests = list(zip(requests, texts, strict=True))
        self._log = state.args.enable_log_requests
        self._tenant = current_tenant.get()
        self._heard = heard
        self.stream = OutputStream()
        self._positions = {request.request_id: position for position, request in enumerate(requests)}
        self._unfinished = set(self._positions)
        if known_as := _request_id.get(""):
            state.engine_ids[known_as] = list(self._positions)
            weakref.finalize(self, state.engine_ids.pop, known_as, None)

    async def start(self) -> Generation:
        """Hand the requests to the core. Raises EngineDeadError."""
        try:
            for i, (request, text) in enumerate(self._requests, 1):
                if self._log:
                    _log_request(request)
                self._engine.add_request(request, text, self.stream, self._tenant)
                if i % _START_BATCH == 0:
                    await asyncio.sleep(0)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def finished(self) -> bool:
        """The final output of every request has been taken."""
        return not self._unfinished

    def take(self) -> tuple[int, RequestOutput] | None:
        """The next available output with its request's position. Raises APIError for a request that failed."""
        output = self.stream.take()
        return None if output is None else self._with_position(output)

    async def next_output(self) -> tuple[int, RequestOutput]:
        """The next output with its request's position. Raises APIError for a request that failed."""
        return self._with_position(await self.stream.get())

    async def final_outputs(self) -> list[RequestOutput]:
        """The final output of every request, in their order. Raises APIError for a request that failed."""
        finals: dict[int, RequestOutput] = {}
        while self._unfinished:
            position, output = await self.next_output()
            if output.finished:
                finals[position] = output
        return [finals[position] for position in range(len(finals))]

    def _with_position(self, output: RequestOutput) -> tuple[int, RequestOutput]:
        if self._heard is not None:
            self._heard.hear(output)
        if output.finished or output.error is not None:
            _raise_for_error(output)
            self._unfinished.discard(output.request_id)
        return self._positions[output.request_id], output

    def close(self) -> None:
        """Abort the requests that have not finished."""
        self.stream.on_output = None
        if self._unfinished:
            self._engine.abort(self._unfinished)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _log_request(request: EngineCoreRequest) -> None:
    """Log the request's parameters without user text: only the lengths of strings, lists and objects."""
    params = request.sampling_params
    changed = [f.name for f in fields(params) if getattr(params, f.name) != getattr(_DEFAULTS, f.name)]
    described = ", ".join(f"{name}={_loggable(getattr(params, name))}" for name in changed)
    logger.info("request %s: %d prompt tokens, %s", request.request_id, len(request.prompt_token_ids), described)


def _loggable(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | RequestOutputKind):
        return str(value)
    if isinstance(value, StructuredOutputsParams):
        return next(f"<{name}>" for name, given in vars(value).items() if given not in (None, False))
    return f"<{len(value)}>" if isinstance(value, Sized) else f"<{type(value).__name__}>"


def encoding_cost(completion: CompletionOutput, output: RequestOutput) -> int:
    """Roughly how much work encoding a choice is, in log-probabilities."""
    tables = (completion.logprobs, output.prompt_logprobs)
    return len(completion.token_ids) // 50 + sum(table.num_values for table in tables if table is not None)


async def encode_choices(state: ServerState, choices: Sequence[tuple[Callable[[], Struct], int]]) -> list[Any]:
    """Build choices, each given with its cost, and encode them as JSON; in a thread if it would block the event loop.

    One is encoded at a time, since encoding holds the GIL. Returns a msgspec.Raw a choice, which stands for its struct.
    """

    def encode() -> list[Raw]:
        return [Raw(encode_json(make())) for make, _ in choices]

    heavy = sum(cost for _, cost in choices) > _THREAD_COST
    return await state.engine.run_in_thread(encode) if heavy else encode()


def _raise_for_error(output: RequestOutput) -> None:
    if output.error is not None and output.error_param is not None:
        raise bad_request(output.error, output.error_param)
    if output.error is not None:
        raise APIError(500, f"The engine failed on this request: {output.error}", code="engine_error")
    if output.finished and any(completion.finish_reason == "abort" for completion in output.outputs):
        raise APIError(
            503,
            "The request was aborted because the server is shutting down",
            code="aborted",
            headers={"retry-after": "1"},
        )


def external_id(request: Request, prefix: str, asked: str | None = None, between: str = "-") -> str:
    """The response's id: ``prefix`` and the request's id, which is the body's (``asked``), that of X-Request-Id, or a
    random one. Raises a 409 while a request of the client's id is under way."""
    state = request.scope["state"]
    if asked is not None:
        state["request_id"], state["client_chose_id"] = asked, True
    if state["client_chose_id"]:
        claim_id(state_of(request), state["request_id"])
        state["claimed_id"] = state["request_id"]  # until the response ends, see RequestMiddleware
    _request_id.set(state["request_id"])
    return f"{prefix}{between}{state['request_id']}"
