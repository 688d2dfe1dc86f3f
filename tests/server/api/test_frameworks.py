"""Agents of other people's frameworks, at the versions in support/clients, do their work with a reciting model: calls,
thoughts and errors go both ways, and each turn finds in the cache what was computed before.

`make clients` installs them, outside the tree, and runs this.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from support.agent_chats import FULL_TEMPLATE
from support.clients.loops import LOOPS, MODEL, PROSE, SYSTEM, scripts
from support.reciting import Recital, small_tokenizer, write_reciting_model

SOURCES = Path(__file__).parents[2] / "support" / "clients"
CLIENTS = Path(os.environ.get("OCTAVO_CLIENTS", Path.home() / ".cache" / "octavo" / "clients"))
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
# Left out: behind two calls in one turn its prompt ends with none of the cues.
LEFT_OUT = {("smolagents", "two"), ("smolagents", "ten")}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def interpreter():
    """That of the environment which has them."""
    found = CLIENTS / "frameworks" / "bin" / "python"
    if not found.exists():
        pytest.skip("needs the clients: make clients")
    return found


@pytest.fixture(scope="module")
def reciting(interpreter, start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reciting") / "model"
    said = scripts()
    backend = small_tokenizer([*said, *said.values(), PROSE, SYSTEM], ("<|im_start|>", "<|im_end|>"), MARKS)
    write_reciting_model(folder, backend, Recital(said, FULL_TEMPLATE, "<|im_end|>"))
    return start("--served-model-name", MODEL, "--kv-cache-memory-bytes", "256MiB", model=folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "loop"), [pair for pair in itertools.product(FRAMEWORKS, LOOPS) if pair not in LEFT_OUT]
)
def test_an_agent_of_a_framework_loses_nothing(interpreter, reciting, name, loop):
    command = [interpreter, SOURCES / "frameworks.py", reciting.url, name, loop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
