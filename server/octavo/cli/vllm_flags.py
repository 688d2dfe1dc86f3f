"""Flags of vLLM that no option of ours stands for: scripts may go on giving them, with the values that say what is so
anyway. What each means is told by `octavo.vllm_arguments`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from octavo import vllm_arguments as vllm

_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vLLM that change nothing here")
    options = parser._option_string_actions
    for name, text in vllm.ALWAYS.items():
        if _flag(name) not in options:
            group.add_argument(_flag(name), action="store_true", default=argparse.SUPPRESS, dest="_always", help=text)
    for name, (values, text) in vllm.ONLY.items():
        names = [_flag(name), *([_SHORT[name]] if name in _SHORT else [])]
        spelt = tuple(map(str, values))
        group.add_argument(
            *names, type=_one_of(spelt), default=argparse.SUPPRESS, dest="_only", metavar="|".join(spelt), help=text
        )
    for name, (count, text) in vllm.NO_EFFECT.items():
        group.add_argument(
            _flag(name), action=_NoEffect, nargs=None if count else 0, metavar="X" if count else None,
            default=argparse.SUPPRESS, dest="_no_effect", help=f"no effect: {text}", const=text,
        )  # fmt: skip
    for name in sorted(vllm.NOT_SUPPORTED_YET):
        if _flag(name) not in options:
            group.add_argument(
                _flag(name), action=_NotSupported, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS,
                dest="_not_supported", const=name,
            )  # fmt: skip


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _NoEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(f"octavo: {option_string} has no effect: {self.const}", file=sys.stderr)


class _NotSupported(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.error(vllm.not_supported_yet(str(option_string)))


def _one_of(values: tuple[str, ...]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text} is not supported: only {' or '.join(values)} is")
        return text

    return check
