"""What a user may write after `serve`, and what finding a model costs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file
from support.audit import audited, check_reads_notes_alone
from support.gguf_files import write_gguf
from support.tiny_models import FAMILIES, make_model

from octavo.errors import ModelError
from octavo.fetch.model_config import load_generation_config, load_hf_config
from octavo.fetch.sources import resolve_model
from octavo.text.tokenizer import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a cache of its own."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def model_folder(path: Path, config: object = CONFIG) -> Path:
    import torch

    path.mkdir(parents=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({"w": torch.ones(2)}, path / "model.safetensors")
    return path


def test_an_unknown_architecture_comes_before_what_its_folder_lacks(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Phi9ForCausalLM"]}')
    with pytest.raises(ModelError, match="nearest that is: Phi3ForCausalLM"):
        resolve_model(str(folder))


def test_a_path_is_a_path_in_every_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(folder / "org" / "name")
    monkeypatch.setenv("HOME", str(folder))
    for address in ("org/name", "./org/name", str(folder / "org/name"), "~/org/name"):
        files = resolve_model(address)
        assert (files.model, Path(files.directory).resolve()) == (address, folder / "org" / "name")


def test_a_folder_with_one_gguf_file_is_that_file(folder: Path) -> None:
    write_gguf(folder / "a.gguf", make_model(*FAMILIES["llama"]), arch="llama")
    assert resolve_model(".").weights == ("a.gguf",)
    write_gguf(folder / "b.gguf", make_model(*FAMILIES["llama"]), arch="llama")
    with pytest.raises(ModelError, match=r"several GGUF files \(a\.gguf, b\.gguf\); name one"):
        resolve_model(".")


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("./nothing", r"there is no model at \./nothing"),
        ("no-such-alias", "not a model: not an alias, not a path"),
        ("a/b/c", "not a model: not an alias, not a path"),
        ("ftp://x/y", "not a model: not an alias, not a path"),
        ("hf://", "not a model: not an alias, not a path"),
        ("../../etc/passwd", "there is no model|a single file must be a .gguf"),
    ],
)
def test_a_name_that_can_be_no_model_is_refused_at_once(address: str, says: str, folder: Path) -> None:
    start = time.perf_counter()
    with pytest.raises(ModelError, match=says):
        resolve_model(address)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("name", ["smollm2", "smolm2", "SmolLM2-135M-Instruct", "smollm2_135m_instruct"])
def test_a_near_miss_of_an_alias_names_it(name: str, folder: Path) -> None:
    with pytest.raises(ModelError, match=rf"'{name}' is not a model; did you mean smollm2-135m-instruct\?"):
        resolve_model(name)


def test_a_near_miss_of_a_path_names_it(folder: Path) -> None:
    (folder / "models" / "llama").mkdir(parents=True)
    for path, meant in (("./modles/llama", "models"), ("./models/lama", "llama")):
        with pytest.raises(ModelError, match=rf"there is no model at {path}; did you mean {meant}\?"):
            resolve_model(path)


def test_a_wrong_name_is_said_before_anything_is_started(folder: Path) -> None:
    """In well under the second that the engine's imports take: neither torch nor the network nor numpy is touched."""
    script = (
        "import sys, subprocess, socket\nfrom octavo.cli.main import main\n"
        "subprocess.Popen = socket.socket.connect = None\ncode = main(['serve', 'smollm2'])\n"
        "heavy = {'torch', 'numpy', 'uvicorn', 'tokenizers', 'octavo.fetch.huggingface'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1 []\n"
    assert done.stderr == "octavo: error: 'smollm2' is not a model; did you mean smollm2-135m-instruct?\n"


@pytest.mark.model
def test_the_embedded_model_is_greedy_and_does_not_go_round_in_circles() -> None:
    """As `serve` and `LLM` take it; its files say nothing, and what files say comes first."""
    from dataclasses import replace

    files = resolve_model(None, progress=False)
    assert load_generation_config(files).items() >= {"temperature": 0.0, "frequency_penalty": 0.4}.items()
    assert "temperature" not in load_generation_config(resolve_model(files.weights[0]))
    told = load_generation_config(replace(files, sampling={"eos_token_id": -1, "temperature": 0.5}))
    assert told["temperature"] == 0.5 and told["eos_token_id"] != -1


def test_a_file_that_is_no_gguf_or_an_empty_folder(folder: Path) -> None:
    (folder / "x.txt").write_text("x")
    with pytest.raises(ModelError, match=r"a single file must be a \.gguf"):
        resolve_model("./x.txt")
    with pytest.raises(ModelError, match=r"no config\.json and no \.gguf"):
        resolve_model(".")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "expected an object"),
        ({}, "does not name the model's architecture"),
        (CONFIG | {"architectures": "Llama"}, "does not name the model's architecture"),
        (CONFIG | {"vocab_size": 0}, "vocab_size must be a positive integer up to 16777216, got 0"),
        (CONFIG | {"hidden_size": "big"}, "hidden_size must be a positive integer up to 1048576, got 'big'"),
        ({k: v for k, v in CONFIG.items() if k != "num_hidden_layers"}, "num_hidden_layers must be .*got None"),
    ],
)
def test_a_config_that_cannot_be_is_one_clear_line(config: object, says: str, folder: Path) -> None:
    files = resolve_model(str(model_folder(folder / "m", config)))
    with pytest.raises(ModelError, match=says) as error:
        load_hf_config(files)
    assert "config.json" in str(error.value) and "\n" not in str(error.value)


def test_the_language_part_of_a_larger_config_is_what_counts(folder: Path) -> None:
    inner = {k: v for k, v in CONFIG.items() if k != "architectures"} | {
        "intermediate_size": 8,
        "num_key_value_heads": 1,
    }
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner, "vision_config": {}}
    found = load_hf_config(resolve_model(str(model_folder(folder / "m", config))))
    assert (found["vocab_size"], found["architectures"]) == (8, ["Mistral3ForConditionalGeneration"])


def test_a_generation_config_is_optional(folder: Path) -> None:
    files = resolve_model(str(model_folder(folder / "m")))
    assert load_generation_config(files) == {}
    (folder / "m" / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_generation_config(files) == {"temperature": 0.6}


def test_files_survive_the_way_to_another_process(folder: Path) -> None:
    from dataclasses import asdict

    from octavo.interface.model_files import ModelFiles

    files = resolve_model(str(model_folder(folder / "m")))
    assert ModelFiles.from_dict(json.loads(json.dumps(asdict(files)))) == files


@pytest.mark.model
def test_a_warm_start_reads_notes_alone_and_loads_no_heavy_library() -> None:
    resolve_model(None, progress=False)
    with audited() as events:
        files = resolve_model(None)
    check_reads_notes_alone(events)
    script = (
        "import sys\nfrom octavo.fetch.sources import resolve_model\n"
        "from octavo.fetch.model_config import load_hf_config\n"
        "from octavo.text.tokenizer import Tokenizer\nfiles = resolve_model(None)\nload_hf_config(files)\n"
        "t = Tokenizer.from_files(files)\n"
        "t.decode(t.encode(t.apply_chat_template([{'role': 'user', 'content': 'hi'}])))\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'gguf', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
    assert load_hf_config(files)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.model
def test_a_tokenizer_may_come_from_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE")
    files = resolve_model(str(model_folder(folder / "m")), tokenizer="smollm2-135m-instruct", progress=False)
    assert files.directory.endswith("/m")
    assert len(Tokenizer.from_files(files)) == 49152


# -- progress

PROGRESS = """
import time
from octavo.fetch import progress
progress._EVERY = 0.0
with progress.Progress("fetching a thing", total=4_000_000) as bar:
    for _ in range(4):
        bar.advance(1_000_000)
        time.sleep(0.15)
"""


def test_progress_on_a_log_is_plain_lines() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["fetching a thing (4.0 MB)"] + [
        f"fetching a thing: {i}.0 MB of 4.0 MB ({25 * i} %)" for i in range(1, 5)
    ]


@pytest.mark.parametrize("rich", [True, False])
def test_progress_on_a_terminal_is_a_bar_where_rich_is(rich: bool) -> None:
    ours, theirs = pty.openpty()
    hide = "" if rich else "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", hide + PROGRESS], stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # the other side has gone
        pass
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert ("━" in text) == rich
    assert "fetching a thing" in text and ("4.0 MB" in text or "4.0/4.0 MB" in text)
