"""Keyword arguments of `octavo.LLM` and `octavo.AsyncLLM`: the engine's, their own, and vLLM's others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.chat.options import AUTO, PRESERVE, STRICT_LEVELS
from octavo.chat.thought_tags import REASONING_PARSERS
from octavo.chat.tools.formats.table import TOOL_CALL_PARSERS
from octavo.engine import vllm_arguments
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.text.chat_template import check_variables


@dataclass
class LLMOptions:
    """Keyword arguments of `LLM` that the engine itself has no use for; vLLM's names and meanings."""

    served_model_name: str | Sequence[str] | None = None  # the first is the label of metrics
    max_logprobs: int = -1  # alternatives that a request may ask for; -1: as many as the vocabulary has
    override_generation_config: dict[str, Any] | None = None
    strict_json_schema: bool = True  # objects have the properties that a schema names, where it says nothing on others
    tool_strict_level: str = "auto"  # or "function", "parameter": what is held of calls of tools
    chat_template: str | None = None  # the template itself, for `chat`
    default_chat_template_kwargs: dict[str, Any] | None = None
    tool_call_parser: str | None = None  # None: the format that the chat template shows
    reasoning_parser: str | None = None  # None: the tags that the chat template shows
    preserve_reasoning: str = AUTO  # or "always", "never": whether thoughts of earlier turns stay in prompts
    decisions_calibration: str | None = None  # None: decisions.json of the model's folder
    reasoning_budget_message: str = ""  # that ends thoughts which have used up `thinking_token_budget`
    disable_log_stats: bool = True  # nothing is logged either way, and get_metrics always tells
    use_tqdm_on_load: bool = True

    def __post_init__(self) -> None:
        given = self.override_generation_config
        if not isinstance(given, dict | None):
            raise ConfigError(f"override_generation_config must be a dict of sampling parameters, got {given!r}")
        for name, known in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
            ("tool_strict_level", STRICT_LEVELS),
            ("preserve_reasoning", PRESERVE),
        ):
            if (given := getattr(self, name)) is not None and given not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {given!r}")
        check_variables(self.default_chat_template_kwargs or {}, "default_chat_template_kwargs")


def split_arguments(given: dict[str, Any], caller: str = "LLM") -> tuple[dict[str, Any], LLMOptions]:
    """Arguments of the engine, and the options of ``caller`` itself. Raises TypeError, ConfigError."""
    own_names = {option.name for option in fields(LLMOptions)}
    engine_args, own = {}, {}
    for name, value in given.items():
        if name in EngineArgs.field_names():
            if value is not None:
                engine_args[name] = _dtype_name(value) if name.endswith("dtype") else value
        elif name in own_names:
            if value is not None:
                own[name] = value
        elif vllm_arguments.is_known(name):
            vllm_arguments.check(name, value)
        else:
            hint = vllm_arguments.did_you_mean(name, own_names | EngineArgs.field_names())
            raise TypeError(f"{caller}() got the unknown argument {name!r}{hint}")
    return engine_args, LLMOptions(**own)


def _dtype_name(value: Any) -> str:
    """torch.float16 as "float16"."""
    return str(value).removeprefix("torch.")


class AsyncEngineArgs(EngineArgs):
    """Arguments of `octavo.AsyncLLM` as an object, under vLLM's name: all keywords of `LLM`. Raises as `LLM` does."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        if arguments.pop("enable_log_requests", False):
            raise ConfigError("enable_log_requests is the server's: an AsyncLLM logs no requests; leave it out")
        engine_args, self.options = split_arguments(arguments, "AsyncEngineArgs")
        super().__init__(model=model, **engine_args)
