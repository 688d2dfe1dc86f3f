"""Coding agents as npm and pip install them, at the versions in support/clients, mend a file with a reciting model.
They reach no host but this one.

`make clients` installs them, outside the tree, and runs this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.agent_chats import FULL_TEMPLATE
from support.clients.coders import CODERS, CONTEXT, Task, scripts, settings
from support.clients.loops import MODEL
from support.reciting import Recital, small_tokenizer, write_reciting_model

CLIENTS = Path(os.environ.get("OCTAVO_CLIENTS", Path.home() / ".cache" / "octavo" / "clients"))
PROGRAMS = f"{CLIENTS / 'coders' / 'node_modules' / '.bin'}:{CLIENTS / 'coders' / 'bin'}"
DOCS = Path(__file__).parents[3] / "docs"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(params=CODERS)
def task(request):
    if shutil.which(CODERS[request.param].program, path=PROGRAMS) is None:
        pytest.skip("needs the clients: make clients")
    # Calls name the folder: a long path, said twice, would leave in doubt where in its script the model is.
    with tempfile.TemporaryDirectory(prefix="", ignore_cleanup_errors=True) as folder:
        made = Task(request.param, Path(folder) / "work")
        made.lay()
        yield made


@pytest.fixture
def reciting(task, start, tmp_path):
    """One that says what this agent needs alone: scripts of all would be too much alike."""
    said = scripts(task)
    prose = [page.read_text() for page in sorted(DOCS.glob("*.md"))]
    backend = small_tokenizer([*said, *said.values(), *prose], ("<|im_start|>", "<|im_end|>"), MARKS)
    recital = Recital(said, FULL_TEMPLATE, "<|im_end|>", context=CONTEXT, windowed=True)
    write_reciting_model(tmp_path / "model", backend, recital)
    return start("--served-model-name", MODEL, "--kv-cache-memory-bytes", "512MiB", model=tmp_path / "model")


def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Status, None after five minutes, and output of ``command``. Ends what it leaves behind: agents start daemons, in
    sessions of their own."""
    output = folder.with_name("output")
    mark = f"HOME={environment['HOME']}".encode()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    status = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(300)
    finally:
        for found in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in found.read_bytes().split(b"\0"):
                    os.kill(int(found.parent.name), signal.SIGKILL)
        process.wait()
    return status, output.read_text(errors="replace")


def counted(server, name: str, **labels: str) -> float:
    samples = [s for family in text_string_to_metric_families(server.get("/metrics").text) for s in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.mark.long
def test_a_coding_agent_mends_a_file_and_runs_its_test(reciting, task, tmp_path):
    coder = CODERS[task.name]
    home = tmp_path / "home"
    home.mkdir()
    settings(coder, reciting.url, home)
    closed = "http://127.0.0.1:9"  # whoever asks for a host elsewhere is refused
    environment = {
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "HOME": str(home),
        "HTTP_PROXY": closed,
        "HTTPS_PROXY": closed,
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONDONTWRITEBYTECODE": "1",
        **coder.environment,
    }
    program = shutil.which(coder.program, path=PROGRAMS)
    status, output = run([program, *coder.command(reciting.url, task.question)], task.folder, environment)
    assert status == 0, output[-4_000:] + reciting.log[-2_000:]
    task.check(output)
    assert [counted(reciting, f"octavo:tool_calls{kind}_total") for kind in ("", "_malformed", "_unknown")] == [
        coder.count(task),
        0,
        0,
    ]
    refused = [counted(reciting, "http_requests_total", status=kind) for kind in ("4xx", "5xx")]
    assert refused == [0, 0], reciting.log[-4_000:]
