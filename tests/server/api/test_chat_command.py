"""`octavo chat`, in a terminal as people have it and with its input from a pipe."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import pytest

CHAT = [sys.executable, "-m", "octavo.cli.main", "chat"]


class Terminal:
    """A person at a terminal of the kernel's own."""

    def __init__(self, *flags: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [*CHAT, *flags])
        self.shown = ""

    def wait_for(self, text: str, times: int = 1, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self.shown.count(text) < times:
            assert time.monotonic() < deadline, f"{text!r} was not shown {times} times:\n{self.shown}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.shown += os.read(self.fd, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def exit_code(self, again: str = "", seconds: float = 30.0) -> int:
        """Of the process, once it has ended. ``again``: what a person types once more when nothing happens: a Ctrl-C in
        the moment in which Python begins to wait for input is noticed with the next key."""
        deadline = time.monotonic() + seconds
        while True:  # what is still shown must be read, or the process waits for that
            if not select.select([self.fd], [], [], 1.0)[0]:
                assert time.monotonic() < deadline, f"still there:\n{self.shown}"
                self.type(again)
                continue
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # Linux' way to say that the other end has closed
                break
            if not data:
                break
            self.shown += data.decode(errors="replace")
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(shared_server):
    return Terminal("--url", shared_server.url + "/v1", "--max-tokens", "8")


def run(url: str, *flags: str, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"} | env
    return subprocess.run(
        [*CHAT, "--url", url, *flags], input=text, capture_output=True, text=True, timeout=60, env=environment
    )


def test_a_conversation(terminal):
    terminal.wait_for("> ")
    for count, message in enumerate(["Hello", "And now?", "/reset", ""], 2):
        terminal.type(message + "\n")
        terminal.wait_for("> ", count)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "/reset forgets" in terminal.shown


def test_ctrl_c_stops_an_answer_and_then_the_chat(shared_server):
    # By chance an answer may be over before anybody looks: this one takes hundreds of tokens.
    terminal = Terminal("--url", shared_server.url + "/v1", "--max-tokens", "900", "--temperature", "0")
    terminal.wait_for("> ")
    terminal.type("Write a long story about a river.\n")
    deadline = time.monotonic() + 30
    while shared_server.get("/load").json()["server_load"] == 0:
        assert time.monotonic() < deadline, "no answer was seen under way"
        time.sleep(0.01)
    terminal.type("\x03")
    terminal.wait_for("> ", 2)
    terminal.type("\x03")
    assert terminal.exit_code(again="\x03") == 130


def test_the_conversation_goes_on_after_a_message_that_is_refused(terminal):
    """Here one that is too long: what was said before stands, and so does what comes."""
    terminal.wait_for("> ")
    terminal.type("brown fox " * 600 + "\n")
    terminal.wait_for("max_model_len")
    terminal.wait_for("> ", 2)
    terminal.type("short\n")
    terminal.wait_for("> ", 3)
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    assert terminal.shown.count("max_model_len") == 1


@pytest.mark.slow
def test_earlier_messages_are_part_of_the_next(start, tmp_path):
    """The template says how many messages it was given, as the only token that the model may answer with."""
    (tmp_path / "template").write_text(
        "{{ raise_exception('given: ' + messages | map(attribute='role') | join(' ')) }}"
    )
    server = start("--chat-template", str(tmp_path / "template"))
    done = run(server.url + "/v1", "--system-prompt", "Be kind", text="one\n")
    assert "given: system user" in done.stderr and done.returncode == 0
    server.stop()


def test_a_quick_answer_is_all_that_is_printed(shared_server):
    done = run(shared_server.url, "-q", "Hello", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0 and done.stdout.strip() and not done.stderr, "the address is good without /v1 too"
    assert run(shared_server.url, "-q", "brown fox " * 600).returncode == 1


@pytest.mark.slow
def test_what_is_wrong_is_one_line(start, shared_server):
    nobody = run("http://127.0.0.1:9/v1", text="Hello\n")
    assert nobody.returncode == 1 and "no server at http://127.0.0.1:9/v1/" in nobody.stderr
    other = run(shared_server.url + "/v1", "--model-name", "no-such", "-q", "Hello")
    assert other.returncode == 1 and "'tiny'" in other.stderr
    guarded = start(env={"OCTAVO_API_KEY": "sesame"})
    stranger = run(guarded.url + "/v1", text="Hello\n")
    assert stranger.returncode == 1 and "401: Send a valid API key" in stranger.stderr
    assert stranger.stderr.count("\n") == 1
    assert run(guarded.url + "/v1", "-q", "Hello", "--max-tokens", "3", OPENAI_API_KEY="sesame").returncode == 0
    guarded.stop()
