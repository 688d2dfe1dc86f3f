"""`octavo chat` and `octavo run` with a running server: questions on the command line, pictures, long messages, lines
that fit the terminal, and servers that fail."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from base64 import b64encode
from collections.abc import Iterator

import pytest
from support.chat_terminal import CHAT, Terminal
from support.scripted_server import API_KEY, ScriptedServer

RUN = [sys.executable, "-m", "octavo.cli.main", "run"]


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def run(command: list[str], *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    return subprocess.run([*command, *words], input=text, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("command", [CHAT, RUN])
def test_with_an_address_the_words_are_the_question(scripted, command):
    """Unless the first is the name of a model that is served."""
    scripted.answers["What is this?"] = ["a test"]
    url = scripted.url.removeprefix("http://")  # as people type it
    assert run(command, "--url", url, "What is this?").stdout == "a test\n"
    assert run(command, "--url", url, "scripted", "What", "is", "this?").stdout == "a test\n"
    assert run(command, "--url", url, "scripted", text="What is this?\n").stdout == "a test\n"
    assert [body["model"] for body in scripted.requests] == ["scripted"] * 3
    assert run(command, "--url", url, "Hi", text="there").returncode == 0
    assert scripted.requests[-1]["messages"] == [{"role": "user", "content": "Hi\n\nthere"}]


def test_pictures_are_sent_as_such(scripted, tmp_path):
    """Dropped into the terminal, which quotes or escapes the path, or named on the command line."""
    scripted.reads_images = True
    path = tmp_path / "my cat (1).png"
    path.write_bytes(b"picture")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(b'picture').decode()}"}}
    terminal = Terminal("--url", scripted.url)
    terminal.wait_for_prompt()
    escaped = re.sub(r"([ ()])", r"\\\1", str(path))
    for count, typed in enumerate((f"'{path}' ", f"What is in {escaped}?"), 2):
        terminal.type(f"\x1b[200~{typed}\x1b[201~\r")
        terminal.wait_for_prompt(count)
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0
    first, second = scripted.requests
    assert first["messages"][-1]["content"] == [image]
    assert second["messages"][-1]["content"] == [image, {"type": "text", "text": "What is in my cat (1).png?"}]
    assert second["messages"][0]["content"] == [image], "earlier pictures are part of the conversation"
    done = run(RUN, "--url", scripted.url, f"Describe '{path}'", text=f"not {path}")
    assert "(with my cat (1).png)" in done.stderr and done.stdout == "fine\n"
    said = {"type": "text", "text": f"Describe my cat (1).png\n\nnot {path}"}
    assert scripted.requests[-1]["messages"][-1]["content"] == [image, said], "what is piped in names no files"


def test_a_model_without_eyes_says_so(shared_server, tmp_path):
    """The conversation and the message are kept."""
    (tmp_path / "a.png").write_bytes(b"picture")
    done = run(RUN, "--url", shared_server.url, f"What is in {tmp_path}/a.png?")
    assert done.returncode == 1 and "tiny reads no pictures, and nothing was sent" in done.stderr
    assert done.stderr.count("\n") == 1
    terminal = Terminal("--url", shared_server.url, "--max-tokens", "3")
    terminal.wait_for_prompt()
    terminal.type(f"{tmp_path}/a.png\r")
    terminal.wait_for("up arrow")
    terminal.type("\x1b[A\x15/bye\r")
    assert terminal.exit_code() == 0 and "reads no pictures" in terminal.shown


def test_a_long_message_leaves_the_answer_what_room_there_is(shared_server):
    """The model has 1,024 tokens; chat's own limit is a quarter of them, and this message takes more of them."""
    card = shared_server.get("/v1/models").json()["data"][0]
    long, count = "", 0
    while count < card["max_model_len"] - 100:
        long += "brown fox " * 5
        count = shared_server.post("/tokenize", {"messages": [{"role": "user", "content": long}]}).json()["count"]
    assert count < card["max_model_len"] - 20
    for flags in ((), ("--max-tokens", "1000")):
        done = run(CHAT, "--url", shared_server.url, "--verbose", "--temperature", "0", *flags, text=f"{long}\n/show\n")
        assert done.returncode == 0 and not done.stderr, done.stderr
        used, limit = map(int, re.search(r"context=(\d+) of (\d+) tokens", done.stdout).groups())
        assert count < used <= limit
    assert run(CHAT, "--url", shared_server.url, text=long * 2 + "\n").stderr.count("max_model_len") == 1


def test_an_answer_is_wrapped_where_the_terminal_ends(scripted):
    """In the width that the terminal has by then; elsewhere it comes as it is."""
    words = "lorem ipsum dolor sit amet " * 12
    scripted.answers["wrap"] = [words[i : i + 7] for i in range(0, len(words), 7)]
    terminal = Terminal("--url", scripted.url)
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 40, 0, 0))
    terminal.wait_for_prompt()
    terminal.type("wrap\r")
    terminal.wait_for_prompt(2)
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0
    shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\r", "", terminal.shown)
    lines = re.findall(r"^(?:(?:lorem|ipsum|dolor|sit|amet) ?)+$", shown, re.MULTILINE)
    assert all(30 < len(line) <= 40 for line in lines[:-1]) and " ".join(lines).split() == words.split()
    assert run(CHAT, "--url", scripted.url, "wrap").stdout == words + "\n"


def test_a_server_that_dies_in_mid_answer(scripted):
    """What came is there, what was typed too, and the conversation goes on where the server does."""
    scripted.answers["die\nnow"] = ["begun ", None]
    terminal = Terminal("--url", scripted.url)
    terminal.wait_for_prompt()
    terminal.type("\x1b[200~die\nnow\x1b[201~\r")
    terminal.wait_for("the answer has no end")
    terminal.wait_for_prompt(2)
    assert "begun" in terminal.shown
    scripted.answers["die\nnow"] = ["alive"]
    terminal.type("\x1b[A\r")
    terminal.wait_for("alive")
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0
    assert [len(body["messages"]) for body in scripted.requests] == [1, 1]


@pytest.mark.parametrize("listed", [0, 2])
def test_a_server_that_is_still_loading_is_waited_for(scripted, listed):
    """Whether it lists its model by then or not; a line says so, once."""
    scripted.loading = listed
    terminal = Terminal("--url", scripted.url)
    terminal.wait_for_prompt()
    scripted.loading = 3
    terminal.type("Hi\r")
    terminal.wait_for("fine")
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0
    assert terminal.shown.count("still loading its model: waiting for it") == 1 and "503" not in terminal.shown
    assert [len(body["messages"]) for body in scripted.requests] == [1]
    scripted.loading = 2
    done = run(CHAT, "--url", scripted.url, "Hi")
    assert done.stdout == "fine\n" and done.stderr.count("waiting for it") == 1


def test_a_paste_of_20_mb_stops_nobody(scripted):
    """It stands as a mark in the line, is not sent where no model could read it, and is there for the next try."""
    terminal = Terminal("--url", scripted.url)
    terminal.wait_for_prompt()
    pasted = "a line with 'words.png'\r\n" * 5_000
    for text, said in (("word " * 4_000_000, "20,000,016 characters, more than the 8,192 tokens"), (pasted, "fine")):
        data = memoryview(f"\x1b[200~{text}\x1b[201~".encode())
        while data:
            data = data[os.write(terminal.fd, data[:4096]) :]
        terminal.wait_for(f"{len(text):,} characters]")
        terminal.type(" and that is all\r")
        terminal.wait_for(said)
        terminal.wait_for_prompt(2)
    terminal.type("\x1b[A\x1b[A\r")  # the first once more
    terminal.wait_for("(the up arrow brings your message back)", 2)
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0
    (body,) = scripted.requests
    assert body["messages"][-1]["content"] == pasted.replace("\r\n", "\n") + " and that is all"


def test_a_wrong_key_or_address_says_what_to_do(scripted, shared_server):
    done = run(CHAT, "--url", f"{shared_server.url}/nothing/v1", "Hi")
    assert done.returncode == 1 and "--url takes the API's base address" in done.stderr
    scripted.needs_key = True
    done = run(CHAT, "--url", scripted.url, "Hi", "--api-key", "wrong")
    assert done.returncode == 1 and "401: wrong API key; the key is that of --api-key" in done.stderr
    assert run(CHAT, "--url", scripted.url, "Hi", "--api-key", API_KEY).stdout == "fine\n"


def test_settings_that_no_server_takes(scripted):
    typed = ["/set temperature 9", "/set max_tokens -3", "/set system Be kind", "/set system default", "/show"]
    out = run(CHAT, "--url", scripted.url, text="\n".join(typed) + "\n").stdout
    assert "temperature must be" in out and "max_tokens must be" in out and "system=" not in out
    assert "temperature=0.35" in out
