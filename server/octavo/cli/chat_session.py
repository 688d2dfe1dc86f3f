"""A session of `octavo chat`: a server of its own, or a running one, and a conversation with it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import TextIOWrapper

from octavo.chat_client import Client, MessageRefusedError
from octavo.cli.chat_input import Lines, Reader, Terminal
from octavo.cli.conversation import Conversation, dim, is_command
from octavo.cli.own_server import URL, OwnServer, own_server
from octavo.cli.pictures import Message, read_message
from octavo.errors import OctavoError
from octavo.fetch.model_names import FIRST_QUESTIONS
from octavo.system.signals import exit_on_signals


def talk(args: argparse.Namespace) -> int:
    """Talk until the input ends. Raises OctavoError."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # undecodable input and unprintable output must not end the chat
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_on_signals())
        own = stack.enter_context(own_server(args.model)) if args.url is None else None
        socket = own.path if own is not None else None
        client = stack.enter_context(Client(args.url or f"{URL}/v1", args.api_key, socket, _print_to_stderr))
        name, question = _model_and_question(args, client)
        model = client.model(name)
        settings = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        conversation = Conversation(
            client,
            model,
            settings,
            args.system_prompt,
            args.verbose,
            _notice if question is None else _print_to_stderr,
        )
        if question is not None:
            message = _read(question, _print_to_stderr)
            with _told_of_its_end(own):
                return 0 if conversation.ask(_with_input(message.text), message.pictures) else 130
        if not sys.stdin.isatty():
            return _converse(conversation, Lines(sys.stdin), own)
        if args.offers is not None and (offered := args.offers.wait()):
            print(dim(f"This model is small enough to come with Octavo; octavo run has better ones: {offered}"))
        print(dim(f"{model.name}: /? for help, /bye or Ctrl-D to leave; ask something, as {FIRST_QUESTIONS[0]}"))
        return _converse(conversation, Terminal(), own)


def _model_and_question(args: argparse.Namespace, client: Client) -> tuple[str | None, str | None]:
    """The name of the model in requests and the question, if they are given. Of a running server the first word may be
    either: it is the model where the server has one of that name."""
    if args.url is None or args.quick is not None:
        name = args.model_name or (args.model if args.url is not None else None)
        return name, args.quick if args.quick is not None else " ".join(args.prompt) or None
    name, words = args.model_name, [*([args.model] if args.model else []), *args.prompt]
    if words and (words[0] == name or (name is None and client.serves(words[0]))):
        name = words.pop(0)
    return name, " ".join(words) or None


def _converse(conversation: Conversation, reader: Reader, own: OwnServer | None) -> int:
    interrupted = False  # whether the last key was Ctrl-C at an empty line
    while True:
        try:
            message = reader.read()
        except KeyboardInterrupt:
            if not isinstance(reader, Terminal) or interrupted:
                raise
            interrupted = not reader.typed
            if interrupted:
                _notice("(Ctrl-C again, Ctrl-D or /bye to leave)")
            continue
        interrupted = False
        if message is None:
            return 0
        if is_command(message):
            if not conversation.command(message):
                return 0
        elif message.strip() and not _answer(conversation, reader, message, own) and not reader.interactive:
            return 130


def _answer(conversation: Conversation, reader: Reader, message: str, own: OwnServer | None) -> bool:
    """Answer a message, or say why not; False where Ctrl-C stopped the answer. Raises OctavoError where the chat cannot
    go on; else earlier turns stay, and a person may wait for the server and try again."""
    said = Message(message)
    if isinstance(reader, Terminal):
        said = _read(message, _notice)
        said = replace(said, text=reader.whole(said.text))
    try:
        with _told_of_its_end(own):
            return conversation.ask(said.text, said.pictures)
    except OctavoError as error:
        if not reader.interactive and not isinstance(error, MessageRefusedError):
            raise
        print(f"octavo: error: {error}", file=sys.stderr)
        if isinstance(error, _ServerEndedError) and own is not None:
            _notice("(starting it again: the conversation is kept)")
            own.start()
    if isinstance(reader, Terminal):
        reader.keep(message)
        _notice("(the up arrow brings your message back)")
    return True


class _ServerEndedError(OctavoError):
    """The conversation's own server is gone."""


@contextlib.contextmanager
def _told_of_its_end(own: OwnServer | None) -> Iterator[None]:
    """Say of an error that comes of the end of the conversation's own server that this is why."""
    try:
        yield
    except OctavoError as error:
        may_have_ended = not isinstance(error, MessageRefusedError) or "engine" in str(error)
        if own is None or not may_have_ended or (end := own.end()) is None:
            raise
        raise _ServerEndedError(
            f"the server of this chat {end}, so the last message has no whole answer; if memory is short, choose a "
            "smaller model, or give octavo serve a smaller --max-model-len and talk to it by --url"
        ) from None


def _read(text: str, notice: Callable[[str], None]) -> Message:
    """A message that a person has typed: text that is piped in names no pictures, for its author may be anybody."""
    message = read_message(text)
    for path in message.missing:
        notice(f"(there is no picture {path}: its name is sent as text)")
    return message


def _with_input(question: str) -> str:
    """The question, and what is piped in."""
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    return f"{question}\n\n{text}" if text else question


def _notice(text: str) -> None:
    print(dim(text), flush=True)


def _print_to_stderr(text: str) -> None:
    """Notices that must not end up in a redirected answer."""
    print(text, file=sys.stderr)
