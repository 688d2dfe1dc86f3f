"""Who may come in, and by which door: API keys, the management port, CORS, TLS, unix sockets, root path."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

MAIN_ONLY = ["/", "/v1/models", "/metrics", "/load", "/version", "/ping", "/docs", "/openapi.json", "/nowhere"]
PROBES = ["/health", "/livez", "/readyz"]


@pytest.mark.parametrize("path", MAIN_ONLY)
def test_everything_but_the_probes_asks_for_the_key(guarded, path):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "secret-key"},
        {"authorization": "Basic secret-key"},
        {"authorization": "Bearer secret-key "[:-2]},
    ):
        answer = guarded.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
        assert guarded.get(path, headers={"x-api-key": "wrong", **headers}).status_code == 401
    for headers in (
        {"authorization": "bearer secret-key"},
        {"x-api-key": "secret-key"},
        {"authorization": "Bearer another's", "x-api-key": "secret-key"},
    ):
        assert guarded.get(path, headers=headers).status_code == (404 if path == "/nowhere" else 200)


def test_each_way_to_send_a_key_that_is_named_is_one(guarded):
    """In the refusal and in the description, which name the same ones."""
    said = guarded.get("/v1/models").json()["error"]["message"]
    described = guarded.get("/openapi.json", headers={"api-key": "secret-key"}).json()
    schemes = described["components"]["securitySchemes"]
    assert {name for way in described["paths"]["/v1/models"]["get"]["security"] for name in way} == schemes.keys()
    ways = {one.get("name", "Authorization"): "" if "name" in one else "Bearer " for one in schemes.values()}
    assert set(re.findall(r"([\w-]+): (?:Bearer )?KEY", said)) == ways.keys()
    for header, scheme in ways.items():
        assert guarded.get("/v1/models", headers={header: f"{scheme}secret-key"}).status_code == 200, header


def test_the_page_needs_no_key_and_tells_nothing(guarded):
    """It asks its visitor for the key. Where operators have a port of their own, the map of blocks is there alone."""
    for prefix in ("", "/llm"):
        page = guarded.get(prefix + "/", headers={"accept": "text/html,*/*;q=0.8"})
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "tiny" not in page.text and "accept" in page.headers["vary"]
    for path in ("/v1/models", "/docs", "/load"):
        assert guarded.get(path, headers={"accept": "text/html"}).status_code == 401
    assert guarded.post("/", headers={"accept": "text/html"}).status_code == 401
    assert guarded.get("/octavo/blocks", headers={"x-api-key": "secret-key"}).status_code == 404


@pytest.mark.parametrize("path", PROBES)
def test_probes_need_no_key(guarded, path):
    assert guarded.get(path).status_code == 200
    assert httpx.head(guarded.url + path).status_code == 200


def test_work_asks_for_the_key(guarded):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert guarded.post(path, {"prompt": "x"}).status_code == 401
    assert guarded.client(api_key="secret-key").completions.create(model=None, prompt="x", max_tokens=1)


def test_the_key_is_nowhere_to_be_seen(guarded):
    """Neither on the command line nor in a log, nor in the environment of the engine."""
    assert "secret-key" not in guarded.log
    assert "secret-key" not in " ".join(guarded.process.args)
    environment = Path(f"/proc/{guarded.core_pid}/environ").read_bytes()
    assert b"PATH=" in environment and b"secret-key" not in environment


def test_the_management_port_serves_state_without_a_key_and_no_work(guarded, management_port):
    url = f"http://127.0.0.1:{management_port}"
    for path in [*PROBES, "/metrics", "/load", "/version"]:
        assert httpx.get(url + path).status_code == 200, path
    assert b"vllm:num_requests_running" in httpx.get(url + "/metrics").content
    for path in ("/v1/completions", "/v1/models", "/tokenize"):
        assert httpx.post(url + path, json={"prompt": "x"}).status_code == 404


def test_root_path_is_understood_with_and_without_a_stripping_proxy(guarded):
    key = {"authorization": "Bearer secret-key"}
    assert guarded.get("/v1/models", headers=key).status_code == 200
    assert guarded.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]
    for prefix in ("", "/llm"):
        assert f"{guarded.url}/llm/docs" in guarded.get(prefix + "/", headers=key).text
        assert '"/llm/docs/swagger-ui.css"' in guarded.get(prefix + "/docs", headers=key).text
        assert guarded.get(prefix + "/docs/swagger-ui.css", headers=key).status_code == 200


@pytest.mark.slow
def test_options_that_vllms_users_know(start, tmp_path):
    """And JSON logs of both processes, where every line is JSON, and none has the text of a request."""
    (tmp_path / "template").write_text(
        "{{ messages[0].content }}{{ tone }}{{ verbosity }}{% for t in tools or [] %}TOOL{% endfor %}"
    )
    server = start(
        "--enable-force-include-usage",
        "--disable-fastapi-docs",
        "--exclude-tools-when-tool-choice-none",
        "--override-generation-config",
        '{"max_new_tokens": 3}',
        "--default-chat-template-kwargs",
        '{"tone": "loud"}',
        "--chat-template",
        str(tmp_path / "template"),
        "--root-path",
        "/llm",
        "--log-format",
        "json",
        "--enable-log-requests",
        "--trust-remote-code",
        "-tp",
        "1",
        "--enable-chunked-prefill",
        "--enable-prompt-tokens-details",
    )
    chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "return_token_ids": True}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}

    def prompt(**more: object) -> str:
        answer = server.post("/v1/chat/completions", {**chat, **more}).json()
        assert answer["usage"]["completion_tokens"] == 3
        return server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]

    assert prompt(**tools) == "xloud" and prompt(chat_template_kwargs={"tone": "soft"}) == "xsoft"
    assert prompt(verbosity="low") == "xloudlow"
    assert prompt(verbosity="low", chat_template_kwargs={"verbosity": "high"}) == "xloudhigh", "the variable's own name"
    asked = {"input": "x", "text": {"verbosity": "low"}}
    for given in ({}, {"tone": "soft"}, {"tone": "very soft"}):
        said = prompt(chat_template_kwargs=given, verbosity="low")
        counted = server.post("/v1/responses/input_tokens", {**asked, "chat_template_kwargs": given}).json()
        assert counted["input_tokens"] == len(server.post("/tokenize", {"prompt": said}).json()["tokens"]), given
    plain = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", plain)):
        events = server.post(path, {**body, "stream": True}).text.split("\n\n")
        usages = [json.loads(event.removeprefix("data: "))["usage"] for event in events[:-2]]
        assert all(usages) and usages[-1]["total_tokens"] >= 4, "on every chunk, as in vLLM"
    assert server.get("/docs").status_code == server.get("/openapi.json").status_code == 404
    assert "/llm/v1" in server.get("/").text and "/docs" not in server.get("/").text
    assert server.get("/llm/v1/models").status_code == server.get("/v1/models").status_code == 200
    body = {"prompt": "my secret", "stop": ["my secret"], "bad_words": ["my secret"], "max_tokens": 1}
    for constraint in ({}, {"choice": ["my secret"]}, {"regex": "my secret"}, {"json": {"title": "my secret"}}):
        assert server.post("/v1/completions", {**body, "structured_outputs": constraint or None}).status_code == 200
    assert server.stop() == 0
    first, _, log = server.log.partition("\n")
    assert "--trust-remote-code has no effect" in first
    assert "max_tokens=1, " in log and "stop=<1>" in log and "structured_outputs=<regex>" in log
    assert "secret" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["process"] for line in lines} == {"api", "core"}
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert any("POST /v1/completions" in line["message"] for line in lines)


def test_cors_for_the_allowed_origin_only(guarded):
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = httpx.options(guarded.url + "/v1/completions", headers=preflight)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = httpx.options(guarded.url + "/v1/completions", headers={**preflight, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    refused = guarded.get("/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.slow
def test_tls(start, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    _self_signed(key, certificate)
    server = start("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificate))
    assert httpx.get(server.url + "/health", verify=context).status_code == 200
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, verify=context, timeout=90) as response:
        assert list(response.iter_lines())[-2] == "data: [DONE]"
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/health")


def _self_signed(key, certificate) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")


@pytest.mark.slow
def test_a_unix_socket(launch, tmp_path):
    """And the module that existing scripts start."""
    path = tmp_path / "octavo.sock"
    server = launch("--uds", str(path), module="octavo.entrypoints.openai.api_server")
    client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://octavo")
    deadline = time.monotonic() + 120
    while True:
        assert server.process.poll() is None and time.monotonic() < deadline, server.log
        try:
            if client.get("/health").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.stop() == 0
    assert not path.exists()
