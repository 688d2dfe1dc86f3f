"""A conversation of `octavo chat`: its turns, its settings and its commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.chat_client import CHAT_SAMPLING, SERVER_SAMPLING, Answer, Client, MessageRefusedError, Model
from octavo.cli.chat_input import number
from octavo.cli.pictures import data_url
from octavo.cli.wrapping import Wrap
from octavo.errors import OctavoError
from octavo.interface.sampling_params import SamplingParams
from octavo.system.suggestions import did_you_mean

HELP = """\
/set NAME VALUE   temperature, top_p, top_k, min_p, repetition_penalty, frequency_penalty,
                  max_tokens, seed, system, verbose
/show             the settings
/clear            forget the conversation
/bye              leave (or Ctrl-D)
PATH              a picture's path in a message, typed or dropped, sends the picture to models that read them
\"\"\"               begins and ends a message of several lines; pasted lines are one message
Ctrl-C            stops an answer"""

_SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": number,
    "top_p": number,
    "top_k": int,
    "min_p": number,
    "repetition_penalty": number,
    "frequency_penalty": number,
    "max_tokens": int,
    "seed": int,
}
_CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
_CHARACTERS_A_TOKEN = 3  # fewer than usual, so that estimates are on the safe side
_HOTTEST = 2  # as OpenAI has it: above it any model talks nonsense
_ROOM = 256  # tokens kept free for an answer, or a quarter of the context if that is less
_MOST_CHARACTERS_A_TOKEN = 16  # more than any text has: a longer one never fits the model
_SHARE = 4  # an answer takes at most 1/4 of the context by default: small models may never stop

Turn = dict[str, Any]  # a message, as the API takes it


class Conversation:
    """``notice`` prints what is not part of an answer; ``settings`` are the user's own."""

    def __init__(
        self,
        client: Client,
        model: Model,
        settings: dict[str, Any],
        system: str | None,
        verbose: bool,
        notice: Callable[[str], None],
    ) -> None:
        self._client, self._model = client, model
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._system, self._verbose, self._notice = system, verbose, notice
        self.clear()

    def clear(self) -> None:
        """Forget every turn."""
        self._turns: list[Turn] = []  # a question and its answer in turn
        self._num_tokens = 0  # of what was sent last and its answer
        self._truncation_reported = False

    @property
    def sampling(self) -> dict[str, float]:
        """Temperature and the like of the next answer, as far as they are known."""
        own = {name: self._settings[name] for name in _SETTINGS if name in self._settings}
        said = self._model.chat_sampling
        if "temperature" in own:  # the server then leaves out the penalty that belongs to the model's own
            said.pop("frequency_penalty", None)
        return said | own

    @property
    def _defaults(self) -> dict[str, float]:
        """Return parameters that are sent although neither the user nor the model's files set them."""
        return CHAT_SAMPLING if self._model.sampling == {} else {}

    # Answers.

    def ask(self, message: str, pictures: Sequence[Path] = ()) -> bool:
        """Print the answer to ``message`` as it comes; False where Ctrl-C stopped it. Raises MessageRefusedError, and
        OctavoError for a picture that cannot be read; the turns are then as they were."""
        answer, most = Answer(), self._max_tokens
        turns = self._fit_context([*self._turns, {"role": "user", "content": self._content(message, pictures)}])
        while True:
            try:
                finished = self._print(answer, turns, most)
                break
            except MessageRefusedError as refusal:
                turns, most = self._shortened(refusal, turns, most)
        if answer.text:
            self._turns = [*turns, {"role": "assistant", "content": answer.text}]
            self._num_tokens = answer.num_tokens
        if finished and answer.finish_reason == "length":
            self._report_cut(answer)
        if self._verbose and answer.usage:
            self._report_speed(answer)
        return finished

    def _content(self, message: str, pictures: Sequence[Path]) -> Any:
        limit = self._model.max_model_len
        if limit and len(message) > limit * _MOST_CHARACTERS_A_TOKEN:
            raise MessageRefusedError(
                f"the message has {len(message):,} characters, more than the {limit:,} tokens that {self._model.name} "
                "can read, and nothing was sent: send a part of it"
            )
        if not pictures:
            return message
        if self._model.reads_images is False:
            names = ", ".join(str(path) for path in pictures)
            raise MessageRefusedError(
                f"{self._model.name} reads no pictures, and nothing was sent: leave out {names}, or talk to a model "
                "that reads them, as Qwen/Qwen2.5-VL-3B-Instruct"
            )
        parts = [{"type": "image_url", "image_url": {"url": data_url(path)}} for path in pictures]
        self._notice(f"(with {', '.join(path.name for path in pictures)})")
        return [*parts, {"type": "text", "text": message}] if message.strip() else parts

    def _shortened(
        self, refusal: MessageRefusedError, turns: list[Turn], most: int | None
    ) -> tuple[list[Turn], int | None]:
        """Return turns and max_tokens to send instead of what was too long: an answer of at least _ROOM tokens, else
        fewer turns, else what room there is. Raises the refusal where nothing can be shortened."""
        limit = self._model.max_model_len or 0
        room = limit - refusal.prompt_tokens if refusal.prompt_tokens else 0
        if most and 0 < room < most and (room >= min(_ROOM, limit // _SHARE) or len(turns) < 3):
            return turns, room
        if not refusal.too_long or len(turns) < 3:
            raise refusal
        return turns[2:], self._max_tokens

    def _body(self, turns: list[Turn], most: int | None = None) -> dict[str, Any]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        limit = {} if most is None else {"max_tokens": most}
        return {"model": self._model.name, "messages": [*system, *turns], **self._defaults, **self._settings, **limit}

    @property
    def _max_tokens(self) -> int | None:
        own = self._settings.get("max_tokens")
        return own if own is not None else (self._model.max_model_len or 0) // _SHARE or None

    def _print(self, answer: Answer, turns: list[Turn], most: int | None) -> bool:
        output, stream = _Output(), self._client.stream(self._body(turns, most), answer)
        try:
            for number, (thought, piece) in enumerate(stream):
                if number == 0 and len(turns) <= len(self._turns):
                    self._report_truncation()
                output.show(thought, piece)
        except KeyboardInterrupt:
            output.end()
            return False
        except OctavoError:
            if answer.first_token:
                output.end()
            raise
        finally:
            stream.close()
        output.end()
        return True

    def _fit_context(self, turns: list[Turn]) -> list[Turn]:
        """``turns`` without the first ones, if together with an answer they would probably not fit. The last stays."""
        limit = self._model.max_model_len
        if not limit or not self._num_tokens:
            return turns
        room = min(self._max_tokens or _ROOM, _ROOM, limit // _SHARE)
        sizes = [len(_text(turn)) for turn in turns]
        tokens_a_character = self._num_tokens / max(1, sum(sizes[:-1]) + len(self._system or ""))
        needed = self._num_tokens + sizes[-1] // _CHARACTERS_A_TOKEN
        while needed + room > limit and len(turns) > 2:
            needed -= round((sizes[0] + sizes[1]) * tokens_a_character)
            turns, sizes = turns[2:], sizes[2:]
        return turns

    def _report_truncation(self) -> None:
        if not self._truncation_reported:
            limit = self._model.max_model_len
            of = f" of {limit} tokens" if limit else ""
            self._notice(f"(the context{of} is full: the oldest turns are forgotten from here on)")
        self._truncation_reported = True

    def _report_cut(self, answer: Answer) -> None:
        limit, count = self._model.max_model_len, answer.usage.get("completion_tokens")
        if self._max_tokens and (not limit or answer.num_tokens < limit):
            self._notice(f"(cut after {count or self._max_tokens} tokens; /set max_tokens N for another limit)")
        else:
            self._notice("(cut: the context is full)")

    def _report_speed(self, answer: Answer) -> None:
        count, prompt = answer.usage.get("completion_tokens") or 0, answer.usage.get("prompt_tokens") or 0
        cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        rate = answer.tokens_per_second
        speed = f", {rate:.1f} tokens/s" if rate is not None else ""
        self._notice(
            f"({count} tokens{speed}; the first after {answer.first_token:.2f} s; prompt: {prompt} "
            f"tokens, {cached} cached)"
        )

    # Commands.

    def command(self, text: str) -> bool:
        """Run a line that begins with a slash; False where it is to end the conversation."""
        name, _, rest = text.strip().partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return False
        if name in ("/help", "/?"):
            print(HELP)
        elif name in ("/clear", "/reset"):
            self.clear()
            self._notice("(forgotten)")
        elif name == "/show" or (name == "/set" and not rest.strip()):
            self._show()
        elif name == "/set":
            self._set(*rest.strip().removeprefix("parameter ").strip().partition(" ")[::2])
        else:
            print(f"there is no command {name}{did_you_mean(name, _COMMANDS) or '; /help lists them'}")
        return True

    def _show(self) -> None:
        values: dict[str, Any] = {"model": self._model.name, "url": self._client.url}
        values |= dict.fromkeys(SERVER_SAMPLING, "(the server's)") | self.sampling
        values |= {name: value for name, value in self._settings.items() if name not in values}
        values |= {"max_tokens": self._max_tokens} if self._max_tokens else {}
        values |= {"system": self._system} if self._system else {}
        values |= {"verbose": "on" if self._verbose else "off"}
        if self._model.max_model_len:
            values["context"] = f"{self._num_tokens} of {self._model.max_model_len} tokens"
        for name, value in values.items():
            print(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")

    def _set(self, name: str, value: str) -> None:
        value = value.strip()
        if name in ("verbose", "quiet"):
            self._verbose = (name == "verbose") == (value not in ("off", "false", "0"))
        elif name == "system":
            self._system = None if value == "default" else value.strip('"') or None
        elif name not in _SETTINGS:
            print(f"there is no setting {name!r}{did_you_mean(name, (*_SETTINGS, 'system', 'verbose'))}")
        elif value in ("", "default"):
            self._settings.pop(name, None)
        else:
            self._set_number(name, value)

    def _set_number(self, name: str, value: str) -> None:
        kind = _SETTINGS[name]
        try:
            given = kind(value)
        except ValueError:
            print(f"{name} must be {'a whole number' if kind is int else 'a number'}, got {value!r}")
            return
        try:
            SamplingParams(**{name: given})
        except ValueError as error:
            print(error)
            return
        if name == "temperature" and given > _HOTTEST:
            print(f"temperature must be between 0 and {_HOTTEST}, got {value}")
        else:
            self._settings[name] = given


class _Output:
    """The output of answers: wrapped between words on a terminal, elsewhere as they are."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._dimmed = False
        self._wrap = Wrap(self._write)

    def show(self, thought: str, piece: str) -> None:
        for text, dimmed in ((thought, True), (piece, False)):
            if text and self._on_terminal:
                if dimmed != self._dimmed:
                    self._wrap.end()
                    self._dimmed = dimmed
                self._wrap.feed(text.translate(_CONTROLS))  # a model's escape sequences are not for the terminal
            elif text:
                self._write(text)
        sys.stdout.flush()

    def end(self) -> None:
        self._wrap.end()
        print(flush=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(dim(text) if self._dimmed and text.strip() else text)


def _text(turn: Turn) -> str:
    content = turn["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


_COMMANDS = ("/help", "/?", "/bye", "/exit", "/quit", "/clear", "/reset", "/set", "/show")


def is_command(text: str) -> bool:
    """Return whether a message is a command: a slash and a word, not the path of a file."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return word.startswith("/") and "/" not in word[1:] and not os.path.isfile(word)


def dim(text: str) -> str:
    """Dimmed text, on terminals that support it (https://no-color.org)."""
    plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
    return text if plain or not text else f"\x1b[2m{text}\x1b[0m"
