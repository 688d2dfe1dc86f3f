"""The tables of `octavo.engine.vllm_arguments` as flags: scripts may go on giving them, with values that change
nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from typing import Any

from octavo.engine import vllm_arguments as vllm

_SHORT = {
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "api_server_count": "-asc",
    "compilation_config": "-O",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
}


def add_vllm_flags(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """Add the flags that vLLM has and Octavo has not, but for those in ``skip``: accepted without effect, or refused
    with the reason."""
    group = parser.add_argument_group("flags of vLLM that change nothing here")
    for name, text in vllm.ALWAYS.items():
        group.add_argument(*_flags(name), action="store_true", default=argparse.SUPPRESS, dest="_always", help=text)
    for name, (values, text) in vllm.ONLY.items():
        if name in skip:
            continue
        spelt = tuple(map(str, values))
        group.add_argument(
            *_flags(name),
            type=_one_of(spelt, text),
            default=argparse.SUPPRESS,
            dest="_only",
            metavar="|".join(spelt),
            help=text,
        )
    for name, (count, text) in vllm.NO_EFFECT.items():
        group.add_argument(
            *_flags(name),
            action=_NoEffect,
            nargs=None if count == 1 else count,
            metavar="X" if count else None,
            default=argparse.SUPPRESS,
            dest="_no_effect",
            help=f"no effect: {text}",
            const=text,
        )
    for name in vllm.NOT_SUPPORTED_YET:
        group.add_argument(
            *_flags(name),
            action=_NotSupported,
            nargs="*",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            dest="_not_supported",
        )


def judge_unknown_flag(flag: str) -> str | None:
    """Explain ``flag``, which the parser does not know: a sentence if vLLM has it, '' if it switches off a feature that
    does not exist here, None if vLLM does not have it either.

    vLLM takes ``--no-`` before most switches.
    """
    name = flag.removeprefix("--").replace("-", "_")
    negated = name.removeprefix("no_")
    if negated == name:
        return None
    if negated in vllm.ALWAYS and negated != "disable_log_requests":
        return f"{flag} is not supported yet ({vllm.ALWAYS[negated]}); leave it out"
    return "" if vllm.is_known(negated) else None


def _flags(name: str) -> list[str]:
    return ["--" + name.replace("_", "-"), *([_SHORT[name]] if name in _SHORT else [])]


class _NoEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(f"octavo: {option_string} has no effect: {self.const}", file=sys.stderr)


class _NotSupported(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.refuse(vllm.not_supported_yet(self.option_strings[0]))


def _one_of(values: tuple[str, ...], reason: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text} is not supported yet ({reason}): give {' or '.join(values)}")
        return text

    return check
