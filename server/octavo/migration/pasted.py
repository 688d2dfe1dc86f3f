"""A command as people paste it: out of prompts, line ends, environment variables, wrappers and `docker run`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from octavo.errors import ConfigError

VLLM, OLLAMA, LLAMA_CPP, TGI = "vLLM", "Ollama", "llama.cpp", "TGI"
_SERVERS = ("vllm.entrypoints.openai.api_server", "octavo.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_IMAGES = {
    "vllm": VLLM,
    "octavo": VLLM,
    "text-generation-inference": TGI,
    "llama.cpp": LLAMA_CPP,
    "llama-cpp": LLAMA_CPP,
    "ollama": OLLAMA,
}
_LLAMA_PROGRAMS = ("llama-server", "llama-cli", "llama-cpp-server")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"\d?>{1,2}.*|<.*")
_ENDS = re.compile(r"[;&|\n]+")  # of one command
# Docker's flags that take no value; all others take one.
_SWITCHES = re.compile(r"-[dit]+|-P|--(detach|interactive|tty|rm|init|privileged|read-only|publish-all|no-healthcheck)")


@dataclass
class Pasted:
    """A command: whose it is, its arguments after the program's name, the variables that are set for it."""

    server: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def read(text: str) -> Pasted:
    """The first command in ``text`` that starts a server. Raises ConfigError if there is none."""
    environment: dict[str, str] = {}
    for words in map(_without_redirections, _commands(text)):
        environment.update(_assignments(words))
        if found := _found(words):
            found.environment = {**environment, **found.environment}
            return found
    raise ConfigError(
        "this has no command of vLLM (vllm serve, python -m vllm.entrypoints.openai.api_server, docker run), Ollama, "
        "llama.cpp (llama-server) or TGI (text-generation-launcher)"
    )


def _commands(text: str) -> Iterator[list[str]]:
    lines = [re.sub(r"^\s*[$>]\s+|^\s*#.*|\s#\s.*", "", line) for line in text.splitlines()]
    text = re.sub(r"\\[ \t]*\n|\n\s*(?=--?[a-zA-Z])", " ", "\n".join(lines))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if _ENDS.fullmatch(word):
                yield words
                words = []
            else:
                words.append(word)
    except ValueError as error:
        raise ConfigError(f"this is no command of a shell: {str(error).lower()}") from None
    yield words


def _without_redirections(words: list[str]) -> list[str]:
    return words[: next((place for place, word in enumerate(words) if _REDIRECTION.fullmatch(word)), len(words))]


def _assignments(words: list[str]) -> dict[str, str]:
    """The variables that come before a program or after `export`."""
    found: dict[str, str] = {}
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word):
            found[match[1]] = match[2]
        elif word not in ("export", "env", "sudo"):
            break
    return found


def _found(words: list[str]) -> Pasted | None:
    for place, word in enumerate(words):
        program, rest = PurePosixPath(word).name.removesuffix(".exe"), words[place + 1 :]
        if program in ("docker", "podman", "nerdctl") and "run" in rest[:2]:
            return _of_image(rest[rest.index("run") + 1 :])
        if program in ("vllm", "octavo") and rest[:1] == ["serve"]:
            return Pasted(VLLM, rest[1:])
        if word == "-m" and rest[:1] and rest[0] in _SERVERS:
            return Pasted(VLLM, rest[1:])
        if program == "ollama" and rest:
            return Pasted(OLLAMA, rest)
        if program in _LLAMA_PROGRAMS:
            return Pasted(LLAMA_CPP, rest)
        if program == "text-generation-launcher":
            return Pasted(TGI, rest)
    return None


def _of_image(words: list[str]) -> Pasted | None:
    """Return the command that a container is given after its image."""
    environment: dict[str, str] = {}
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).partition("=")
        if not equals and not _SWITCHES.fullmatch(flag):
            value = words.pop(0) if words else ""
        if flag in ("-e", "--env") and (match := _ASSIGNMENT.fullmatch(value)):
            environment[match[1]] = match[2]
    if not words:
        return None
    image, arguments = words[0], words[1:]
    inner = _found(arguments)
    if inner is None:
        server = next((server for part, server in _IMAGES.items() if part in image), None)
        if server is None:
            return None
        inner = Pasted(server, arguments[1:] if arguments[:1] == ["serve"] and server == VLLM else arguments)
    inner.environment = {**environment, **inner.environment}
    return inner
