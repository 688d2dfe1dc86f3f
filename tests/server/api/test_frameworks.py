"""Agents of other people's frameworks, at the versions in support/clients, do their work with a reciting model: calls,
thoughts and errors go both ways, and each turn finds in the cache what was computed before.

`make clients` installs them, outside the tree, and runs this.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from support.agent_chats import FULL_TEMPLATE
from support.clients.loops import ERROR, LOOPS, MODEL, PROSE, SYSTEM, scripts
from support.reciting import Recital, small_tokenizer, write_reciting_model

SOURCES = Path(__file__).parents[2] / "support" / "clients"
CLIENTS = Path(os.environ.get("OCTAVO_CLIENTS", Path.home() / ".cache" / "octavo" / "clients"))
PYTHON = CLIENTS / "frameworks" / "bin" / "python"
JAVASCRIPT = CLIENTS / "node_modules" / ".bin" / "node"
FRAMEWORKS = (
    "openai_agents_responses",
    "openai_agents_chat",
    "pydantic_ai_chat",
    "pydantic_ai_responses",
    "pydantic_ai_anthropic",
    "smolagents",
    "langgraph_openai",
    "langgraph_openai_responses",
    "langgraph_anthropic",
    "qwen_agent",
    "strands",
)
NODE = ("ai_chat", "ai_responses", "ai_compatible", "ai_anthropic")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def reciting(start, tmp_path_factory):
    if not PYTHON.exists() or not JAVASCRIPT.exists():
        pytest.skip("needs the clients: make clients")
    folder = tmp_path_factory.mktemp("reciting") / "model"
    said = scripts()
    backend = small_tokenizer([*said, *said.values(), PROSE, SYSTEM], ("<|im_start|>", "<|im_end|>"), MARKS)
    write_reciting_model(folder, backend, Recital(said, FULL_TEMPLATE, "<|im_end|>"))
    return start("--served-model-name", MODEL, "--kv-cache-memory-bytes", "256MiB", model=folder)


@pytest.mark.long
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_agent_of_a_framework_loses_nothing(reciting, name, loop):
    command = [PYTHON, SOURCES / "frameworks.py", reciting.url, name, loop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]


@pytest.mark.long
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", NODE)
def test_an_agent_of_the_ai_sdk_loses_nothing_whole_or_streamed(reciting, name, loop):
    shutil.copy(SOURCES / "agents.mjs", CLIENTS)  # node looks for packages beside the script
    told = json.dumps({"model": MODEL, "system": SYSTEM, "error": ERROR, **asdict(LOOPS[loop])})
    command = [JAVASCRIPT, CLIENTS / "agents.mjs", reciting.url, name]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
