"""The images' entry point takes what vLLM's takes: `docker run IMAGE --model X`, `docker run IMAGE X`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from support.serving import free_port

from octavo.cli.image import command_line
from octavo.cli.main import COMMANDS

SERVED = [
    ["--model", "HuggingFaceTB/SmolLM2-360M-Instruct", "--port", "8000"],
    ["HuggingFaceTB/SmolLM2-360M-Instruct", "--max-model-len", "2048"],
    ["smollm2-135m-instruct"],
    ["hf.co/org/name:Q4_K_M"],
    ["model.gguf"],
    ["--host", "0.0.0.0"],
]


@pytest.mark.parametrize("argv", SERVED, ids=" ".join)
def test_a_model_or_a_flag_is_served(argv: list[str]) -> None:
    assert command_line(argv) == ["serve", *argv]


def test_a_folder_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command_line(["tiny"]) == ["serve", "tiny"]


@pytest.mark.parametrize("first", [*COMMANDS, "--version", "--help", "-h"])
def test_octavos_own_words_are_left_alone(first: str) -> None:
    assert command_line([first, "x/y"]) == [first, "x/y"]


def test_a_misspelt_command_is_told_the_right_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.image", "sevre", "--port", "1"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "did you mean serve?" in done.stderr


def test_a_wrong_flag_is_refused_as_serves() -> None:
    done = subprocess.run([sys.executable, "-m", "octavo.cli.image", "--modell", "x"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean --model?" in done.stderr


@pytest.mark.slow
@pytest.mark.model
def test_it_answers_when_it_is_started_as_vllms_image(tmp_path: Path) -> None:
    port, model = free_port(), "smollm2-135m-instruct"
    given = ["--model", model, "--max-model-len", "512", "--port", str(port), "--host", "127.0.0.1"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli.image", *given],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def is_loading() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code != 200
        except httpx.TransportError:  # nobody listens yet
            return True

    try:
        while is_loading():
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.1)
        cards = client.models.list()
        assert [(card.id, card.model_dump()["max_model_len"]) for card in cards] == [(model, 512)]
        said = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Name the capital of France."}], temperature=0
        )
        assert "Paris" in (said.choices[0].message.content or "")
    finally:
        process.terminate()
        process.wait(90)
