"""`octavo serve` processes for tests that watch them from outside, and load for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

VOCAB_SIZE = 320


def tiny_model(folder: Path) -> Path:
    """A llama of two layers whose tokens are bytes; its weights are made up when it is served."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": VOCAB_SIZE - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


_given = set[int]()


def free_port() -> int:
    """A port that nothing else gets, in this process or in another one of the suite: servers listen a while later. It
    lies below those that the kernel gives to connections and to who binds to port 0."""
    turn = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
    while True:
        port = 10_000 + 2 * secrets.randbelow(10_000) + turn
        with socket.socket() as probe, contextlib.suppress(OSError):  # somebody listens there
            probe.bind(("", port))
            if port not in _given:
                _given.add(port)
                return port


def rank_pids(parent: int) -> list[int]:
    """The processes that a process, or one of its threads, has started."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for path in children for pid in path.read_text().split()]


def are_gone(pids: list[int], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > until:
            print("left:", left)
            return False
        time.sleep(0.05)
    return True


class Engine:
    """One `octavo serve` on a tiny model. A context manager; ready when entered."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        port: int | None = None,
        python: str = sys.executable,
    ) -> None:
        self.port, self.management_port = port or free_port(), free_port()
        self._log = folder / "log"
        self._command = [
            python,
            "-m",
            "octavo.cli.main",
            "serve",
            str(tiny_model(folder / "model")),
            "--load-format",
            "dummy",
            "--served-model-name",
            "tiny",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--management-port",
            str(self.management_port),
            *flags,
        ]
        self._open: set[http.client.HTTPConnection] = set()
        own = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}  # and no responses of another engine
        self._env = {**os.environ, **own, **(env or {})}

    def __enter__(self) -> Engine:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.management_port}/readyz", timeout=2)
                return
            except OSError:
                assert self.process.poll() is None, self.log
                assert time.monotonic() < deadline, self.log
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(90)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def core_pid(self) -> int:
        """The engine core: the API process's only child."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    @property
    def metrics_address(self) -> str:
        return f"127.0.0.1:{self.management_port}"

    def wait_until_told(self, what: Callable[[str], Any]) -> None:
        """Until it is true of the page of metrics, which lags behind what it tells of."""
        deadline = time.monotonic() + 90
        while not what(page := urllib.request.urlopen(f"http://{self.metrics_address}/metrics").read().decode()):
            assert time.monotonic() < deadline, page
            time.sleep(0.05)

    def complete(self, prompt: str, max_tokens: int = 16, timeout: float = 60, **options: object) -> int:
        """The answer's status; 0 when there was none."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **options}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.connect()
            self._open.add(connection)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            self._open.discard(connection)
            connection.close()

    def text(self, body: dict[str, Any]) -> str:
        """What a completion of ``body`` says."""
        address = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        return str(answer["choices"][0]["text"])

    def hang_up(self) -> None:
        """Ends all requests under way from the client's side."""
        for connection in list(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def crowd(self, count: int, max_tokens: int) -> list[threading.Thread]:
        """So many requests at once, in the background."""
        threads = [
            threading.Thread(target=self.complete, args=(f"request {number}", max_tokens, 300), daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        return threads
