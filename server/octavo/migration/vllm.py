"""Flags of vLLM, judged one by one by the parser of `octavo serve` itself, then together by its checks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NoReturn

from octavo.engine import vllm_arguments as vllm
from octavo.errors import ConfigError
from octavo.fetch.model_names import OLLAMA_NAMES
from octavo.flags.fields import with_dashes
from octavo.flags.keys import with_plain_switches
from octavo.flags.parser import CommandParser
from octavo.flags.serve_flags import add_serve_flags, serve_arguments
from octavo.flags.vllm_flags import judge_unknown_flag
from octavo.migration.rules import SECRETS
from octavo.migration.verdict import Status, Verdict
from octavo.system.suggestions import did_you_mean

# Arguments whose value goes where another argument's does.
PART_OF = {
    "speculative_model": "speculative_config",
    "num_speculative_tokens": "speculative_config",
    "rope_scaling": "hf_overrides",
    "rope_theta": "hf_overrides",
}
_READ = ("VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_LONG_MAX_MODEL_LEN")
# Variables of vLLM's, and what does their work.
VARIABLES = {
    **dict.fromkeys(_READ, "read here, too"),
    "VLLM_ATTENTION_BACKEND": "the engine chooses, or --attention-backend",
    "VLLM_USE_MODELSCOPE": "models come from Hugging Face, https, buckets or folders",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes does that",
    "VLLM_CPU_OMP_THREADS_BIND": "OMP_NUM_THREADS and taskset do that",
    "VLLM_LOGGING_LEVEL": "--log-level does that",
    "VLLM_PORT": "--port does that",
    "VLLM_HOST_IP": "--host does that",
}


_SWITCHES = ("--enable-", "--disable-", "--fully-", "--worker-use-", "--engine-use-", "--calculate-", "--ray-workers-")


class _Parser(CommandParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving."""
        self._refused.clear()
        raise ConfigError(message)


@cache
def serve_parser() -> CommandParser:
    """The parser of `octavo serve`, whose errors are ConfigErrors."""
    parser = _Parser(prog="octavo serve")
    add_serve_flags(parser)
    return parser


def judge(arguments: list[str], environment: Mapping[str, str]) -> list[Verdict]:
    """A verdict for every flag, value and variable, in their order."""
    found = [_variable(name) for name in environment if name.startswith("VLLM_")]
    found += [_judge(flag, values) for flag, values in split(arguments)]
    return found


def split(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with their values, and words of no flag as ``("", [word])``."""
    options = serve_parser()._option_string_actions
    words = with_plain_switches(with_dashes(arguments), options)
    while words:
        word = words.pop(0)
        if not _is_flag(word):
            yield "", [word]
            continue
        flag, equals, value = word.partition("=")
        if not equals and not word.startswith("--") and word not in options and word[:2] in options:
            flag, equals, value = word[:2], "=", word[2:]  # -O3
        values = [value] if equals else []
        most = _most_values(options.get(flag.partition(".")[0])) if not equals else 0
        while words and len(values) < most and not _is_flag(words[0]):
            values.append(words.pop(0))
        yield flag, values


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word.strip("-") != "" and not word[1:2].isdigit()


def _most_values(action: argparse.Action | None) -> float:
    if action is None:
        return 1
    if action.dest == "_not_supported":  # the parser takes any number, and the model with it
        return 0 if action.option_strings[0].startswith(_SWITCHES) else 1
    if action.nargs == "+":
        return float("inf")
    return action.nargs if isinstance(action.nargs, int) else 1


def _variable(name: str) -> Verdict:
    status = Status.TAKEN if name in _READ else Status.NO_EFFECT
    return Verdict(name, status, VARIABLES.get(name, "vLLM's own") if status is Status.NO_EFFECT else "")


def _judge(flag: str, values: list[str]) -> Verdict:
    given = shown(flag, values)
    if not flag:
        return _model(values[0])
    action = serve_parser()._option_string_actions.get(flag.partition(".")[0])  # with a key of its JSON
    if action is None:
        return _unknown(flag, given)
    name = action.option_strings[0].removeprefix("--").replace("-", "_")
    removed = " (vLLM has removed it)" if name in vllm.REMOVED else ""
    if action.dest == "_not_supported":
        said = vllm.not_supported_yet(action.option_strings[0]).partition(" is ")[2]
        return Verdict(given, Status.REFUSED, said + removed)
    if action.dest in ("_always", "_no_effect"):
        text = vllm.ALWAYS[name] if action.dest == "_always" else vllm.NO_EFFECT[name][1]
        problem = "takes no value: leave it out" if values and action.nargs == 0 else None
        return Verdict(given, Status.REFUSED if problem else Status.NO_EFFECT, (problem or text) + removed)
    arguments = [flag, *values] if len(values) != 1 or not values[0].startswith("-") else [f"{flag}={values[0]}"]
    try:
        serve_parser().parse_args(arguments)
    except ConfigError as error:
        return Verdict(given, Status.REFUSED, (str(error).partition(": ")[2] or str(error)) + removed)
    if action.dest == "_only":
        return Verdict(given, Status.NO_EFFECT, vllm.ONLY[name][1] + removed)
    if name in PART_OF:
        return Verdict(given, Status.RENAMED, f"part of {dashed(PART_OF[name])}{removed}", tuple(arguments))
    if flag.startswith("--") and flag != (own := action.option_strings[0]) and flag != own.replace("--", "--no-", 1):
        return Verdict(given, Status.RENAMED, own, tuple(arguments))
    return Verdict(given, Status.TAKEN, "", tuple(arguments))


def _model(name: str) -> Verdict:
    if "/" not in name and name.removesuffix(":latest") in OLLAMA_NAMES:
        return Verdict(name, Status.REFUSED, f"a name of Ollama's: give {OLLAMA_NAMES[name.removesuffix(':latest')]}")
    return Verdict(name, Status.TAKEN, "", (name,))


def _unknown(flag: str, given: str) -> Verdict:
    judged = judge_unknown_flag(flag)
    if judged is None:
        near = did_you_mean(flag, serve_parser().flags())
        return Verdict(given, Status.REFUSED, f"unknown, to vLLM as well{near}")
    if not judged:
        return Verdict(given, Status.NO_EFFECT, "there is nothing to switch off")
    return Verdict(given, Status.REFUSED, judged.removeprefix(flag.partition(".")[0] + " is "))


def together(arguments: list[str], environment: Mapping[str, str]) -> list[Verdict]:
    """A verdict on arguments that do not fit together, or on the first value of ours that is wrong; else none."""
    try:
        namespace: Any = serve_parser().parse_args(arguments)
        serve_arguments(namespace, environment)
    except ConfigError as error:
        return [Verdict("together", Status.REFUSED, str(error))]
    return []


def dashed(name: str) -> str:
    """The flag of an argument."""
    return "--" + name.replace("_", "-")


def shown(flag: str, values: list[str]) -> str:
    """A flag with its values as people read it; never a key."""
    if flag in SECRETS:
        values = ["***"] * len(values)
    return " ".join([flag, *values]).strip()
