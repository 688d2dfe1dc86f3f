"""Clients as they come, at the versions in support/clients, against a server: chats, streams, tools, forms, vectors.

`make clients` installs them, outside the tree, and runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "support" / "clients"
CLIENTS = Path(os.environ.get("OCTAVO_CLIENTS", Path.home() / ".cache" / "octavo" / "clients"))
PYTHON = (
    "openai", "anthropic", "ollama", "cohere", "langchain_openai", "langchain_anthropic", "langchain_ollama",
    "llama_index_openai_like", "llama_index_ollama", "litellm",
)  # fmt: skip
NODE = ("openai", "anthropic", "ollama", "ai_openai", "ai_openai_compatible", "ai_anthropic")


@pytest.mark.long
@pytest.mark.parametrize("name", [*(f"cases.py {name}" for name in PYTHON), *(f"cases.mjs {name}" for name in NODE)])
def test_a_client_unmodified(scripted, name):
    script, case = name.split()
    interpreter = CLIENTS / "bin" / "python" if script == "cases.py" else shutil.which("node")
    if interpreter is None or not (CLIENTS / "node_modules").exists() or not Path(interpreter).exists():
        pytest.skip("needs the clients: make clients")
    shutil.copy(SOURCES / script, CLIENTS)  # node looks for packages beside the script
    done = subprocess.run(
        [interpreter, CLIENTS / script, scripted.url, case], capture_output=True, text=True, timeout=300, cwd=CLIENTS
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
