"""Flags of vLLM that change nothing here: scripts may go on giving them, with the values that say what is so anyway."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

# Switches for what is always so.
_ALWAYS = {
    "--enable-chunked-prefill": "long prompts are always cut into chunks",
    "--enable-prompt-tokens-details": "usage always tells the cached tokens",
    "--enable-request-id-headers": "X-Request-Id is always answered",
    "--enable-server-load-tracking": "/load is always there",
    "--disable-log-requests": "requests are logged only with --enable-log-requests",
    "--no-enable-log-requests": "requests are logged only with --enable-log-requests",
    "--async-scheduling": "steps are scheduled ahead wherever the device computes on its own",
}
# Options of which one value, or a few, is what happens anyway; another one is an error.
_ONLY = {
    "--tensor-parallel-size": (("1",), "one, for now"),
    "--pipeline-parallel-size": (("1",), "one, for now"),
    "--data-parallel-size": (("1",), "one, for now"),
    "--api-server-count": (("1",), "one, for now"),
    "--tokenizer-mode": (("auto", "hf"), "tokenizer.json decides"),
    "--model-impl": (("auto", "vllm"), "the engine's own models"),
    "--runner": (("auto", "generate", "pooling"), "every model gives answers and vectors"),
    "--task": (("auto", "generate", "embed"), "every model gives answers and vectors"),
    "--distributed-executor-backend": (("uni", "mp"), "one process computes"),
    "--chat-template-content-format": (("auto", "string"), "texts of several parts are joined"),
    "--guided-decoding-backend": (("auto", "guidance", "xgrammar", "outlines"), "one takes all kinds of grammars"),
    "--logprobs-mode": (("raw_logprobs",), "before penalties and temperature"),
    "--cpu-offload-gb": (("0",), "weights stay where they are"),
}
# Options without a meaning here, whatever their value: a line on stderr says so.
_NO_EFFECT = {
    "--trust-remote-code": (0, "code from model repositories never runs"),
    "--swap-space": (1, "preempted requests are computed anew"),
    "--compilation-config": (1, "nothing is compiled at the start"),
    "--limit-mm-per-prompt": (1, "models take text only"),
    "--max-log-len": (1, "prompts are never logged"),
    "--max-seq-len-to-capture": (1, "steps of all lengths are recorded"),
    "--num-lookahead-slots": (1, "there is no speculation"),
    "--code-revision": (1, "code from model repositories never runs"),
}
_SHORT = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp", "--data-parallel-size": "-dp"}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vLLM that change nothing here")
    options = parser._option_string_actions
    for flag, text in _ALWAYS.items():
        if flag not in options:
            group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, dest="_always", help=text)
    for flag, (values, text) in _ONLY.items():
        names = [flag, *([_SHORT[flag]] if flag in _SHORT else [])]
        group.add_argument(
            *names, type=_one_of(values), default=argparse.SUPPRESS, dest="_only", metavar="|".join(values), help=text
        )
    for flag, (count, text) in _NO_EFFECT.items():
        group.add_argument(
            flag, action=_NoEffect, nargs=None if count else 0, metavar="X" if count else None,
            default=argparse.SUPPRESS, dest="_no_effect", help=f"no effect: {text}", const=text,
        )  # fmt: skip


class _NoEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(f"octavo: {option_string} has no effect: {self.const}", file=sys.stderr)


def _one_of(values: tuple[str, ...]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text} is not supported: only {' or '.join(values)} is")
        return text

    return check
