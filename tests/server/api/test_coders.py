"""Coding agents as npm installs them, at the versions in support/clients/coders, mend a file with a reciting model.
They reach no host but this one.

`make clients` installs them, outside the tree, and runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.agent_chats import FULL_TEMPLATE
from support.clients.coders import CODERS, CONTEXT, Task, scripts, settings
from support.clients.loops import MODEL
from support.reciting import Recital, small_tokenizer, write_reciting_model

CLIENTS = Path(os.environ.get("OCTAVO_CLIENTS", Path.home() / ".cache" / "octavo" / "clients"))
PROGRAMS = CLIENTS / "coders" / "node_modules" / ".bin"
DOCS = Path(__file__).parents[3] / "docs"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(params=CODERS)
def task(request, tmp_path):
    if shutil.which(CODERS[request.param].program, path=PROGRAMS) is None:
        pytest.skip("needs the clients: make clients")
    made = Task(request.param, tmp_path / "work")
    made.lay()
    return made


@pytest.fixture
def reciting(task, start, tmp_path):
    """One that says what this agent needs alone: scripts of all would be too much alike."""
    said = scripts(task)
    prose = [page.read_text() for page in sorted(DOCS.glob("*.md"))]
    backend = small_tokenizer([*said, *said.values(), *prose], ("<|im_start|>", "<|im_end|>"), MARKS)
    write_reciting_model(tmp_path / "model", backend, Recital(said, FULL_TEMPLATE, "<|im_end|>", context=CONTEXT))
    return start("--served-model-name", MODEL, "--kv-cache-memory-bytes", "512MiB", model=tmp_path / "model")


@pytest.mark.long
def test_a_coding_agent_mends_a_file_and_runs_its_test(reciting, task, tmp_path):
    coder = CODERS[task.name]
    program = shutil.which(coder.program, path=PROGRAMS)
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
    done = subprocess.run(
        [program, *coder.command(reciting.url, task.question)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=task.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4_000:]
    task.check(done.stdout + done.stderr)
