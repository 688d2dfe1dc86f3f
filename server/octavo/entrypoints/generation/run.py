"""From a checked body to streams of outputs: what completions and chat completions have in common."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence, Sized
from dataclasses import fields
from typing import Any

from msgspec import Raw, Struct
from starlette.requests import Request

from octavo.engine.async_llm import OutputStream
from octavo.engine.input_processor import Prompt
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.generation.structured import Constraint
from octavo.entrypoints.openai.logprobs import LogprobsFormatter
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.http_answers import encode_json
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams
from octavo.interface.structured_output import StructuredOutputsParams

logger = logging.getLogger(__name__)

_DEFAULTS = SamplingParams()
_AT_ONCE = 16  # requests that are handed to the core without giving others a turn
_WORTH_A_THREAD = 2_000  # tokens and log-probabilities of an answer


def sampling_params(
    state: ServerState, body: GenerationRequest, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The model's defaults under what the request sets. Raises ValueError."""
    fields = body.sampling_fields()
    n, max_n = fields.get("n", 1), state.max_n
    if not 1 <= n <= max_n:
        raise bad_request(f"n must be between 1 and {max_n}, got {n}", "n")
    longest = state.engine.config.scheduler.max_model_len - 1
    if fields.get("min_tokens", 0) > longest:
        message = f"min_tokens must be at most {longest} (max_model_len - 1), got {fields['min_tokens']}"
        raise bad_request(message, "min_tokens")
    limit = state.args.max_logprobs
    for name, value in ((body.LOGPROBS, logprobs), ("prompt_logprobs", fields.get("prompt_logprobs"))):
        if value is not None and not 0 <= value <= limit:
            raise bad_request(f"{name} must be between 0 and {limit} (--max-logprobs), got {value}", name)
    if logprobs is not None:
        fields["logprobs"] = logprobs
    processor = state.engine.input_processor
    if max_tokens is not None or not processor.generation_config.get("max_new_tokens"):
        fields["max_tokens"] = max_tokens  # None: whatever fits
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return processor.default_sampling_params(**fields, output_kind=kind)


async def prepare(
    state: ServerState,
    body: GenerationRequest,
    prompt: Prompt,
    params: SamplingParams,
    asked: int | None,
    asked_field: str,
    add_special_tokens: bool,
    constraint: Constraint | None = None,
) -> EngineCoreRequest:
    """A request for the core under an id of its own: ids that clients choose may repeat. Raises ValueError.

    ``asked``: the tokens that the client wants, in ``asked_field``, and is told when they cannot fit.
    """
    request_id = uuid.uuid4().hex
    options: dict[str, Any] = {
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt,
        "add_special_tokens": add_special_tokens,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "truncation_side": body.truncation_side or "left",
    }
    if constraint is None:
        request = await state.engine.prepare(request_id, prompt, params, **options)
    else:
        params.structured_outputs = constraint.params

        def process() -> EngineCoreRequest:
            grammar = constraint.grammar(state.args.strict_json_schema)
            return state.engine.input_processor.process(
                request_id, prompt, params, grammar=grammar, grammar_field=constraint.field, **options
            )

        request = await state.engine.run_in_thread(process)
    limit = state.engine.config.scheduler.max_model_len
    if asked is not None and len(request.prompt_token_ids) + asked > limit:
        length = len(request.prompt_token_ids)
        raise bad_request(
            f"{asked_field} ({asked}) and the prompt's {length} tokens are more than the model's {limit} "
            f"(max_model_len); lower it to at most {limit - length}",
            asked_field,
            code="context_length_exceeded",
        )
    return request


class Running:
    """Requests that were admitted; `start` hands them to the core. `close` aborts those that have not finished.

    Making one raises APIError when the server takes no work on; not so with ``admit`` False, for the further parts of
    work that was taken on.
    """

    def __init__(
        self,
        state: ServerState,
        requests: Sequence[EngineCoreRequest],
        texts: Sequence[str | None],
        admit: bool = True,
    ) -> None:
        if admit:
            state.check_serving()
            state.admit(sum(request.sampling_params.n for request in requests))
        self._engine = state.engine
        self._requests = list(zip(requests, texts, strict=True))
        self._log = state.args.enable_log_requests
        self.stream = OutputStream()
        self._positions = {request.request_id: position for position, request in enumerate(requests)}
        self._unfinished = set(self._positions)

    async def start(self) -> Running:
        try:
            for i, (request, text) in enumerate(self._requests, 1):
                if self._log:
                    _log_request(request)
                self._engine.add_request(request, text, self.stream)
                if i % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def finished(self) -> bool:
        """Whether the last output of every request has been taken."""
        return not self._unfinished

    def take(self) -> tuple[int, RequestOutput] | None:
        """The next output that is there, with its request's position. Raises APIError for a request that failed."""
        output = self.stream.take()
        return None if output is None else self._placed(output)

    async def final_outputs(self) -> list[RequestOutput]:
        """The last output of every request, in their order. Raises APIError for a request that failed."""
        finals: dict[int, RequestOutput] = {}
        while self._unfinished:
            position, output = self._placed(await self.stream.get())
            if output.finished:
                finals[position] = output
        return [finals[position] for position in range(len(finals))]

    def _placed(self, output: RequestOutput) -> tuple[int, RequestOutput]:
        if output.finished or output.error is not None:
            raise_for(output)
            self._unfinished.discard(output.request_id)
        return self._positions[output.request_id], output

    def close(self) -> None:
        self.stream.on_news = None
        if self._unfinished:
            self._engine.abort(self._unfinished)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _log_request(request: EngineCoreRequest) -> None:
    """What is asked for, without a word of the client's: of texts, lists and objects only the lengths."""
    params = request.sampling_params
    changed = [f.name for f in fields(params) if getattr(params, f.name) != getattr(_DEFAULTS, f.name)]
    described = ", ".join(f"{name}={_size_of(getattr(params, name))}" for name in changed)
    logger.info("request %s: %d prompt tokens, %s", request.request_id, len(request.prompt_token_ids), described)


def _size_of(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | RequestOutputKind):
        return str(value)
    if isinstance(value, StructuredOutputsParams):
        return next(f"<{name}>" for name, given in vars(value).items() if given not in (None, False))
    return f"<{len(value)}>" if isinstance(value, Sized) else f"<{type(value).__name__}>"


def weight(completion: CompletionOutput, output: RequestOutput) -> int:
    """How much work it is to write an answer down."""
    tables = (completion.logprobs, output.prompt_logprobs)
    return len(completion.token_ids) // 50 + sum(table.num_values for table in tables if table is not None)


async def encoded(state: ServerState, answers: Sequence[tuple[Callable[[], Struct], int]]) -> list[Any]:
    """Answers, each with its weight, made and written as JSON; in a thread where that would hold up the event loop."""

    def make() -> list[Raw]:
        return [Raw(encode_json(answer())) for answer, _ in answers]  # one at a time: encoding holds up all threads

    heavy = sum(weight for _, weight in answers) > _WORTH_A_THREAD
    return await state.engine.run_in_thread(make) if heavy else make()


def raise_for(output: RequestOutput) -> None:
    if output.error is not None and output.error_param is not None:
        raise bad_request(output.error, output.error_param)
    if output.error is not None:
        raise APIError(500, f"The engine failed on this request: {output.error}", code="engine_error")
    if output.finished and any(completion.finish_reason == "abort" for completion in output.outputs):
        raise APIError(
            503, "The request was aborted because the server is shutting down", code="aborted",
            headers={"retry-after": "1"},
        )  # fmt: skip


def streamed_usage(state: ServerState, body: GenerationRequest) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each of its chunks carries it, as in vLLM."""
    if state.args.enable_force_include_usage:
        return True, True
    options = body.stream_options
    include = options is not None and bool(options.include_usage)
    return include, include and bool(options and options.continuous_usage_stats)


def formatter(state: ServerState, body: GenerationRequest) -> LogprobsFormatter:
    as_ids = body.return_tokens_as_token_ids
    return LogprobsFormatter(
        state.engine.output_processor.vocabulary, state.args.return_tokens_as_token_ids if as_ids is None else as_ids
    )


def external_id(request: Request, prefix: str, asked: str | None = None) -> str:
    """The id that the answer carries. It is made of the request's own: what the client says in the body (``asked``) or
    in X-Request-Id, else one of ours. Raises a 409 while the client's is in use."""
    state = request.scope["state"]
    if asked is not None:
        state["request_id"], state["client_chose_id"] = asked, True
    if state["client_chose_id"]:
        state_of(request).claim_id(state["request_id"])
        state["claimed_id"] = state["request_id"]  # until it is answered, see Gate
    return f"{prefix}-{state['request_id']}"


def state_of(request: Request) -> Any:
    return request.app.state.server
