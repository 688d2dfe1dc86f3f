"""The images' entry point takes what vLLM's takes: `docker run IMAGE --model X`, `docker run IMAGE X`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
