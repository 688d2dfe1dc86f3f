"""`octavo run`, `pull`, `list`, `show` and `rm`, over the caches of Octavo and of Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.gguf_files import write_gguf
from support.hub_server import CONFIG, FILES, Hub, Repo
from support.tiny_models import FAMILIES, make_model

from octavo.cli import rm
from octavo.cli.main import main
from octavo.fetch import cache, offers
from octavo.fetch.cache import mark_as_served, serving_process
from octavo.fetch.description import describe_path, short_count
from octavo.fetch.installed import find_installed, installed
from octavo.fetch.offers import SMALL_MODELS

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def octavo(*arguments: str, text: str = "") -> Done:
    """The command in this process: most of them take less time than Python does to start."""
    before, out, err = sys.stdin, io.StringIO(), io.StringIO()
    try:
        sys.stdin = io.StringIO(text)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", make_model(*FAMILIES["llama"]), arch="llama")
    gguf = (tmp_path / "model.gguf").read_bytes()
    repos = {
        "org/model": Repo(dict(FILES)),
        "org/quants-GGUF": Repo({"quants-Q4_K_M.gguf": gguf, "quants-Q8_0.gguf": gguf + b"\0"}),
    }
    with Hub(repos) as server:
        for name in [n for n in os.environ if n.startswith(("HF_", "HUGGING")) or "proxy" in n.lower()]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
        yield server


def test_pulled_models_are_listed_shown_and_removed(hub, tmp_path):
    assert octavo("list").stdout.split() == ["NAME", "SIZE", "QUANTIZATION", "CONTEXT", "MODIFIED", "FORMAT", "PATH"]
    for name in ("hf.co/org/model", "org/quants-GGUF:Q4_K_M", "hf://org/quants-GGUF:Q8_0"):
        done = octavo("pull", name)
        assert done.returncode == 0, done.stderr
        assert all(Path(line).exists() for line in done.stdout.splitlines())
    rows = {row["name"]: row for row in json.loads(octavo("list", "--json").stdout)}
    assert list(rows) == ["org/model", "org/quants-GGUF:Q4_K_M", "org/quants-GGUF:Q8_0"]
    assert rows["org/model"]["format"] == "safetensors" and rows["org/model"]["size"] > 800_000
    assert rows["org/quants-GGUF:Q8_0"]["format"] == "gguf" and rows["org/quants-GGUF:Q8_0"]["context"] > 0
    lines = octavo("ls").stdout.splitlines()
    assert len(lines) == 4 and "Q4_K_M" in lines[2]
    os.utime(rows["org/quants-GGUF:Q8_0"]["path"], (0, time.time() - 3.5 * 86_400))
    assert "3 days ago" in octavo("list").stdout.splitlines()[3]

    shown = json.loads(octavo("show", "org/quants-GGUF:Q8_0", "--json").stdout)
    assert shown["served"] == "yes" and shown["layers"] and shown["architecture"] == "llama"
    assert "layers" in octavo("show", "hf.co/org/quants-GGUF:Q8_0").stdout
    assert octavo("show", str(tmp_path / "model.gguf")).returncode == 0

    several = octavo("rm", "org/quants-GGUF", "-y")
    assert several.returncode == 1 and "name one" in several.stderr
    done = octavo("rm", "org/quants-GGUF:Q4_K_M", "-y")
    assert done.returncode == 0 and "removed org/quants-GGUF:Q4_K_M" in done.stdout
    assert [model.name for model in installed()] == ["org/model", "org/quants-GGUF:Q8_0"]
    assert octavo("rm", "org/quants-GGUF", "https://huggingface.co/org/model", "-y").returncode == 0
    assert installed() == [] and not list((tmp_path / "hf" / "hub").glob("models--*/blobs/*"))
    assert octavo("pull", "org/model").returncode == 0  # it can come back


def test_small_models_of_the_hub_are_offered_for_a_name_that_nothing_is_like(hub, monkeypatch):
    """With their sizes, as the hub has them now; models that it lacks are not offered, and nothing without a hub."""
    monkeypatch.setattr(offers, "_PATIENCE", 60.0)
    name = SMALL_MODELS[-1]
    repository, quant = name.split(":")
    hub.repos[repository] = Repo({f"model-{quant.lower()}.gguf": b"GGUF" * 300_000})
    done = octavo("run", "xyzzy")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"; small ones on the hub: {name} (1.2 MB, about 10 s at 100 Mbit/s)\n")
    assert "on the hub" not in octavo("run", "smollm").stderr, "a name is near"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "on the hub" not in octavo("run", "xyzzy").stderr


def test_rm_asks_and_no_is_no(hub):
    assert octavo("pull", "org/model").returncode == 0
    piped = octavo("rm", "org/model", text="y\n")
    assert piped.returncode == 1 and "-y" in piped.stderr
    for typed, code in (("n\r", 1), ("\r", 1), ("\x04", 1), ("y\r", 0)):
        pid, fd = pty.fork()
        if pid == 0:
            os.execv(sys.executable, [*OCTAVO, "rm", "org/model"])
        shown, asked = "", False
        while True:
            try:
                shown += os.read(fd, 4096).decode()
            except OSError:
                break
            if not asked and "[y/N]" in shown:
                asked = os.write(fd, typed.encode()) > 0
        os.close(fd)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, shown
        assert ("removed" in shown) == (code == 0)
    assert installed() == []


@pytest.mark.slow
def test_served_models_are_not_removed(hub):
    assert octavo("pull", "org/quants-GGUF:Q8_0").returncode == 0
    path = find_installed("org/quants-GGUF:Q8_0").path
    serve = [*OCTAVO, "serve", "org/quants-GGUF:Q8_0", "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen([*serve, "--load-format", "dummy"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while serving_process(path) is None:
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        done = octavo("rm", "org/quants-GGUF", "-y")
        assert done.returncode == 1 and f"is being served by process {server.pid}" in done.stderr
        assert path.exists()
    finally:
        server.kill()
        server.wait()
    deadline = time.monotonic() + 90
    while serving_process(path) is not None:  # the core notices that it is alone
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert octavo("rm", "org/quants-GGUF", "-y").returncode == 0 and not path.exists()


def test_a_server_that_starts_while_rm_asks_keeps_its_model(hub, monkeypatch):
    """It is looked again just before the files go."""
    assert octavo("pull", "org/quants-GGUF:Q8_0").returncode == 0
    path = find_installed("org/quants-GGUF").path
    monkeypatch.setattr(rm, "_agreed", lambda question: mark_as_served((str(path),)) is None)
    done = octavo("rm", "org/quants-GGUF")
    os.close(cache._marks.pop())
    assert done.returncode == 1 and "is being served by process" in done.stderr and path.exists()
    assert octavo("rm", "org/quants-GGUF", "-y").returncode == 0


def test_a_mark_lasts_as_long_as_its_process(tmp_path):
    file = tmp_path / "w.gguf"
    file.touch()
    code = f"from octavo.fetch.cache import *; mark_as_served(({str(file)!r},), {str(tmp_path)!r}); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 90
        while serving_process(file, str(tmp_path)) != process.pid:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    assert serving_process(file, str(tmp_path)) is None
    mark_as_served((str(file),), "/proc/cannot/be/written")  # says nothing: nothing can be removed there


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run", "qwen3:0.6b"], "did you mean Qwen/Qwen3-0.6B?"),
        (["run", "llama3.2:1b"], "did you mean meta-llama/Llama-3.2-1B-Instruct?"),
        (["run", "smollm2:135m", "hi"], "did you mean smollm2-135m-instruct?"),
        (["serve", "mistral"], "did you mean mistralai/Mistral-7B-Instruct-v0.3?"),
        (["pull", "smolm2-135m"], "did you mean smollm2-135m-instruct?"),
        (["rm", "org/modle", "-y"], "is not on this machine"),
        (["show", "nothing"], "is not on this machine"),
    ],
    ids=" ".join,
)
def test_wrong_names_are_refused_in_one_line(arguments, word, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = octavo(*arguments)
    assert done.returncode == 1 and word in done.stderr
    assert done.stderr.startswith("octavo: error: ") and done.stderr.count("\n") == 1


def test_wrong_names_are_refused_before_anything_large_is_imported():
    code = (
        "import sys\nfrom octavo.cli.main import main\ncode = main(['run', 'qwen3:0.6b'])\n"
        "loaded = {'httpx', 'torch', 'transformers', 'numpy', 'prompt_toolkit'} & sys.modules.keys()\n"
        "assert not loaded, loaded\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr


def test_run_answers_a_question(shared_server):
    url = ["--url", shared_server.url + "/v1", "--max-tokens", "8", "--temperature", "0"]
    done = octavo("run", "tiny", "The", "quick", "brown fox", *url)
    assert done.returncode == 0, done.stderr
    body = {"messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 8, "temperature": 0}
    answer = shared_server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert done.stdout.strip() == answer.strip()
    talk = octavo("run", "tiny", *url, text="/show\n/bye\n")
    assert talk.returncode == 0 and "max_tokens=8" in talk.stdout


@pytest.mark.parametrize(
    ("quantization", "tensors", "expected", "count"),
    [
        (None, {"w": torch.zeros(4, 8, dtype=torch.bfloat16)}, "BF16", 32),
        (
            {"quant_method": "gptq", "bits": 4},
            {
                "a.qweight": torch.zeros(4, 8, dtype=torch.int32),
                "a.scales": torch.zeros(1, 8, dtype=torch.float16),
                "norm.weight": torch.zeros(8, dtype=torch.float16),
            },
            "gptq-4bit",
            4 * 8 * 8 + 8,
        ),
    ],
)
def test_a_checkpoints_weights_are_counted_not_its_integers(tmp_path, quantization, tensors, expected, count):
    config = json.loads(CONFIG) | ({"quantization_config": quantization} if quantization else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(save(tensors))
    said = describe_path(tmp_path)
    assert (said.quantization, said.num_parameters) == (expected, count)


def test_counts_as_people_write_them():
    assert [short_count(n) for n in (7, 1_000, 134_515_008, 7_241_732_096, 70e9)] == ["7", "1K", "135M", "7.2B", "70B"]
