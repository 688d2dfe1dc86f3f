"""The process in which transformers generates for the tab Compare: lines of JSON on stdin and stdout.

The first line names its parent and `octavo serve`'s flags of the model: {"parent", "flags", "dtype"}; the answer is
{"ready": {"dtype", "device", "engine"}} or {"error"}. Every further line is a batch {"prompts", "max_tokens",
"ignore_eos"}; answered by {"text"} (what the first row has until now) every quarter of a second, and {"done":
{"tokens", "ttft", "seconds"}} or {"error"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

from octavo.bench import hugging_face
from octavo.dashboard.hugging_face import REFRESH_SECONDS
from octavo.engine.args import EngineArgs
from octavo.engine.input_processor import eos_token_ids
from octavo.errors import OctavoError
from octavo.flags.config_file import with_config_file
from octavo.flags.fields import from_flags
from octavo.flags.parser import CommandParser
from octavo.flags.serve_flags import add_serve_flags
from octavo.interface.engine_config import EngineConfig
from octavo.system.parent import die_with_parent
from octavo.text.tokenizer import Tokenizer


def main() -> None:
    """Answer requests until stdin ends."""
    # Libraries' output goes to stderr.
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    die_with_parent(first["parent"])
    try:
        config = _config(first["flags"])
        model = hugging_face.load(config, first["dtype"])
        engine = hugging_face.named(hugging_face.precision(config))
        tokenizer = Tokenizer.from_files(config.model.files)
    except Exception as error:  # of any library: the page shows it
        _send(out, error=_text(error))
        return
    dtype = str(model.dtype).removeprefix("torch.")
    device = "on the CPU" if model.device.type == "cpu" else "on the GPU"
    _send(out, ready={"dtype": dtype, "device": device, "engine": engine})
    ends = eos_token_ids(config, tokenizer)
    for line in sys.stdin:
        batch = json.loads(line)
        try:
            _generate(out, model, tokenizer, batch, [] if batch["ignore_eos"] else ends)
        except Exception as error:
            _send(out, error=_text(error))


def _config(flags: list[str]) -> EngineConfig:
    parser = CommandParser(prog="octavo serve")
    add_serve_flags(parser)
    namespace = with_config_file(parser.parse_args(flags))
    args: EngineArgs = from_flags(EngineArgs, namespace)
    args.model = namespace.model_tag or args.model
    config = args.create_engine_config(progress=False)
    if config.model.is_encoder:
        raise OctavoError(f"{config.model.model} writes no text")
    return config


def _generate(out: TextIO, model: Any, tokenizer: Tokenizer, batch: dict[str, Any], ends: list[int]) -> None:
    first_row: list[int] = []
    shown = 0.0

    def on_step(tokens: list[int]) -> None:
        nonlocal shown
        if first_row and first_row[-1] in ends:
            return
        first_row.append(tokens[0])
        if (now := time.monotonic()) - shown > REFRESH_SECONDS:
            shown = now
            _send(out, text=tokenizer.decode(first_row))

    found = hugging_face.generate(model, batch["prompts"], batch["max_tokens"], ends, on_step)
    count = sum(map(len, found.tokens))
    _send(out, text=tokenizer.decode(found.tokens[0]))
    _send(out, done={"tokens": count, "ttft": found.first_token, "seconds": found.elapsed})


def _send(out: TextIO, **message: Any) -> None:
    out.write(json.dumps(message) + "\n")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
