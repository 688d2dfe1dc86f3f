"""Run the blocks of docs/walkthrough.md as a reader pastes them, and write what they print into the page.

cd docs && python -m generate.walkthrough
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from generate.blocks import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "walkthrough.md"
PORTS = ("8000", "8001", "7860")  # in the page; each is replaced by a free one
SMALL = {  # what a quick run says in place of the page's words
    "--users 1,5,10,20": "--users 1,2",
    "--users 20": "--users 2",
    "--requests-per-user 2": "--requests-per-user 1",
    "--repeats 2": "--repeats 1",
    "range(1, 21)": "range(1, 3)",
    "_new_tokens=64": "_new_tokens=4",
    "max_tokens=64": "max_tokens=4",
    "-len 64": "-len 8",
    "max_model_len=64,512 --param max_num_seqs=8,64": "max_num_seqs=8",
    '(None, "none")': "(None,)",
}
_OUTPUT = "<!-- output -->\n"  # before a block that this program writes
_MACHINE = re.compile(r"(?<=<!-- begin: machine -->\n).*?(?=<!-- end: machine -->)", re.DOTALL)


def steps() -> list[Block]:
    """What a reader pastes, in its order; `sh` blocks are for machines where nothing is installed yet."""
    return [one for one in blocks_of(PAGE) if one.language in ("bash", "python")]


@contextmanager
def laboratory() -> Iterator[Path]:
    """An empty folder; what runs on at the end is ended by the numbers in its ``*.pid``."""
    with tempfile.TemporaryDirectory(prefix="walkthrough-") as folder:
        try:
            yield Path(folder)
        finally:
            for left in Path(folder).glob("*.pid"):
                with suppress(ValueError, ProcessLookupError):
                    os.kill(int(left.read_text()), signal.SIGTERM)


def free_ports() -> dict[str, str]:
    """A free port for each of the page's."""
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for one in (a, b, c):
            one.bind(("127.0.0.1", 0))
        return {port: str(one.getsockname()[1]) for port, one in zip(PORTS, (a, b, c), strict=True)}


def run(block: Block, folder: Path, replaced: Mapping[str, str], timeout: float = 600) -> str:
    """Paste a block into a shell, or into Python's prompt; what it prints. Raises RuntimeError where it fails."""
    text = block.text
    for said, instead in replaced.items():
        text = text.replace(said, instead)
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": search, "COLUMNS": "120", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = ["bash", "-c", f"set -euo pipefail\n{text}"] if block.language == "bash" else ["python", "-q", "-i"]
    log = folder / "log"
    with log.open("wb") as out:  # a file: what a shell leaves in the background would hold a pipe open
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE if block.language == "python" else out,
            stderr=out,
            input=text if block.language == "python" else None,
            text=True,
            timeout=timeout,
        )
    errors = log.read_text()
    failed = done.returncode or (block.language == "python" and re.search(r"^Traceback|^\S*Error\b", errors, re.M))
    if failed:
        raise RuntimeError(f"{block}:\n{text}\n{done.stdout or ''}{errors}")
    return done.stdout if block.language == "python" else errors


def shown(printed: str, replaced: Mapping[str, str]) -> str:
    """Output as the page has it: its own ports, no home folder, no blank ends of lines."""
    for port in PORTS:
        printed = printed.replace(replaced[port], port)
    printed = printed.replace(str(Path.home()), "~")
    return "\n".join(line.rstrip() for line in printed.strip().splitlines()) + "\n"


def with_outputs(page: str, outputs: Mapping[str, str]) -> str:
    """The page with the output after each block of code: ``outputs`` by the block's text."""
    for code, output in outputs.items():
        fence = f"{code}```\n\n{_OUTPUT}```text\n"
        if fence in page:
            before, _, after = page.partition(fence)
            page = before + fence + output + after[after.index("```\n") :]
    return page


def machine(minutes: float) -> str:
    """When, where and with what the figures were made."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.peers.cpus import cpu_kind

    return f"{cpu_kind()}, {datetime.now(UTC).date().isoformat()}; all eight steps took {minutes:.1f} minutes.\n"


def main() -> None:
    ports, outputs, started = free_ports(), {}, time.monotonic()
    with laboratory() as folder:
        for block in steps():
            at = time.monotonic()
            outputs[block.text] = shown(run(block, folder, ports), ports)
            print(f"[{block}] {time.monotonic() - at:.1f} s\n{outputs[block.text]}", flush=True)
    page = with_outputs(PAGE.read_text(), outputs)
    PAGE.write_text(_MACHINE.sub(lambda _: machine((time.monotonic() - started) / 60), page))


if __name__ == "__main__":
    main()
