"""The engine offline: prompts in, answers out, no server and no sockets."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.chat.decisions.calibration import read_temperatures
from octavo.chat.messages import Conversation, check_messages, check_texts, images_of
from octavo.chat.offline_images import offline_image
from octavo.chat.options import ChatOptions
from octavo.chat.own_format import with_response_template
from octavo.chat.render import Rendered, render
from octavo.chat.structured import Constraint
from octavo.engine.args import EngineArgs
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor, text_of_prompt
from octavo.engine.llm_options import split_arguments
from octavo.engine.lora import OfflineAdapters
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import ConfigError
from octavo.executor.multiproc import start_ranks
from octavo.executor.rank_processes import RankProcesses
from octavo.fetch.decisions_file import read_decisions_file
from octavo.interface.lora import Adapter, LoRARequest
from octavo.interface.messages import EngineCoreRequest, SchedulerStats, SpecDecodeStats
from octavo.interface.outputs import RequestOutput
from octavo.interface.pooling_params import check_generates
from octavo.interface.sampling_params import RequestOutputKind, SamplingParams
from octavo.llm_beam_search import BeamSearchMethods
from octavo.llm_decisions import DecisionMethods
from octavo.llm_pooling import PoolingMethods, Prompt, is_one_prompt
from octavo.metrics.reader import Counter, Gauge, Metric, Vector
from octavo.metrics.stats import FINISH_REASONS, cache_config_labels
from octavo.system.progress_bar import progress_bar
from octavo.system.signals import interrupts_held
from octavo.system.torch_import import import_whole_torch
from octavo.text.tokenizer import Tokenizer
from octavo.text.user_tokenizer import UserTokenizer


@dataclass
class Totals:
    """Totals of an `LLM` since it was made. Prompt tokens count as often as they were computed."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    spec_decode: SpecDecodeStats = field(default_factory=SpecDecodeStats)

    def add(self, stats: SchedulerStats) -> None:
        """Add what one step counted."""
        if stats.spec_decode is not None:
            self.spec_decode.add(stats.spec_decode)
        for counter in fields(self)[:-1]:
            setattr(self, counter.name, getattr(self, counter.name) + getattr(stats, counter.name))


class LLM(PoolingMethods, BeamSearchMethods, DecisionMethods):
    """A model in this process.

    >>> llm = LLM()                                   # the embedded model
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text

    Keyword arguments are those of `EngineArgs` (octavo.engine.args), of `LLMOptions` (octavo.engine.llm_options), and
    vLLM's, which either say what is so anyway or are refused. None means: the default. Raises TypeError for unknown
    ones, ConfigError or ModelError when the engine cannot start.
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        engine_args, options = split_arguments(arguments)
        args = EngineArgs(model=model, **engine_args)
        local = _start_beside(args)
        try:
            import_whole_torch()
            config = args.create_engine_config(progress=options.use_tqdm_on_load)
            config.model.generation_config.update(options.override_generation_config or {})
            config, ranks = start_ranks(config, local=local)
            self.engine = EngineCore(config, ranks=ranks)
        except BaseException:
            if local is not None:
                local.close()
            raise
        self.config = self.engine.config
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(config.model.files)
        names = options.served_model_name or config.model.model
        self.model_name = names if isinstance(names, str) else names[0]
        chat_options = ChatOptions(
            options.chat_template,
            trust_request_chat_template=True,
            default_chat_template_kwargs=options.default_chat_template_kwargs or {},
            tool_call_parser=options.tool_call_parser,
            strict_json_schema=options.strict_json_schema,
            tool_strict_level=options.tool_strict_level,
            reasoning_parser=options.reasoning_parser,
            preserve_reasoning=options.preserve_reasoning,
            reasoning_budget_message=options.reasoning_budget_message,
        )
        self._chat_options = with_response_template(chat_options, self.tokenizer)
        self._input = InputProcessor(self.config, self.tokenizer, options.max_logprobs, options.strict_json_schema)
        self._output = OutputProcessor(self.tokenizer)
        files, given = self.config.model.files, options.decisions_calibration
        self._temperatures = read_decisions_file(given, files, read_temperatures)
        self._adapters = OfflineAdapters(self.engine, engine_args.get("download_dir"))
        self._ids = itertools.count()
        self.totals = Totals()
        self._finished: Counts[str] = Counts()

    def _new_id(self) -> str:
        return str(next(self._ids))

    def get_tokenizer(self) -> UserTokenizer:
        """The model's tokenizer under transformers' names. Raises ValueError where there is none."""
        return UserTokenizer(self._require_tokenizer("get_tokenizer"))

    def _require_tokenizer(self, method: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{method} needs a tokenizer, and skip_tokenizer_init=True was given")
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges under the names that they have at a server's /metrics, counters without "_total"."""
        labels = {"model_name": self.model_name, "engine": "0"}
        scheduler, total = self.engine.scheduler, self.totals
        gauges = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage_perc": scheduler.kv.usage,
        }
        counters = {
            "prompt_tokens": self._finished["prompt_tokens"],
            "generation_tokens": self._finished["generation_tokens"],
            "prefix_cache_queries": total.prefix_cache_queries,
            "prefix_cache_hits": total.prefix_cache_hits,
            "num_preemptions": total.num_preemptions,
        }
        metrics: list[Metric] = [Gauge(f"vllm:{name}", value, labels=labels) for name, value in gauges.items()]
        metrics += [Counter(f"vllm:{name}", value, labels=labels) for name, value in counters.items()]
        metrics += [
            Counter("vllm:request_success", self._finished[reason], labels={**labels, "finished_reason": reason})
            for reason in FINISH_REASONS
        ]
        metrics += self._spec_decode_metrics(labels)
        executor = self.engine.executor
        longest = executor.kv_layout.most_blocks(self.config.scheduler.max_model_len)
        info = cache_config_labels(self.config, executor.num_blocks, longest)
        return [*metrics, Gauge("vllm:cache_config_info", 1, labels={"engine": "0", **info})]

    def _spec_decode_metrics(self, labels: dict[str, str]) -> list[Metric]:
        """Counts of guessed and of accepted tokens; empty without speculation."""
        if not self.config.speculative.is_on:
            return []
        spec, k = self.totals.spec_decode, self.config.speculative.num_speculative_tokens
        counters = {
            "num_drafts": spec.num_drafts,
            "num_draft_tokens": spec.num_draft_tokens,
            "num_accepted_tokens": spec.num_accepted_tokens,
        }
        metrics: list[Metric] = [Counter(f"vllm:spec_decode_{n}", v, labels=labels) for n, v in counters.items()]
        values = [*spec.num_accepted_per_pos, *[0] * k][:k]
        return [*metrics, Vector("vllm:spec_decode_num_accepted_tokens_per_pos", values, labels=labels)]

    def reset_prefix_cache(self) -> bool:
        """Forget what earlier prompts have computed. False, and nothing is forgotten, while requests are running."""
        return self.engine.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config.json recommends."""
        return self._input.default_sampling_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or a list of ids.

        ``lora_request``: the LoRA adapter of all prompts, or of each (None: the model as it is). Returns one
        RequestOutput a prompt, in their order. Raises ValueError, naming the field, before anything runs when a prompt
        or its parameters cannot be served, ModelError for an adapter that cannot be used.
        """
        check_generates(self._input.pooler)
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        params = self._params_for(sampling_params, len(many))
        if priority is not None and len(priority) != len(many):
            raise ValueError(f"priority has {len(priority)} entries for {len(many)} prompts")
        adapters = self._adapters_for(lora_request, len(many))
        ranks = priority or [0] * len(many)
        if any(one.thinking_token_budget is not None for one in params):
            raise ValueError("thinking_token_budget needs a chat, whose template shows thoughts; call LLM.chat")
        requests = [
            self._input.process(self._new_id(), prompt, one, priority=rank, adapter=adapter)
            for prompt, one, rank, adapter in zip(many, params, ranks, adapters, strict=True)
        ]
        return self._run(requests, [text_of_prompt(prompt) for prompt in many], use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        documents: list[dict[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template: with the prompt that
        /v1/chat/completions makes of the same messages and options.

        The text of an answer is the model's own, calls and reasoning as it writes them
        (`SamplingParams.skip_special_tokens` False keeps their marks); its ``message`` is what the server makes of it,
        with role, content, reasoning and tool_calls.

        Contents may be lists of parts: text, image_url (a data: url), image_pil (a PIL image). Raises as `generate`.
        """
        check_generates(self._input.pooler)
        self._require_tokenizer("chat")
        many: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        params = self._params_for(sampling_params, len(many))
        adapters = self._adapters_for(lora_request, len(many))
        asked = Conversation(
            [],
            tools,
            tool_choice,
            parallel_tool_calls,
            documents,
            reasoning_effort,
            chat_template,
            chat_template_kwargs,
            add_generation_prompt,
            continue_final_message,
        )
        requests, chats = list[EngineCoreRequest](), list[Rendered]()
        for given, one, adapter in zip(many, params, adapters, strict=True):
            turn = dataclasses.replace(asked, budget=one.thinking_token_budget)
            rendered = self._render(dataclasses.replace(turn, messages=check_messages(given, offline_image)), one)
            requests.append(self._chat_request(rendered, one, adapter))
            chats.append(rendered)
        outputs = self._run(requests, [rendered.text for rendered in chats], use_tqdm)
        for output, rendered, one in zip(outputs, chats, params, strict=True):
            for completion in output.outputs if one.detokenize else ():
                completion.message = rendered.message(completion, not one.skip_special_tokens)
        return outputs

    def _render(self, conversation: Conversation, params: SamplingParams) -> Rendered:
        inputs = self._input.images
        if images := images_of(conversation.messages):
            inputs.check(len(images))
            check_texts(conversation.messages, images, inputs.placeholder)

        def tokenize(text: str) -> list[int]:
            return self._input.tokenize(text, add_special_tokens=False)

        def constraint() -> Constraint | None:
            form = params.structured_outputs
            return None if form is None else Constraint(form, f"structured_outputs.{form.kind}")

        options = self._chat_options
        rendered = render(conversation, options, self.tokenizer, tokenize, lambda: inputs.placeholder, constraint)
        return rendered.with_boundaries() if self.config.model.is_recurrent else rendered

    def _chat_request(self, rendered: Rendered, params: SamplingParams, adapter: Adapter | None) -> EngineCoreRequest:
        rendered.add_stop_tokens(params, self._input.eos_token_ids)
        prompt = rendered.prompt([part.image for part in rendered.images])
        field = "tools" if rendered.constraint is None else rendered.constraint.field
        request = self._input.process(
            self._new_id(), prompt, params, grammar=rendered.grammar(), grammar_field=field, adapter=adapter
        )
        request.thoughts = rendered.budget
        return request

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            given = [given] * count
        if len(given) != count:
            raise ValueError(f"sampling_params has {len(given)} entries for {count} prompts")
        return [dataclasses.replace(one, output_kind=RequestOutputKind.FINAL_ONLY) for one in given]

    def _adapters_for(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[Adapter | None]:
        if given is None or isinstance(given, LoRARequest):
            return [None if given is None else self._adapters.find(given)] * count
        if len(given) != count:
            raise ValueError(f"lora_request has {len(given)} entries for {count} prompts")
        return [None if one is None else self._adapters.find(one) for one in given]

    def _run(
        self, requests: list[EngineCoreRequest], texts: list[str | None], show_progress: bool
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        request_ids = [request.request_id for request in requests]
        progress = _Progress(len(requests)) if show_progress else None
        try:
            with interrupts_held() as interrupt:
                for grammar, field in {r.grammar: r.grammar_field for r in requests if r.grammar is not None}.items():
                    try:
                        self.engine.check_grammar(grammar)
                    except ValueError as error:
                        raise ValueError(f"{field} {error}") from None
                    interrupt()
                for request, text in zip(requests, texts, strict=True):
                    self._output.add_request(request, text)
                    self.engine.add_request(request)
                while len(finished) < len(request_ids):
                    interrupt()
                    for output in self._step():
                        if output.finished:
                            finished[output.request_id] = output
                            self._count(output)
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

    def _count(self, output: RequestOutput) -> None:
        self._finished["prompt_tokens"] += len(output.prompt_token_ids)
        for completion in output.outputs:
            self._finished["generation_tokens"] += len(completion.token_ids)
            self._finished[completion.finish_reason or "error"] += 1

    def _step(self) -> Iterator[RequestOutput]:
        step = self.engine.step()
        if step.stats is not None:
            self.totals.add(step.stats)
        outputs, stopped = self._output.process_outputs(step.outputs, step.timestamp)
        for request_id, index in stopped:
            self.engine.finish_sample(request_id, index)
        yield from outputs


def _start_beside(args: EngineArgs) -> RankProcesses | None:
    """The other ranks of this machine, if there are any, before anything slow: they import beside this process. Raises
    ConfigError."""
    args._validate()
    if (cores := args.data_parallel_size) > 1:
        raise ConfigError(f"data_parallel_size {cores} is octavo serve's; give 1 here, or make that many LLMs")
    if args.distributed_executor_backend == "ray":
        return None  # which says where they are
    if args.nnodes > 1:
        raise ConfigError(f"nnodes {args.nnodes} is octavo serve's; give 1 here")
    count = args.tensor_parallel_size * args.pipeline_parallel_size
    return RankProcesses(range(1, count)) if count > 1 else None


class _Progress:
    """A bar on stderr with the rate of output tokens; silent where `rich` is not installed."""

    def __init__(self, total: int) -> None:
        columns = ("MofNCompleteColumn", "TimeRemainingColumn", "{task.fields[note]}")
        self._bar, self._tokens = progress_bar("Processed prompts", total, *columns), 0
        if self._bar is not None:
            self._bar.start()

    def update(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        (task,) = self._bar.tasks
        rate = self._tokens / max(task.elapsed or 0.0, 1e-9)
        self._bar.update(task.id, advance=1, note=f"{rate:,.1f} output tok/s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
