"""41 mistakes of a first day: each is at most three lines, the last of them names the cause and the way out."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import cpu_time
from support.hub_server import CONFIG

from octavo.cli.main import main

PORT = "{port}"  # of somebody else
# The command line, and words that its last line has: the cause, then the way out.
MISTAKES: list[tuple[str, str, str]] = [
    ("srve", "'srve'", "did you mean serve?"),
    ("dashboard --url nonsense", "--url", "http://127.0.0.1:8000"),
    ("ps", "'ps'", "there are run, chat, serve"),
    ("run smollm2", "'smollm2'", "did you mean smollm2-135m-instruct?"),
    ("run smolm2-135m-instruct hello", "'smolm2-135m-instruct'", "did you mean smollm2-135m-instruct?"),
    ("run llama3.2:1b", "'llama3.2:1b'", "did you mean meta-llama/Llama-3.2-1B-Instruct?"),
    ("serve qwen3:0.6b", "'qwen3:0.6b'", "did you mean Qwen/Qwen3-0.6B?"),
    ("pull xyzzy", "'xyzzy'", "aliases: smollm2-135m-instruct"),
    ("serve a/b/c", "'a/b/c'", "org/name/file.gguf"),
    ("serve https://huggingface.co/docs", "not a model's page", "hf.co/org/name"),
    ("serve ./empt", "./empt", "did you mean empty?"),
    ("serve ./missing.gguf", "./missing.gguf", "give a folder, a .gguf file"),
    ("serve ./empty", "no config.json and no .gguf", "give the folder that has one"),
    ("serve ./bare", "no *.safetensors weights", "--load-format dummy"),
    ("serve ./pickled", "pickles", "safetensors version"),
    ("serve ./broken", "config.json", "fetch the model again"),
    ("serve ./notes.txt", "a single file must be a .gguf", "other models are folders"),
    ("serve ./model.gguf.gz", "model.gguf.gz is not a model", "a single file must be a .gguf"),
    ("serve ./text.gguf", "text.gguf is not a GGUF file", "fetch it again"),
    ("serve ./shape", "NoSuchForCausalLM", "docs/models.md lists all"),
    ("serve --max-modle-len 4096", "--max-modle-len", "did you mean --max-model-len?"),
    ("serve --xyzzy 4096", "--xyzzy", "octavo serve --help"),
    ("serve --port", "--port", "expected"),
    ("serve --port http", "--port", "whole number"),
    ("serve --port 99999", "99999", "65535"),
    (f"serve --host 127.0.0.1 --port {PORT}", PORT, "choose another port"),
    ("serve --dtype fp15", "'fp15'", "must be one of auto"),
    ("serve --quantization q4", "'q4'", "must be one of"),
    ("serve --max-model-len eight", "'eight'", 'a number or "auto"'),
    ("serve --gpu-memory-utilization 90", "got 90", "at most 1"),
    ("serve --fully-sharded-loras", "--fully-sharded-loras is not supported yet", "leave it out"),
    ("serve --max-loras 2", "max_loras needs enable_lora", "give both, or neither"),
    ("serve --lora-modules a=/b", "lora_modules needs --enable-lora", "give both, or neither"),
    ("serve --enable-lora --lora-modules /b", "'/b'", "must be name=path"),
    ("serve --speculative-config {}", "speculative_config", "there are none, ngram, suffix"),
    ("serve -pp 0", "pipeline_parallel_size must be an integer >= 1", "got 0"),
    ("serve --config missing.yaml", "missing.yaml", "give the path of a YAML file"),
    ("serve --config bad.yaml", "bad.yaml", "a flag a line"),
    ("serve --config typo.yaml", "max_modle_len", "did you mean max-model-len?"),
    ("chat --url http://127.0.0.1:9/v1 -q hello", "no server at http://127.0.0.1:9", "octavo serve"),
    ("chat --temperature hot", "--temperature", "'hot'"),
    ("bench serve --num-promts 3", "--num-promts", "did you mean --num-prompts?"),
    ("rm org/modle -y", "org/modle is not on this machine", "octavo pull"),
    ("show", "required", "MODEL"),
]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of what people have at hand."""
    for name in ("empty", "bare", "pickled", "broken", "shape"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "model.safetensors").touch()
    for name in ("bare", "pickled"):
        (tmp_path / name / "config.json").write_bytes(CONFIG)
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80")
    (tmp_path / "broken" / "config.json").write_text("{")
    shape = {**json.loads(CONFIG), "architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}
    (tmp_path / "shape" / "config.json").write_text(json.dumps(shape))
    (tmp_path / "shape" / "model.safetensors").touch()
    for name in ("notes.txt", "model.gguf.gz", "text.gguf"):
        (tmp_path / name).write_text("no model")
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "typo.yaml").write_text("max_modle_len: 4096")
    for name in ("OCTAVO_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_there_are_44_mistakes() -> None:
    assert len({command for command, _, _ in MISTAKES}) == 44
    assert all(cause and way_out for _, cause, way_out in MISTAKES)


@pytest.mark.parametrize(("command", "cause", "way_out"), MISTAKES, ids=[command for command, _, _ in MISTAKES])
def test_a_mistake_is_told_at_once(
    command: str, cause: str, way_out: str, desk: Path, taken: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with cpu_time.at_most(2):  # of which half a second is ours: imports of a first call count here too
        try:
            status = main([word.replace(PORT, str(taken)) for word in command.split()])
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
    lines = capfd.readouterr().err.splitlines()
    assert status in (1, 2) and 0 < len(lines) <= 3, lines
    assert lines[-1].startswith("octavo: error: ") and len(lines[-1]) < 500
    assert cause.replace(PORT, str(taken)) in lines[-1] and way_out in lines[-1], lines[-1]


# What Python takes for these on a processor on which a mistake may take half a second; a slower one may take longer.
_USUAL_IMPORTS, _USUAL_SECONDS = "import asyncio, decimal, email, http.client, json, logging, ssl, typing", 0.14


def processor_seconds(*arguments: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """What a process of Python took of the processor, and its result."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def test_a_mistake_takes_half_a_second_of_the_processor(desk: Path) -> None:
    """Each kind from the start of its process: names, paths, flags, a server that is not there."""
    for command in ("run smollm2", "serve ./empt", "serve -pp 0", "chat --url http://127.0.0.1:9/v1 -q hello"):
        shares: list[float] = []
        while not shares or (min(shares) > 1 and len(shares) < 5):  # other programs make it more, never less
            usual, _ = processor_seconds("-c", _USUAL_IMPORTS)
            spent, done = processor_seconds("-m", "octavo.cli.main", *command.split())
            shares.append(spent / (0.5 * max(1.0, usual / _USUAL_SECONDS)))
            assert done.returncode in (1, 2) and done.stderr.splitlines()[-1].startswith("octavo: error: ")
        assert min(shares) <= 1, (command, shares)
