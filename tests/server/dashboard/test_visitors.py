"""A page for this machine alone answers what a browser sends that has opened it, and nothing that other pages send."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.sweep import _serve_parser
from octavo.dashboard import visitors
from octavo.dashboard.content_policy import with_policy
from octavo.dashboard.events import restoring
from octavo.dashboard.sweeps import check
from octavo.dashboard.visitors import check_model
from octavo.errors import ConfigError

HERE = "127.0.0.1:7860"


def status(local: bool, **headers: str) -> tuple[int, set[bytes]]:
    """Of an answer to a request with ``headers``, and the names of its own headers."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        cors = [(b"access-control-allow-origin", b"*"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": cors})
        await send({"type": "http.response.body", "body": b"fine"})

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/gradio_api/queue/join", "headers": given}
    asyncio.run(with_policy(app, local)(scope, None, send))
    return sent[0]["status"], {name for name, _ in sent[0]["headers"]}


@pytest.mark.parametrize("host", [HERE, "127.0.0.1", "localhost:8080", "[::1]:7860"])
def test_the_page_itself_is_answered(host: str) -> None:
    assert status(True, host=host) == status(True, host=host, origin=f"http://{host}")
    assert status(True, host=host)[0] == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("rebound.example:7860", "http://rebound.example:7860"),  # a name that its owner lets point here
        ("rebound.example:7860", None),
        ("127.0.0.1.rebound.example", None),
        ("localhost.rebound.example", None),
        ("[", None),
        ("", None),
        (HERE, "https://elsewhere.example"),
        (HERE, "http://127.0.0.1:8000"),  # another program's page
        (HERE, "http://localhost:7860"),
        (HERE, "null"),  # a page in a frame, or of a file
    ],
)
def test_other_pages_are_not(host: str, origin: str | None) -> None:
    headers = {"host": host} | ({"origin": origin} if origin else {})
    assert status(True, **headers)[0] == 403


def test_a_page_for_all_has_any_name_and_is_read_by_no_other_page() -> None:
    found, names = status(False, host="octavo.example", origin="https://elsewhere.example")
    assert found == 200 and b"access-control-allow-origin" not in names and b"content-security-policy" in names


def test_buttons_come_back_after_an_error_and_before_it_is_shown() -> None:
    async def updates() -> Any:
        yield {"run": "disabled"}
        raise RuntimeError("unforeseen")

    async def main() -> None:
        seen = []
        with pytest.raises(RuntimeError, match="unforeseen"):
            async for update in restoring(updates(), lambda: {"run": "enabled"}):
                seen.append(update)
        assert seen == [{"run": "disabled"}, {"run": "enabled"}]

    asyncio.run(main())


FOREIGN = [
    "host=0.0.0.0",
    "--host=0.0.0.0",
    "port=8123",
    "chat-template=/etc/passwd",
    "chat_template=/etc/passwd",
    "uds=/x",
    "model=https://192.0.2.1/x",
    "download_dir=/x",
    "otlp_traces_endpoint=http://192.0.2.1/",
    "lora_list=/etc/passwd",
    "allowed_local_media_path=/",
    "config=/etc/passwd",
    "tokenizer=/etc",
    "lora_modules=a=/etc",
    "api_key=x",
    "speculative_model=/etc",
    "hf_overrides={}",
    "ssl_keyfile=/x",
    "management_host=0.0.0.0",
    "headless=on",
]


@pytest.mark.parametrize("flag", FOREIGN)
def test_visitors_of_a_foreign_interface_set_no_path_address_or_process(flag: str) -> None:
    with pytest.raises(ConfigError, match="cannot be compared"):
        check([f"--param={flag}", "--users=1"])


@pytest.mark.parametrize("flag", ["host=0.0.0.0", "port=8123", "uds=/x", "model=x", "config=/x", "management_port=1"])
def test_settings_of_the_page_cannot_be_set_again_on_loopback(flag: str) -> None:
    with pytest.raises(ConfigError, match="the dashboard sets it"):
        check([f"--param={flag}", "--users=1"], local=True)


def test_flags_that_cost_time_and_memory_can_be_compared_everywhere() -> None:
    flags = [
        "enable_prefix_caching=on,off",
        "block_size=16,32",
        "max_num_seqs=8,64",
        "max_model_len=64,512",
        "quantization=none,int8",
        "max_num_batched_tokens=128,512",
    ]
    assert check([*(f"--param={flag}" for flag in flags), "--users=1"]).num_loads == 2 * 2**6
    assert check(["--param=chat_template=/x", "--users=1"], local=True).num_loads == 2


def test_combinations_without_end_are_refused_before_they_are_made() -> None:
    values = ",".join(map(str, range(1, 101)))
    flags = ("max_num_seqs", "max_model_len", "block_size", "seed", "max_num_batched_tokens", "mm_encoder_cache_tokens")
    with pytest.raises(ConfigError, match="1,000,000,000,000 combinations"):
        check([*(f"--param={flag}={values}" for flag in flags), "--users=1"])


def test_every_flag_that_can_be_compared_is_one_of_serve() -> None:
    known = {flag for action in _serve_parser()._actions for flag in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in visitors._COMPARABLE} <= known


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "./model",
        "../model",
        "~/model",
        "server",
        "a/../../etc",
        "https://192.0.2.1/x",
        "s3://bucket/x",
        "file:///etc",
        "a/b/c",
        "C:\\x",
        "//host/share",
        "pypi://x",
    ],
)
def test_visitors_of_a_foreign_interface_name_models_of_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    monkeypatch.chdir(tmp_path)
    check_model("Qwen/Qwen3-0.6B", "own", local=False)
    check_model("Qwen/Qwen3-0.6B:Q4_K_M", "own", local=False)
    check_model(name, name, local=False)
    check_model(name, "own", local=True)
    with pytest.raises(ConfigError, match="reads no paths"):
        check_model(name, "own", local=False)
