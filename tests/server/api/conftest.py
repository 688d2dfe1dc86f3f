"""Real servers for the tests: `octavo serve` as a process of its own, on a tiny model with made-up weights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import tokenizers
from support.scripted_model import write_scripted_model
from support.serving import free_port
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

MAX_MODEL_LEN = 1_024
VOCAB_SIZE = 400
CORPUS = ["The capital of France is Paris. The quick brown fox jumps over the lazy dog. naïve café 日本語 🙂"] * 4
TRUST = httpx.create_ssl_context()  # made once: it takes longer than most answers
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' and not m.content %}{{ raise_exception('empty tool answer') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with a llama of two layers, a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    assert backend.get_vocab_size() <= VOCAB_SIZE
    backend.save(str(folder / "tokenizer.json"))
    end = backend.token_to_id("<|end|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
        )
    )
    return folder


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


class Server:
    """A running `octavo serve`."""

    def __init__(self, log: Path, flags: list[str], env: dict[str, str], module: str) -> None:
        self.log_path = log
        self.started = time.monotonic()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *module.split(), "--host", "127.0.0.1", "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, **env},
                process_group=0,
            )
        self.url = ""

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout: float = 120.0) -> Server:
        """Until the log says where it serves; a server that ends instead fails the test."""
        while (found := re.search(r"serving .* at (http[^\s\"]+)", self.log)) is None:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() - self.started < timeout, f"not ready in {timeout} s:\n{self.log}"
            time.sleep(0.02)
        self.url = found[1]
        return self

    @property
    def temporary(self) -> Path:
        """Its folder for temporary files."""
        return self.log_path.parent / "tmp"

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def core_pid(self) -> int:
        """The engine core: the API process's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        return [self.process.pid, *descendants(self.process.pid)]

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=options.pop("api_key", "none"),
            max_retries=0,
            _strict_response_validation=True,
            **options,
        )

    def async_client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True, **options
        )

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, timeout=90, verify=TRUST, **options)

    def post(self, path: str, body: object = None, **options) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=90, verify=TRUST, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=90)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 90.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def launching(tiny_model: Path, tmp_path_factory) -> Iterator[Callable[..., Server]]:
    """What starts servers, of the tiny model unless another is named; they end with the block."""
    servers: list[Server] = []

    def launch(
        *flags: str,
        model: str | Path | None = None,
        env: dict[str, str] | None = None,
        module: str = "octavo.cli.main serve",
    ) -> Server:
        folder = tmp_path_factory.mktemp("server")
        temporary = folder / "tmp"
        temporary.mkdir()
        arguments = ["--model", str(model or tiny_model), *([] if model else ["--load-format", "dummy"]), *flags]
        settings = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "XDG_STATE_HOME": str(folder / "state"),
            **(env or {}),
        }
        servers.append(Server(folder / "log", arguments, settings, module))
        return servers[-1]

    try:
        yield launch
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="session")
def start_shared(tiny_model, tmp_path_factory) -> Iterator[Callable[..., Server]]:
    """As `start`, of servers for all modules."""
    with launching(tiny_model, tmp_path_factory) as launch:
        yield lambda *flags, **options: launch(*flags, **options).wait_ready()


@pytest.fixture(scope="module")
def launch(tiny_model, tmp_path_factory) -> Iterator[Callable[..., Server]]:
    """Start a server and do not wait for it: ``launch("--flag", "value", model=..., env={...})``."""
    with launching(tiny_model, tmp_path_factory) as launch:
        yield launch


@pytest.fixture(scope="module")
def start(launch) -> Callable[..., Server]:
    """Start a server and wait until it is ready."""

    def start(*flags: str, **options) -> Server:
        return launch(*flags, **options).wait_ready()

    return start


@pytest.fixture(scope="session")
def shared_server(start_shared) -> Server:
    """One server for all tests that leave it as it was."""
    names = ["--served-model-name", "tiny", "also-tiny"]
    server = start_shared("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "32", *names)
    httpx.post(server.url + "/v1/completions", json={"prompt": "warm up"}, timeout=120).raise_for_status()
    return server


INFILL_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="session")
def infilling(start_shared, tiny_model, tmp_path_factory) -> Server:
    """One of the same model with marks of infilling in its vocabulary."""
    folder = tmp_path_factory.mktemp("infilling") / "model"
    shutil.copytree(tiny_model, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in INFILL_MARKS])
    assert backend.get_vocab_size() <= VOCAB_SIZE
    backend.save(str(folder / "tokenizer.json"))
    flags = ("--load-format", "dummy", "--kv-cache-memory-bytes", "64MiB", "--served-model-name", "tiny", "also-tiny")
    return start_shared(*flags, model=folder)


@pytest.fixture(scope="session")
def management_port() -> int:
    """That of `guarded`."""
    return free_port()


@pytest.fixture(scope="session")
def guarded(start_shared, management_port) -> Server:
    """One with an API key, "secret-key", a management port and a root path."""
    return start_shared(
        "--management-port",
        str(management_port),
        "--root-path",
        "/llm",
        "--allowed-origins",
        "https://app.example",
        env={"OCTAVO_API_KEY": "secret-key"},
    )


@pytest.fixture(scope="session")
def scripted_model(tiny_model, tmp_path_factory) -> Path:
    """One that recites: it reasons, calls tools, and is cut off, as the end of a prompt says."""
    folder = tmp_path_factory.mktemp("scripted") / "model"
    write_scripted_model(tiny_model, folder)
    return folder


SCRIPTED = (
    "--tool-call-parser",
    "hermes",
    "--served-model-name",
    "scripted",
    "--kv-cache-memory-bytes",
    "64MiB",
)


@pytest.fixture(scope="session")
def scripted(start_shared, scripted_model) -> Server:
    """One server of that model for all tests that leave it as it was."""
    return start_shared(*SCRIPTED, model=scripted_model)


@pytest.fixture(scope="module")
def start_scripted(start, scripted_model) -> Callable[..., Server]:
    """Start another one, with more flags."""
    return lambda *flags: start(*SCRIPTED, *flags, model=scripted_model)


HISTORY_TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
    "{{ m.tool_call_id }};{% endfor %}"
)


@pytest.fixture(scope="session")
def unusual(start_shared) -> Server:
    """One whose flags differ from the defaults, each in what one test is about."""
    return start_shared(
        "--served-model-name",
        "tiny",
        "--allow-duplicate-request-ids",
        "--embedding-pooling",
        "last",
        "--no-enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--chat-template",
        HISTORY_TEMPLATE,
    )
