"""`octavo chat` in a terminal of the kernel's own."""

from __future__ import annotations

import os
import pty
import select
import sys
import time

CHAT = [sys.executable, "-m", "octavo.cli.main", "chat"]


class Terminal:
    """A person at it."""

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

    def wait_for_prompt(self, count: int = 1) -> None:
        """The prompt may be painted several times; lines are asked for as often as pasting is switched on."""
        self.wait_for("\x1b[?2004h", count)
        self.wait_for("> ")

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
