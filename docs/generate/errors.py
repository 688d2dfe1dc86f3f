"""Errors: what HTTP answers say, what `octavo.LLM` raises, how commands end."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from generate import markdown, source
from generate.source import SERVER, module_defining


def page() -> str:
    return markdown.page(
        "Errors",
        "## HTTP",
        'Answers with a status of 400 or more have OpenAI\'s form: `{"error": {"message", "type", "param", "code"}}`. '
        "`param` names the field that is wrong. A wrong field is a 400 of type `invalid_request_error` whose message "
        "says the field, its value, the limit and the way out. The errors with a code or another status are below, "
        "with `...` for what depends on the request. An error after the first event of a stream comes as an event of "
        'the same form. Below `/v1/messages` the form is Anthropic\'s, with the same status and message: `{"type": '
        '"error", "error": {"type", "message"}}`.',
        markdown.table(("status", "type", "code", "message"), sorted(set(answers()))),
        "## Python",
        "`octavo.LLM` raises these; each message is one line.",
        markdown.table(("class", "is a", "meaning"), classes()),
        "## Commands",
        "An error is one line on stderr that begins with `octavo: error:`.",
        markdown.table(
            ("exit status", "meaning"),
            [
                ("0", "done"),
                ("1", "an error in what was asked for: a model, a file, a combination of options"),
                ("2", "a wrong command line"),
                ("130", "ended by Ctrl-C"),
            ],
        ),
    )


def answers() -> Iterator[tuple[str, str, str, str]]:
    """Status, type, code and message of every error that the server's source makes with a status or a code."""
    make = module_defining("APIError", SERVER).APIError
    for call in source.calls("APIError", SERVER):
        status = source.constant(call.args[0]) if call.args else None
        message = source.template(call.args[1]) if len(call.args) > 1 else None
        if status is not None and message is not None:
            detail = make(status, "", code=_keyword(call, "code")).detail
            yield str(status), markdown.code(detail.type), markdown.code(detail.code or ""), markdown.prose(message)
    for call in source.calls("bad_request", SERVER):
        if code := _keyword(call, "code"):
            message = source.template(call.args[0]) or "..."
            yield "400", markdown.code("invalid_request_error"), markdown.code(code), markdown.prose(message)


def _keyword(call: ast.Call, name: str) -> str | None:
    return next((source.constant(one.value) for one in call.keywords if one.arg == name), None)


def classes() -> Iterator[tuple[str, str, str]]:
    import octavo.errors

    for name, cls in vars(octavo.errors).items():
        if inspect.isclass(cls) and issubclass(cls, Exception):
            bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
            yield f"`octavo.errors.{name}`", bases, markdown.prose(inspect.getdoc(cls) or "")
