"""What a server says at the end of its start."""

from __future__ import annotations

import socket

import pytest

from octavo.entrypoints.announcement import announcement
from octavo.entrypoints.args import ServerArgs


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_every_address_is_one_of_this_machine_that_answers(host):
    """Each that is told can be connected to from here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        sock.listen()
        first, *rows = announcement(["tiny"], sock, ServerArgs(root_path="/llm/"), True).splitlines()
        port = sock.getsockname()[1]
        local = f"http://[::1]:{port}/llm" if ":" in host else f"http://127.0.0.1:{port}/llm"
        assert first.startswith("serving tiny at http://") and first.endswith(f":{port}")
        words = [row.split() for row in rows]
        assert [word[0] for word in words[:4]] == ["page", "API", "chat", "docs"]
        assert [words[0][1], words[1][1], words[2][-1], words[3][1]] == [
            f"{local}/",
            f"{local}/v1",
            f"{local}/v1",
            f"{local}/docs",
        ]
        assert ("whoever reaches" in rows[-1]) == (host in ("0.0.0.0", "::"))
        with socket.create_connection(("::1" if ":" in host else "127.0.0.1", port)):
            pass


@pytest.mark.parametrize(
    ("program", "typed"),
    [
        ("{here}/.venv/bin/octavo", ".venv/bin/octavo"),
        (".venv/bin/octavo", ".venv/bin/octavo"),
        ("/usr/bin/octavo", "octavo"),
        ("{here}/server/octavo/cli/main.py", "octavo"),
        ("-c", "octavo"),
    ],
)
def test_the_command_to_chat_is_one_that_can_be_typed_here(program, typed, tmp_path, monkeypatch):
    """`make serve` puts it on no path but make's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [program.format(here=tmp_path), "serve"])
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert f"  chat  {typed} chat --url " in announcement(["m"], sock, ServerArgs(), True)


def test_what_there_is_not_is_not_told():
    with socket.create_server(("0.0.0.0", 0)) as sock:
        said = announcement(["embedder"], sock, ServerArgs(disable_fastapi_docs=True, api_key=["k"]), False)
        assert "chat" not in said and "docs" not in said and "page" not in said and "whoever" not in said
        assert "OPENAI_API_KEY=... octavo chat" in announcement(["m"], sock, ServerArgs(api_key=["k"]), True)
        assert announcement(["a", "b"], sock, ServerArgs(log_format="json"), True).count("\n") == 0
        assert announcement(["a"], sock, ServerArgs(uds="/run/s"), True) == "serving a at /run/s"
