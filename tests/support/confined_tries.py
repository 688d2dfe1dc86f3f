"""Tries what a process that was taken over would do, and says on stdout, in JSON, what came of it."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path


def _fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def _memory_file() -> None:
    descriptor = os.memfd_create("tried")
    assert os.write(descriptor, b"abc") == 3
    os.ftruncate(descriptor, 4096)


def _look_into(process: int) -> None:
    Path(f"/proc/{process}/environ").read_bytes()


def _attach(process: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.ptrace(0x4206, process, 0, 0) < 0:  # PTRACE_SEIZE
        raise OSError(ctypes.get_errno(), "ptrace")


def main(folder: str) -> None:
    """Write and remove in ``folder``, which has a file ``there``."""
    inside, parent = Path(folder), os.getppid()
    tries: dict[str, Callable[[], object]] = {
        "read a file": lambda: (inside / "there").read_bytes(),
        "fork": _fork,
        "start a thread": _thread,
        "write to memory": _memory_file,
        "look into itself": lambda: _look_into(os.getpid()),
        "open a connection": lambda: socket.create_connection(("127.0.0.1", 9), 1),
        "make a socket": socket.socket,
        "start a program": lambda: subprocess.run(["/bin/true"], check=True),
        "signal another process": lambda: os.kill(parent, 0),
        "signal another process by its thread": lambda: signal.pthread_kill(threading.get_ident(), 0),
        "attach to another process": lambda: _attach(parent),
        "write a file": lambda: (inside / "there").write_bytes(b""),
        "make a file": lambda: (inside / "new").touch(),
        "make a folder": lambda: (inside / "folder").mkdir(),
        "remove a file": lambda: (inside / "there").unlink(),
        "look into another process": lambda: _look_into(parent),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "done"
        except OSError as error:
            found[name] = "refused" if isinstance(error, PermissionError) else str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
