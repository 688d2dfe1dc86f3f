"""A page for this machine alone answers what a browser sends that has opened it, and nothing that other pages send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.dashboard.content_policy import with_policy
from octavo.dashboard.events import restoring

HERE = "127.0.0.1:7860"


def status(local: bool, **headers: str) -> tuple[int, set[bytes]]:
    """Of an answer to a request with ``headers``, and the names of its own headers."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        cors = [(b"access-control-allow-origin", b"*"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": cors})
        await send({"type": "http.response.body", "body": b"fine"})

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/gradio_api/queue/join", "headers": given}
    asyncio.run(with_policy(app, local)(scope, None, send))
    return sent[0]["status"], {name for name, _ in sent[0]["headers"]}


@pytest.mark.parametrize("host", [HERE, "127.0.0.1", "localhost:8080", "[::1]:7860"])
def test_the_page_itself_is_answered(host: str) -> None:
    assert status(True, host=host) == status(True, host=host, origin=f"http://{host}")
    assert status(True, host=host)[0] == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("rebound.example:7860", "http://rebound.example:7860"),  # a name that its owner lets point here
        ("rebound.example:7860", None),
        ("127.0.0.1.rebound.example", None),
        ("localhost.rebound.example", None),
        ("[", None),
        ("", None),
        (HERE, "https://elsewhere.example"),
        (HERE, "http://127.0.0.1:8000"),  # another program's page
        (HERE, "http://localhost:7860"),
        (HERE, "null"),  # a page in a frame, or of a file
    ],
)
def test_other_pages_are_not(host: str, origin: str | None) -> None:
    headers = {"host": host} | ({"origin": origin} if origin else {})
    assert status(True, **headers)[0] == 403


def test_a_page_for_all_has_any_name_and_is_read_by_no_other_page() -> None:
    found, names = status(False, host="octavo.example", origin="https://elsewhere.example")
    assert found == 200 and b"access-control-allow-origin" not in names and b"content-security-policy" in names


def test_buttons_come_back_after_an_error_and_before_it_is_shown() -> None:
    async def updates() -> Any:
        yield {"run": "disabled"}
        raise RuntimeError("unforeseen")

    async def main() -> None:
        seen = []
        with pytest.raises(RuntimeError, match="unforeseen"):
            async for update in restoring(updates(), lambda: {"run": "enabled"}):
                seen.append(update)
        assert seen == [{"run": "disabled"}, {"run": "enabled"}]

    asyncio.run(main())
