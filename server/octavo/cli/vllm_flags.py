"""Flags of vLLM whose only value here is what this engine does anyway: scripts may go on giving them."""

from __future__ import annotations

import argparse
import sys

_ALWAYS = {
    "--enable-chunked-prefill": "long prompts are always cut into chunks",
    "--enable-prompt-tokens-details": "usage always tells the cached tokens",
    "--enable-request-id-headers": "X-Request-Id is always answered",
    "--enable-server-load-tracking": "/load is always there",
    "--disable-log-requests": "requests are logged only with --enable-log-requests",
    "--no-enable-log-requests": "requests are logged only with --enable-log-requests",
}
_ONLY_ONE = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--api-server-count")
_SHORT = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp", "--data-parallel-size": "-dp"}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vLLM that change nothing here")
    options = parser._option_string_actions
    for flag, text in _ALWAYS.items():
        if flag not in options:
            group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, dest="_always", help=text)
    for flag in _ONLY_ONE:
        names = [flag, *([_SHORT[flag]] if flag in _SHORT else [])]
        group.add_argument(*names, type=_one, default=argparse.SUPPRESS, dest="_one", metavar="1", help="one, for now")
    group.add_argument(
        "--trust-remote-code", action=_NeverRunsCode, nargs=0, default=argparse.SUPPRESS,
        help="no effect: code from model repositories never runs",
    )  # fmt: skip


class _NeverRunsCode(argparse.Action):
    def __call__(self, *_: object) -> None:
        print("octavo: --trust-remote-code has no effect: code from model repositories never runs", file=sys.stderr)


def _one(text: str) -> int:
    if text != "1":
        raise argparse.ArgumentTypeError(f"{text} is not supported yet: only 1 is")
    return 1
