"""Commands of Ollama: `ollama serve` with its variables, `ollama run`, and those for models on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.fetch.model_names import OLLAMA_NAMES
from octavo.migration.rules import Rule, among, judge, keep, refuse
from octavo.migration.verdict import Status, Verdict

_CACHE_DTYPE = among("--kv-cache-dtype", {"f16": "float16", "q8_0": "int8"})


def _host(value: str) -> list[str]:
    host, _, port = value.rpartition("://")[2].rpartition(":")
    if not host:
        host, port = port, ""
    return ["--host", host, *(["--port", port] if port else [])]


# `ollama serve` has no flags: names after OLLAMA_, as flags.
VARIABLES = [
    Rule("--host", text="--host and --port", translate=_host),
    Rule("--context-length", ours="--max-model-len"),
    Rule("--num-parallel", ours="--max-num-seqs"),
    Rule("--max-queue", ours="--max-num-queued-reqs"),
    Rule("--models", ours="--download-dir"),
    Rule("--origins", ours="--allowed-origins"),
    Rule("--kv-cache-type", text="--kv-cache-dtype: int8 for q8_0", translate=_CACHE_DTYPE),
    Rule("--debug", text="--log-level debug", translate=lambda _: ["--log-level", "debug"]),
    Rule("--keep-alive", text="the model stays loaded"),
    Rule("--load-timeout", text="a start takes as long as it takes"),
    Rule("--flash-attention", text="attention is always computed in tiles"),
    Rule("--max-loaded-models", text="a server has one model: an LLMGateway has several"),
    refuse("--sched-spread", "give --tensor-parallel-size"),
]
RUN = [
    keep("--verbose", 0),
    Rule("--keepalive", text="the model stays loaded as long as the conversation"),
    Rule("--nowordwrap --insecure --truncate", 0, text="nothing like it happens"),
    refuse("--format", "requests give response_format"),
    refuse("--think", "use octavo serve with --default-chat-template-kwargs", "?"),
    refuse("--hidethinking", "use octavo serve with --reasoning-parser", 0),
]
# Other commands: what does the same here, or what to do.
COMMANDS = {
    "pull": "octavo pull",
    "list": "octavo list",
    "ls": "octavo list",
    "show": "octavo show",
    "rm": "octavo rm",
}
NO_COMMANDS = {
    "ps": "a server has one model: GET /v1/models names it",
    "stop": "Ctrl-C ends a server",
    "create": "there is no Modelfile: --chat-template and --override-generation-config do its work",
    "cp": "--served-model-name gives a model other names",
    "push": "models are pushed with Hugging Face's tools",
    "signin": "nothing is to be signed in to",
}


def check(words: list[str], environment: Mapping[str, str]) -> tuple[list[str], list[Verdict]]:
    """Our command, and a verdict for each part of Ollama's."""
    command, rest = words[0], words[1:]
    if command == "serve":
        return ["octavo", "serve"], judge(VARIABLES, rest, environment, "OLLAMA_")
    if command == "run":
        place = next((place for place, word in enumerate(rest) if not word.startswith("-")), len(rest))
        model, flags = rest[place : place + 1], [word for word in rest if word.startswith("-")]
        prompt = [word for word in rest[place + 1 :] if not word.startswith("-")]
        told = [Verdict(word, Status.TAKEN, "", (word,)) for word in prompt]
        return ["octavo", "run"], [*map(_model, model), *judge(RUN, flags, {}), *told]
    if command in COMMANDS:
        ours = COMMANDS[command].split()
        status = Status.TAKEN if command == ours[1] else Status.RENAMED
        return ours, [Verdict(command, status, COMMANDS[command]), *map(_model, rest)]
    text = NO_COMMANDS.get(command, "no command of Ollama's that has a counterpart")
    return ["octavo"], [Verdict(command, Status.REFUSED, text)]


def _model(name: str) -> Verdict:
    plain = name.removesuffix(":latest")
    if plain in OLLAMA_NAMES:
        return Verdict(name, Status.RENAMED, OLLAMA_NAMES[plain], (OLLAMA_NAMES[plain],))
    if "/" in name:
        return Verdict(name, Status.TAKEN, "", (name,))
    return Verdict(name, Status.REFUSED, "a name of Ollama's: give org/name or hf.co/org/name:QUANT")
