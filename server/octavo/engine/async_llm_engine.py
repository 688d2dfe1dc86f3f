"""The engine for an asyncio program: the core in a process of its own, as behind the HTTP server, and no HTTP."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import AsyncGenerator, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.engine.args import EngineArgs
from octavo.engine.core_launcher import CoreOptions, start_cores
from octavo.engine.input_processor import text_of_prompt
from octavo.engine.llm_options import AsyncEngineArgs, LLMOptions
from octavo.engine.lora import KnownAdapters, check_takes_adapters
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.interface.lora import Adapter, LoRARequest
from octavo.interface.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.interface.pooling_params import (
    PoolingParams,
    check_generates,
    class_pooling,
    embedding_pooling,
    prompt_before,
)
from octavo.interface.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.text.user_tokenizer import UserTokenizer

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM as Engine
    from octavo.interface.engine_config import ModelConfig
    from octavo.interface.messages import EngineCoreRequest

Prompt = str | dict[str, Any] | list[int]


class AsyncLLM:
    """A model in a process beside this one, for many requests at a time.

    >>> llm = AsyncLLM()                                              # the embedded model
    >>> async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)                             # so far
    >>> llm.shutdown()

    Keyword arguments and what they raise are those of `octavo.LLM`; it needs the package msgspec besides. Loading goes
    on while the program does: the first request waits for it, as `wait_ready` does. Belongs to the event loop that it
    is first used in. Ends with `shutdown`, at the end of ``async with``, or with this process.
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        self._start(AsyncEngineArgs(model, **arguments))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """An engine with arguments that are an object: `AsyncEngineArgs`, or `EngineArgs`. Raises as the class does."""
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        if find_spec("msgspec") is None:  # octavo.LLM does without it
            raise ConfigError(
                "processes exchange messages with the package msgspec, which is not installed: pip install msgspec, or "
                "use octavo.LLM, whose engine is in this process"
            )
        options = args.options if isinstance(args, AsyncEngineArgs) else LLMOptions()
        args._validate()
        if args.nnodes > 1:
            raise ConfigError(f"nnodes {args.nnodes} is octavo serve's; give 1 here")
        self._process = start_cores(args)  # whose imports take longest
        try:
            config = args.create_engine_config(progress=options.use_tqdm_on_load)
            config.model.generation_config.update(options.override_generation_config or {})
            self._process.configure(config.to_dict(), CoreOptions(log_level="warning"))
            self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(config.model.files)
        except BaseException:
            self._process.stop()
            raise
        self._config, self._options = config, options
        self._adapters, self._reading = KnownAdapters(args.download_dir), asyncio.Lock()
        self._engine: Engine | None = None
        self._ready: asyncio.Task[Any] | None = None
        self._ended = False

    # -- its life ----------------------------------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises OctavoError if it cannot be, EngineDeadError after `shutdown`."""
        await self._started()

    async def _started(self) -> Engine:
        if self._ended:
            raise EngineDeadError("this AsyncLLM has been shut down; make another one")
        if self._engine is None or self._ready is None:
            from octavo.engine.async_llm import AsyncLLM as Engine

            options = self._options
            self._engine = Engine(self._config, self.tokenizer, self._process)
            self._engine.input_processor.max_logprobs = options.max_logprobs
            self._engine.input_processor.strict_json_schema = options.strict_json_schema
            self._ready = asyncio.get_running_loop().create_task(self._engine.wait_ready())
        if self._ready.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncLLM belongs to another event loop; make one for each")
        await asyncio.shield(self._ready)
        return self._engine

    async def __aenter__(self) -> AsyncLLM:
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the engine. Unfinished requests raise EngineDeadError; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._engine is not None:
            self._engine.close()
        else:
            self._process.stop()

    shutdown_background_loop = shutdown

    @property
    def is_running(self) -> bool:
        """True until the engine has ended."""
        return not self._ended and (self._engine is None or self._engine.dead is None)

    @property
    def errored(self) -> bool:
        """True if the engine has ended by itself."""
        return not self._ended and not self.is_running

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has ended."""
        engine = await self._started()
        if engine.dead is not None:
            raise engine.dead

    # -- what it is --------------------------------------------------------------------------------------------------

    async def get_tokenizer(self) -> UserTokenizer:
        """The model's tokenizer under transformers' names. Raises ValueError where there is none."""
        if self.tokenizer is None:
            raise ValueError("get_tokenizer needs a tokenizer, and skip_tokenizer_init=True was given")
        return UserTokenizer(self.tokenizer)

    async def get_model_config(self) -> ModelConfig:
        """The model's configuration, with the ``max_model_len`` that fits the memory."""
        return (await self._started()).config.model

    async def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config.json recommends."""
        return (await self._started()).input_processor.default_sampling_params()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, as `LLM.generate` takes them: outputs as its text grows, the last one ``finished``.

        Each has all of the text so far, what is new (``output_kind`` DELTA), or there is only the last one
        (FINAL_ONLY). A reader that is slow skips some. The request ends when its reader does. ``request_id``: a name
        for `abort` (None: any). Raises ValueError, naming the field, for a request that cannot be served, ModelError
        for an adapter that cannot be used, EngineDeadError if the engine ends.
        """
        engine = await self._started()
        check_generates(engine.input_processor.pooler)
        params = sampling_params or engine.input_processor.default_sampling_params()
        adapter = None if lora_request is None else await self._adapter(engine, lora_request)
        request = await engine.prepare(
            request_id or uuid.uuid4().hex, prompt, copy.copy(params), priority=priority, adapter=adapter
        )
        async for output in _outputs(engine, request, text_of_prompt(prompt)):
            yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: str = "embed",
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool one prompt, as `LLM.encode` does: one output, with a float32 tensor. Raises as `generate`."""
        import torch

        engine = await self._started()
        given, pooler = pooling_params or PoolingParams(), engine.input_processor.pooler
        if pooling_task not in ("embed", "classify"):
            raise ValueError(f"pooling_task {pooling_task!r} is not supported yet: use embed or classify")
        how = (
            embedding_pooling(pooler, given, engine.config.model.hidden_size)
            if pooling_task == "embed"
            else class_pooling(pooler, given)
        )
        request = await engine.run_in_thread(
            engine.input_processor.process_pooling,
            request_id or uuid.uuid4().hex,
            prompt,
            how,
            priority=priority,
            truncate_prompt_tokens=given.truncate_prompt_tokens,
            before=prompt_before(pooler, given) if pooling_task == "embed" else "",
        )
        async for output in _outputs(engine, request, None):
            if output.embedding is None:
                raise OctavoError(f"the prompt could not be pooled: {output.error or 'it was aborted'}")
            pooled = PoolingOutput(torch.tensor(output.embedding))
            yield PoolingRequestOutput(output.request_id, pooled, output.prompt_token_ids)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their readers get a last output with ``finish_reason`` "abort". Unknown ids are ignored."""
        if self._engine is not None:
            self._engine.abort([request_id] if isinstance(request_id, str) else request_id)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before a request needs it. Raises as `generate`."""
        await self._adapter(await self._started(), lora_request)
        return True

    async def _adapter(self, engine: Engine, request: LoRARequest) -> Adapter:
        check_takes_adapters(engine.config.lora, request)
        async with self._reading:
            adapter, state = await engine.run_in_thread(self._adapters.look_up, request)
            return adapter if adapter.digest else self._adapters.keep(await engine.load_adapter(adapter), state)


AsyncLLMEngine = AsyncLLM


async def _outputs(engine: Engine, request: EngineCoreRequest, text: str | None) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a request, which ends with its reader. Raises ValueError for what the core finds wrong in it."""
    from octavo.engine.async_llm import OutputStream

    stream = OutputStream()
    engine.add_request(request, text, stream)
    try:
        while True:
            output = await stream.get()
            if output.error is not None and output.error_param is not None:
                raise ValueError(output.error)
            yield output
            if output.finished:
                return
    finally:
        engine.abort([request.request_id])
