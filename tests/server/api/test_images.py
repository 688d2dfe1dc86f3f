"""Images in chats, in every dialect, of a real server on a tiny LLaVA; what is bad is refused, and others go on."""

from __future__ import annotations

import argparse
import base64
import http.server
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import pytest
from PIL import Image
from support.images import image_of, make_tokenizer
from support.tiny_image_readers import TOKENS, save_tiny_idefics3, save_tiny_llava

from octavo import LLM, SamplingParams
from octavo.bench import serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_tiny_llava(path)
    return path


@pytest.fixture(scope="module")
def server(start: Any, folder: Path) -> Any:
    pictures = folder / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(png(1))
    flags = ["--limit-mm-per-prompt", '{"image": 3}', "--allowed-local-media-path", str(pictures)]
    flags += ["--allowed-media-domains", "localhost", "--max-model-len", "512", "--served-model-name", "tiny"]
    flags += ["--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--decisions-min-mass", "0"]
    return start("--dtype", "float32", *flags, model=folder)


def png(seed: int, width: int = 40, height: int = 50) -> bytes:
    out = io.BytesIO()
    image_of("RGB", width, height, np.random.default_rng(seed)).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(data: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else data_url(data)}}


def ask(server: Any, *parts: Any, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def test_an_image_counts_is_cached_and_answers_as_offline(server: Any, folder: Path) -> None:
    words = [{"type": "text", "text": "What is this, in a few words, please?"}, picture(png(1)), "and why?"]
    answer = ask(server, *words)
    assert answer.status_code == 200, answer.text
    first = answer.json()
    assert first["prompt_token_ids"].count(make_tokenizer().convert_tokens_to_ids(["<image>"])[0]) == TOKENS
    assert first["usage"]["prompt_tokens"] == len(first["prompt_token_ids"])
    again = ask(server, *words).json()
    before = first["prompt_token_ids"].index(make_tokenizer().convert_tokens_to_ids(["<image>"])[0])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= before + TOKENS
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    other = ask(server, words[0], picture(png(2)), words[2]).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] <= before
    llm = LLM(str(folder), dtype="float32", max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    pil = {"type": "image_pil", "image_pil": Image.open(io.BytesIO(png(1)))}
    for part in (pil, picture(png(1))):
        content = [words[0], part, {"type": "text", "text": "and why?"}]
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        assert output.prompt_token_ids == first["prompt_token_ids"]
        assert output.outputs[0].token_ids == first["choices"][0]["token_ids"]
    with pytest.raises(ValueError, match=r"messages\.0\.content\.0 is of type 'video_url'"):
        llm.chat([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}], params)
    for address in ("https://example.com/a.png", "file:///etc/passwd", "a.png"):
        with pytest.raises(ValueError, match=r"messages\.0\.content\.0 is an address, and offline none is fetched"):
            llm.chat([{"role": "user", "content": [picture(address)]}], params)


def test_an_image_in_tiles_answers_as_offline(start: Any, tmp_path: Path) -> None:
    """Its tiles are handed to the core, and encoded, one by one."""
    save_tiny_idefics3(tmp_path)
    tiled = start("--dtype", "float32", "--max-model-len", "512", "--served-model-name", "tiny", model=tmp_path)
    answer = ask(tiled, picture(png(1, 90, 60)), "hm")
    assert answer.status_code == 200, answer.text
    pil = {"type": "image_pil", "image_pil": Image.open(io.BytesIO(png(1, 90, 60)))}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    chat = [{"role": "user", "content": [pil, {"type": "text", "text": "hm"}]}]
    (output,) = LLM(str(tmp_path), dtype="float32", max_model_len=512).chat(chat, params, use_tqdm=False)
    assert output.prompt_token_ids == answer.json()["prompt_token_ids"]
    assert output.outputs[0].token_ids == answer.json()["choices"][0]["token_ids"]


def test_tools_schemas_and_samples_beside_an_image(server: Any) -> None:
    """And a client that goes away in the middle leaves nothing running."""
    kinds: dict[str, Any] = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "describe", "parameters": kinds}}
    named = {"type": "function", "function": {"name": "describe"}}
    until_done = {"max_tokens": 250, "ignore_eos": False}
    for choice in (named, "required"):
        one = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        answer = ask(server, picture(png(5)), "hm", **one, **until_done)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "describe"
        assert json.loads(call["function"]["arguments"])["kind"] in ("cat", "dog")
    free = ask(server, picture(png(5)), "hm", tools=[tool], tool_choice="auto")
    assert free.status_code == 200 and not free.json()["choices"][0]["message"].get("tool_calls")
    schema = {"type": "json_schema", "json_schema": {"name": "kind", "schema": kinds, "strict": True}}
    said = ask(server, picture(png(5)), "hm", response_format=schema, **until_done).json()["choices"][0]["message"]
    assert json.loads(said["content"])["kind"] in ("cat", "dog")
    drawn = ask(server, picture(png(5)), "hm", n=2, temperature=1, seed=3, logprobs=True, top_logprobs=2).json()
    assert len(drawn["choices"]) == 2 and all(len(one["logprobs"]["content"]) == 4 for one in drawn["choices"])
    body = {"model": "tiny", "messages": [{"role": "user", "content": [picture(png(6)), "hm"]}], "stream": True}
    body |= {"max_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    until = time.monotonic() + 90
    while "vllm:num_requests_running" in (text := server.get("/metrics").text) and not re.search(
        r"(?m)^vllm:num_requests_running\{[^}]*\} 0\.0$", text
    ):
        assert time.monotonic() < until, "it is still running"
        time.sleep(0.1)


def test_every_dialect_takes_images(server: Any) -> None:
    code = base64.b64encode(png(3)).decode()
    expected = ask(server, picture(png(3)), "hm").json()["usage"]["prompt_tokens"]
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": code}
    said: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "hm"}]}]
    message = client.messages.create(model="tiny", max_tokens=3, messages=said)
    used = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert used == expected == client.messages.count_tokens(model="tiny", messages=said).input_tokens
    parts: Any = [{"type": "input_image", "image_url": data_url(png(3))}, {"type": "input_text", "text": "hm"}]
    answer = server.client().responses.create(
        model="tiny", max_output_tokens=16, input=[{"role": "user", "content": parts}]
    )
    assert answer.usage is not None and answer.usage.input_tokens == expected
    chat = {"model": "tiny", "stream": False, "messages": [{"role": "user", "content": "hm", "images": [code]}]}
    assert httpx.post(f"{server.url}/api/chat", json=chat, timeout=60).json()["prompt_eval_count"] == expected
    once = {"model": "tiny", "stream": False, "prompt": "hm", "images": [code]}
    assert httpx.post(f"{server.url}/api/generate", json=once, timeout=60).json()["prompt_eval_count"] == expected
    raw = httpx.post(f"{server.url}/api/generate", json=once | {"raw": True}, timeout=60)
    assert raw.status_code == 400 and "images" in raw.json()["error"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": [picture(png(3)), "hm"]}]}
    assert httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["count"] == expected


def results_with(image: bytes) -> dict[str, tuple[str, dict[str, Any], str]]:
    """By dialect, a conversation in which a tool has answered with an image: path, body, and the image's field."""
    code = base64.b64encode(image).decode()
    call = {"id": "call_1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    asked = {"role": "user", "content": "hm"}
    source = {"type": "base64", "media_type": "image/png", "data": code}
    blocks = [{"type": "text", "text": "seen"}, {"type": "image", "source": source}]
    chat = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "seen"}, picture(image)]}
    parts = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": data_url(image)}]
    items = [
        {"type": "function_call", "call_id": "call_1", "name": "shot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": parts},
    ]
    used = {"type": "tool_use", "id": "call_1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": blocks}
    function = {"name": "shot", "arguments": {}}
    return {
        "chat": (
            "/v1/chat/completions",
            {"messages": [asked, {"role": "assistant", "tool_calls": [call]}, chat]},
            "messages.2.content.1.image_url",
        ),
        "responses": ("/v1/responses", {"input": [asked, *items]}, "input.2.output.1.image_url"),
        "messages": (
            "/v1/messages",
            {
                "max_tokens": 3,
                "messages": [asked, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}],
            },
            "messages.2.content.0.content.1.source.data",
        ),
        "ollama": (
            "/api/chat",
            {
                "stream": False,
                "messages": [
                    asked,
                    {"role": "assistant", "tool_calls": [{"function": function}]},
                    {"role": "tool", "tool_name": "shot", "content": "seen", "images": [code]},
                ],
            },
            "messages.2.images.0",
        ),
    }


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "ollama"])
def test_an_image_in_a_tool_s_result_is_seen_or_refused_by_its_field(server: Any, shared_server: Any, dialect) -> None:
    def length(image: bytes) -> int:
        path, body, _ = results_with(image)[dialect]
        answer = server.post(path, {"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        used = answer.json().get("usage", answer.json())
        names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
        return next(used[name] for name in names if name in used) + used.get("cache_read_input_tokens", 0)

    path, body, _ = results_with(png(3))["chat"]
    ids = server.post(path, {"model": "tiny", **body, "return_token_ids": True}).json()["prompt_token_ids"]
    assert ids.count(make_tokenizer().convert_tokens_to_ids(["<image>"])[0]) == TOKENS
    assert length(png(4)) == len(ids)
    path, body, field = results_with(png(3))[dialect]
    refused = shared_server.post(path, {"model": "tiny", **body})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(f"{field}: prompt has images")


def test_vectors_of_conversations_with_images(server: Any, folder: Path) -> None:
    """As vLLM has them: messages instead of input, one vector."""
    content = [picture(png(1)), {"type": "text", "text": "hm"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "pooling": "last"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    llm = LLM(str(folder), dtype="float32", max_model_len=512)
    pil = Image.open(io.BytesIO(png(1)))
    prompt: Any = {"prompt": "user:<image>hm|", "multi_modal_data": {"image": pil}}
    (expected,) = llm.embed(prompt, pooling="last", use_tqdm=False)
    assert answer.json()["usage"]["prompt_tokens"] == len(expected.prompt_token_ids) > TOKENS
    assert answer.json()["data"][0]["embedding"] == pytest.approx(expected.outputs.embedding, abs=1e-5)
    for wrong in (body | {"input": "x"}, {"model": "tiny"}, {"model": "tiny", "input": "x", "chat_template": "x"}):
        refused = httpx.post(f"{server.url}/v1/embeddings", json=wrong, timeout=60)
        assert refused.status_code == 400 and "messages" in refused.json()["error"]["message"], refused.text
    broken = body | {"messages": [{"role": "user", "content": [picture(b"no image")]}]}
    refused = httpx.post(f"{server.url}/v1/embeddings", json=broken, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("messages.0.content.0")


def test_the_server_says_that_the_model_reads_images(server: Any, shared_server: Any) -> None:
    for one, modalities in ((server, ["text", "image"]), (shared_server, ["text"])):
        (card,) = httpx.get(f"{one.url}/v1/models").json()["data"][:1]
        assert card["input_modalities"] == modalities
        assert httpx.get(f"{one.url}/props").json()["modalities"]["vision"] is (len(modalities) > 1)
        about = httpx.post(f"{one.url}/api/show", json={"model": card["id"]}).json()
        assert ("vision" in about["capabilities"]) is (len(modalities) > 1)


def test_files_are_read_and_hosts_refused_before_they_are_dialled(server: Any, folder: Path) -> None:
    assert ask(server, picture(f"file://{folder}/pictures/a.png")).status_code == 200
    assert ask(server, picture(f"file://{folder}/config.json")).status_code == 400
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)

    local = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=local.serve_forever, daemon=True).start()
    for host in ("localhost", "127.0.0.1"):
        refused = ask(server, picture(f"http://{host}:{local.server_port}/a.png"))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages.0.content.0.image_url"
    local.shutdown()
    local.server_close()
    assert seen == []


def bad_requests() -> Iterator[tuple[Any, str]]:
    yield picture("data:image/png;base64,@@@@"), "base64"
    yield picture(png(1)[:60]), "cut short"
    yield picture(data_url(b"<svg/>")), "neither PNG"
    yield picture("https://example.com/a.png"), "--allowed-media-domains"
    yield picture("ftp://localhost/a.png"), "must begin with"
    yield {"type": "image_url", "image_url": {"url": 3}}, "must be a url"
    yield {"type": "image_url", "image_url": {"url": "data:,", "detail": "huge"}}, "detail must be"
    yield {"type": "video_url", "video_url": {"url": "data:,"}}, "no model reads video"
    yield {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "no model reads audio"
    yield {"type": "image_pil", "image_pil": "x"}, "is not supported"


def test_bad_images_are_refused_beside_a_stream_that_goes_on(server: Any) -> None:
    gaps, tokens = [], []

    def stream() -> None:
        last = time.monotonic()
        for chunk in server.client().chat.completions.create(
            model="tiny",
            max_tokens=300,
            stream=True,
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"ignore_eos": True},
        ):
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            tokens.extend(choice.finish_reason for choice in chunk.choices if choice.finish_reason)

    with ThreadPoolExecutor(4) as threads:
        neighbour = threads.submit(stream)
        for part, words in bad_requests():
            answer = ask(server, part)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], (part, answer.text)
            assert "\n" not in answer.json()["error"]["message"]
        two = ask(server, picture(png(1)), {"type": "text", "text": "<image>"})
        assert two.status_code == 400 and "stands for an image" in two.json()["error"]["message"]
        many = ask(server, *[picture(png(seed)) for seed in range(4)])
        assert many.status_code == 400 and "at most 3" in many.json()["error"]["message"]
        neighbour.result()
    assert tokens == ["length"]
    assert ask(server, picture(png(1)), picture(png(1)), picture(png(2))).status_code == 200


def test_bench_serve_sends_images(server: Any, folder: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    words = ["--base-url", server.url, "--backend", "openai-chat", "--num-prompts", "3", "--disable-tqdm"]
    words += ["--tokenizer", "smollm2-135m-instruct", "--save-result", "--result-dir", str(tmp_path)]
    words += ["--result-filename", "found.json", "--output-len", "4", "--ignore-eos"]
    rows = [
        {"prompt": "What is this?", "image_files": [str(folder / "pictures" / "a.png")]},
        {"content": [{"type": "image_url", "image_url": {"url": data_url(png(7))}}, {"type": "text", "text": "this"}]},
        {"prompt": "And what are these?", "image_files": [data_url(png(8)), data_url(png(9))]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    custom = ["--dataset-name", "custom_image", "--dataset-path", str(tmp_path / "rows.jsonl")]
    drawn = ["--dataset-name", "random-mm", "--input-len", "5", "--random-mm-bucket-config", "{(40, 50, 1): 1}"]
    for more, images in ((custom, 4), ([*drawn, "--random-mm-base-items-per-request", "2"], 6)):
        assert serve.run(parser.parse_args([*words, *more])) == 0
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["completed"] == 3 and found["total_output_tokens"] == 12
        assert found["total_input_tokens"] > images * TOKENS


def test_a_text_model_names_itself(shared_server: Any, tiny_model: Path) -> None:
    server = shared_server
    refused = ask(server, picture(png(1)))
    assert refused.status_code == 400 and tiny_model.name in refused.json()["error"]["message"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hm", "images": ["aW1hZ2U="]}]}
    assert httpx.post(f"{server.url}/api/chat", json=body, timeout=60).status_code == 400


@pytest.mark.slow
def test_engines_beside_each_other_take_images(server: Any, start: Any, folder: Path) -> None:
    """Two engines, each of a process of its own, answer as one does."""
    both = start(
        "--dtype", "float32", "-dp", "2", "--max-model-len", "512", "--served-model-name", "tiny", model=folder
    )
    asked = [[picture(png(seed)), "hm", picture(png(seed + 1))] for seed in range(4)]
    expected = [ask(server, *parts).json()["choices"][0]["token_ids"] for parts in asked]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda parts: ask(both, *parts), asked))
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == expected


def test_decisions_see_images_of_the_input_and_of_questions(server: Any, folder: Path) -> None:
    """Other pictures give other probabilities, the same ones the same, here and offline."""

    def input_of(seed: int) -> list[dict[str, Any]]:
        parts = [
            {"type": "input_text", "text": "A picture:"},
            {"type": "input_image", "image_url": data_url(png(seed))},
        ]
        return [{"role": "user", "content": parts}]

    def decide(seed: int, asked: int) -> dict[str, Any]:
        image = {"type": "input_image", "image_url": data_url(png(asked))}
        seen = [{"type": "input_text", "text": "It shows this:"}, image]
        questions = [{"type": "predicate", "instructions": seen}, {"type": "predicate", "instructions": "It is dark."}]
        body = {"model": "tiny", "input": input_of(seed), "questions": questions}
        found = httpx.post(f"{server.url}/v1/decisions", json=body, timeout=60)
        offline = llm.decide(body["input"], questions, min_mass=0)
        answers = found.json()["answers"]
        for one, other in zip(answers, offline.answers, strict=True):
            assert one["type"] == other.type
            assert one.get("probability") == pytest.approx(getattr(other, "probability", None), abs=1e-6)
        return found.json()

    llm = LLM(str(folder), dtype="float32", max_model_len=512)
    first, again, other, asked = decide(1, 2), decide(1, 2), decide(3, 2), decide(1, 3)
    assert again["answers"] == first["answers"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 2 * TOKENS
    assert other["answers"] != first["answers"] and other["answers"][1] != first["answers"][1]
    assert asked["answers"][0] != first["answers"][0] and asked["answers"][1] == first["answers"][1]
