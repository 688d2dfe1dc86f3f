"""The engine offline: prompts in, answers out, no server and no sockets."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.config import EngineArgs
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor
from octavo.engine.messages import EngineCoreRequest, SchedulerStats
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import OctavoError
from octavo.interrupts import interrupts_held
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenizer import Tokenizer
from octavo.worker.pooler import POOLINGS

logger = logging.getLogger(__name__)

Prompt = str | dict[str, Any] | list[int]


@dataclass
class Totals:
    """What an `LLM` has computed since it was made. Prompt tokens count as often as they were computed."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens

    def add(self, stats: SchedulerStats) -> None:
        for counter in fields(self):
            setattr(self, counter.name, getattr(self, counter.name) + getattr(stats, counter.name))


class LLM:
    """A model in this process.

    >>> llm = LLM()                                   # the embedded model
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text

    Keyword arguments are those of `octavo.config.EngineArgs`. Raises ConfigError or ModelError when it cannot start.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        unknown = engine_args.keys() - EngineArgs.field_names()
        if unknown:
            raise TypeError(f"LLM() got unknown arguments: {', '.join(sorted(unknown))}")
        config = EngineArgs(model=model, **engine_args).create_engine_config()
        self.engine = EngineCore(config)
        self.config = self.engine.config
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(config.model.files)
        self._input = InputProcessor(self.config, self.tokenizer)
        self._output = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()
        self.totals = Totals()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self._input.default_sampling_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or a list of ids.

        Returns one RequestOutput a prompt, in their order. Raises ValueError, naming the field, before anything runs
        when a prompt or its parameters cannot be served.
        """
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = self._params_for(sampling_params, len(many))
        if priority is not None and len(priority) != len(many):
            raise ValueError(f"priority has {len(priority)} entries for {len(many)} prompts")
        requests = []
        for i, (prompt, one) in enumerate(zip(many, params, strict=True)):
            one = dataclasses.replace(one)
            one.output_kind = RequestOutputKind.FINAL_ONLY
            requests.append(
                self._input.process(str(next(self._ids)), prompt, one, priority=priority[i] if priority else 0)
            )
        return self._run(requests, [_text_of(prompt) for prompt in many], use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and skip_tokenizer_init=True was given")
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            prompts.append({"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "mean") -> list[list[float]]:
        """One vector of length 1 a prompt: the "mean" of its hidden states, or the "last" token's.

        Raises OctavoError when the engine cannot make one of them.
        """
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        requests = []
        for prompt in many:
            request = self._input.process(str(next(self._ids)), prompt, SamplingParams(max_tokens=1))
            request.pooling = pooling
            requests.append(request)
        outputs = self._run(requests, [None] * len(requests), False)
        for number, output in enumerate(outputs):
            if output.embedding is None:
                raise OctavoError(f"prompt {number} could not be embedded: {output.error}")
        return [output.embedding for output in outputs if output.embedding is not None]

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise ValueError(f"sampling_params has {len(given)} entries for {count} prompts")
        return list(given)

    def _run(
        self, requests: list[EngineCoreRequest], texts: list[str | None], show_progress: bool
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        request_ids = [request.request_id for request in requests]
        progress = _Progress(len(requests)) if show_progress else None
        try:
            with interrupts_held() as interrupt:
                for request, text in zip(requests, texts, strict=True):
                    self._output.add_request(request, text)
                    self.engine.add_request(request)
                while len(finished) < len(request_ids):
                    interrupt()
                    for output in self._step():
                        if output.finished:
                            finished[output.request_id] = output
                            if progress is not None:
                                progress.update(output)
        except BaseException:
            # A request that can never run, Ctrl-C, or a fault of our own: leave an engine that can be used again.
            self.engine.abort_requests(request_ids)
            self._output.abort_requests(request_ids)
            raise
        finally:
            if progress is not None:
                progress.close()
        return [finished[request_id] for request_id in request_ids]

    def _step(self) -> Iterator[RequestOutput]:
        step = self.engine.step()
        if step.stats is not None:
            self.totals.add(step.stats)
        outputs, stopped = self._output.process_outputs(step.outputs, step.timestamp)
        for request_id, index in stopped:
            self.engine.finish_sample(request_id, index)
        yield from outputs


class _Progress:
    """A bar on stderr with the rate of output tokens; silent where `rich` is not installed."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self._tokens = 0
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            return
        columns = (
            TextColumn("Processed prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self._bar = Progress(*columns, console=Console(file=sys.stderr))
        self._task = self._bar.add_task("", total=total, rate="")
        self._bar.start()

    def update(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        rate = self._tokens / max(self._bar.tasks[0].elapsed or 0.0, 1e-9)
        self._bar.update(self._task, advance=1, rate=f"{rate:,.1f} output tok/s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, (str, dict)) or (
        isinstance(prompts, (list, tuple)) and bool(prompts) and all(isinstance(p, int) for p in prompts)
    )


def _text_of(prompt: Any) -> str | None:
    return prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
