"""What the pages of Ollama and vLLM let a reader type works here, with our names in place of theirs.

The requests are those that docs/api.md of Ollama describes and tests against one model that needs no pull; the programs
follow vLLM's quickstart. The model is the embedded one.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import httpx
import ollama
import openai
import pytest

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.model]

MODEL = "smollm2-135m-instruct"
SKY = "Why is the sky blue?"
ASKED = [{"role": "user", "content": SKY}]
SHORT = {"temperature": 0, "num_predict": 12}
PIXEL = base64.b64encode(b"\x89PNG").decode()
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "A city"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "format"],
        },
    },
}
METRICS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    """Ollama's own."""
    return ollama.Client(url)


def lines(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer as curl's reader sees it: without a content type of JSON."""
    answer = httpx.post(url + path, content=json.dumps({"model": MODEL, **body}), timeout=120)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize(("path", "asked"), [("/api/generate", {"prompt": SKY}), ("/api/chat", {"messages": ASKED})])
def test_answers_of_ollama_come_in_lines_or_whole(url: str, path: str, asked: dict[str, Any]) -> None:
    seeded = {**SHORT, "seed": 2**53}
    *pieces, last = lines(url, path, {**asked, "options": seeded})
    (whole,) = lines(url, path, {**asked, "options": seeded, "stream": False})

    def text(answer: dict[str, Any]) -> str:
        return answer["response"] if path == "/api/generate" else answer["message"]["content"]

    assert len(pieces) > 5 and text(last) == "" and "".join(map(text, pieces)) == text(whole) != ""
    assert all(one["model"] == MODEL and one["created_at"] and one["done"] is False for one in pieces)
    for final in (last, whole):
        assert final["done"] is True and final["done_reason"] == "length"
        assert all(final[name] > 0 for name in METRICS)
        assert ("context" in final) == (path == "/api/generate")


def test_a_chat_of_ollama_goes_on_from_its_history(client: ollama.Client) -> None:
    first = client.chat(MODEL, ASKED, options=SHORT)
    turn = [*ASKED, first.message, {"role": "user", "content": "Name the capital of France."}]
    assert "Paris" in (client.chat(MODEL, turn, options=SHORT).message.content or "")
    call = {"function": {"name": "get_current_weather", "arguments": {"location": "Paris", "format": "celsius"}}}
    told = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_current_weather", "content": "22 degrees"},
    ]
    assert client.chat(MODEL, told, tools=[WEATHER], options=SHORT).message.content
    tight = first.prompt_eval_count + 5  # which only the last message fits
    cut = client.chat(MODEL, [*ASKED, first.message, *ASKED], options={**SHORT, "num_ctx": tight})
    assert cut.prompt_eval_count == first.prompt_eval_count


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_forms_of_ollama_hold(client: ollama.Client, stream: bool, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 29, "num_predict": 96}
    prompt = "She is 22 years old and busy. Respond using JSON"
    answers = client.generate(
        MODEL, prompt, format=PERSON, think=False, logprobs=True, top_logprobs=20, options=options, stream=stream
    )
    found = list(answers) if stream else [answers]
    person = json.loads("".join(one.response for one in found))
    assert isinstance(person["age"], int) and isinstance(person["available"], bool) and len(person) == 2
    entries = [entry for one in found for entry in one.logprobs or []]
    assert entries and all(math.isfinite(top.logprob) for entry in entries for top in [entry, *entry.top_logprobs])
    chat = client.chat(MODEL, [{"role": "user", "content": prompt}], format=PERSON, options=options)
    assert json.loads(chat.message.content or "").keys() == person.keys()


def test_raw_prompts_json_and_context_of_ollama(client: ollama.Client) -> None:
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=SHORT)
    assert "Paris" in raw.response and raw.context is None
    told = client.generate(MODEL, "Describe the sky. Respond using JSON", format="json", options={"num_predict": 200})
    assert told.response.lstrip().startswith("{")
    first = client.generate(MODEL, "My name is Ada.", system="Be brief.", options=SHORT)
    again = client.generate(MODEL, "What is my name?", context=first.context, options=SHORT)
    assert again.context is not None and again.context[: len(first.context)] == first.context and again.response
    every = {
        "num_keep": 5,
        "seed": 42,
        "num_predict": 8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 1.0,
        "temperature": 0.8,
        "repeat_penalty": 1.2,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "mirostat": 0,
        "mirostat_tau": 0.8,
        "mirostat_eta": 0.6,
        "penalize_newline": True,
        "stop": ["\n", "user:"],
        "numa": False,
        "num_ctx": 1024,
        "num_batch": 2,
        "num_gpu": 1,
        "main_gpu": 0,
        "low_vram": False,
        "vocab_only": False,
        "use_mmap": True,
        "use_mlock": False,
        "num_thread": 8,
    }
    assert client.generate(MODEL, SKY, options=every).done
    empty: dict[str, Any] = {"suffix": "", "template": "", "system": "", "images": []}  # as clients send what is unset
    assert client.generate(MODEL, SKY, options=SHORT, **empty).response


def test_loading_and_unloading_of_ollama_are_answered(url: str, client: ollama.Client) -> None:
    for path, nothing in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        for keep, reason in (({}, "load"), ({"keep_alive": 0}, "unload"), ({"keep_alive": "5m"}, "load")):
            (answer,) = lines(url, path, {**nothing, **keep})
            assert answer["done"] and answer["done_reason"] == reason
    (running,) = client.ps().models
    assert running.model == f"{MODEL}:latest" and running.size and running.expires_at and running.digest


def test_models_of_ollama_are_described(url: str, client: ollama.Client) -> None:
    for path in ("/", "/api/version", "/api/tags"):
        assert httpx.head(url + path).status_code == httpx.get(url + path).status_code == 200
    (listed,) = client.list().models
    assert listed.modified_at and listed.size and listed.digest
    details = client.show(listed.model or "")
    for described in (listed.details, details.details):
        assert described and described.format == "gguf" and described.family == "llama"
        assert described.parameter_size == "135M" and described.quantization_level == "Q4_1"
    assert details.license and details.modelfile and details.parameters and details.template and details.modified_at
    assert details.modelinfo and details.modelinfo["general.architecture"] == "llama"
    body = {"model": MODEL, "verbose": True}
    assert len(httpx.post(url + "/api/show", json=body).json()["model_info"]["tokenizer.ggml.tokens"]) == 49152


def test_vectors_of_ollama(client: ollama.Client) -> None:
    one = client.embed(MODEL, SKY)
    three = client.embed(MODEL, [SKY, "Why is the grass green?", SKY])
    assert three.embeddings[0] == pytest.approx(one.embeddings[0], abs=1e-5) and len(three.embeddings) == 3
    assert math.hypot(*one.embeddings[0]) == pytest.approx(1, abs=1e-5)
    assert client.embed(MODEL, ["test"] * 3).prompt_eval_count == 3 * client.embed(MODEL, "test").prompt_eval_count
    assert client.embed(MODEL, "word " * 100, truncate=True, options={"num_ctx": 50}).prompt_eval_count == 50
    assert client.embed(MODEL, ["a", "long " * 100], options={"num_ctx": 30}).prompt_eval_count <= 60
    assert len(client.embeddings(MODEL, "An article about llamas").embedding) == len(one.embeddings[0])


REFUSED: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", "generate", {"prompt": "def f(a):", "suffix": "    return a"}, 400, "suffix"),
    ("POST", "generate", {"prompt": "What is in it?", "images": [PIXEL]}, 400, "images"),
    ("POST", "chat", {"messages": [{**ASKED[0], "images": [PIXEL]}]}, 400, "messages.0.images"),
    ("POST", "chat", {"messages": ASKED, "think": True}, 400, "think"),
    ("POST", "chat", {"messages": ASKED, "options": {"mirostat": 1}}, 400, "options.mirostat"),
    ("POST", "chat", {"messages": ASKED, "options": {"typical_p": 0.7}}, 400, "options.typical_p"),
    ("POST", "generate", {"prompt": "x", "model": "llama3.2"}, 404, "'llama3.2'"),
    ("POST", "embed", {"input": "word " * 100, "truncate": False, "options": {"num_ctx": 10}}, 400, "options.num_ctx"),
    ("POST", "embed", {"input": "x", "dimensions": 16}, 400, "dimensions"),
    ("POST", "create", {"model": "mario", "from": MODEL, "system": "You are Mario."}, 501, "create"),
    ("POST", "copy", {"source": MODEL, "destination": "backup"}, 501, "copy"),
    ("DELETE", "delete", {}, 501, "octavo rm"),
    ("POST", "pull", {"stream": False}, 501, "octavo pull"),
    ("POST", "push", {"model": "me/model:latest"}, 501, "push"),
    ("HEAD", f"blobs/sha256:{'0' * 64}", {}, 404, ""),
]


@pytest.mark.parametrize(("method", "route", "body", "status", "word"), REFUSED)
def test_missing_features_of_ollama_are_refused(
    url: str, method: str, route: str, body: dict[str, Any], status: int, word: str
) -> None:
    content = json.dumps({"model": MODEL, **body})
    answer = httpx.request(method, f"{url}/api/{route}", content=content, timeout=60)
    assert answer.status_code == status
    if method != "HEAD":
        assert list(answer.json()) == ["error"] and word in answer.json()["error"]


def test_offline_programs_of_vllm() -> None:
    prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
    sampled = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(
        model=MODEL,
        tensor_parallel_size=1,
        trust_remote_code=False,
        dtype="auto",
        gpu_memory_utilization=0.2,
        max_model_len=512,
        enforce_eager=True,
        seed=0,
        generation_config="vllm",
    )
    for output, prompt in zip(llm.generate(prompts, sampled), prompts, strict=True):
        assert output.prompt == prompt and output.outputs[0].text and len(output.outputs[0].token_ids) <= 16
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = llm.get_tokenizer().apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    said = [output.outputs[0].text for output in llm.generate(texts, greedy)]
    assert [output.outputs[0].text for output in llm.chat(chats, greedy)] == said


def test_requests_of_vllm(url: str) -> None:
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
    body = {"model": MODEL, "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    client = openai.OpenAI(api_key="EMPTY", base_url=f"{url}/v1")
    assert answer["usage"]["completion_tokens"] == 7
    same = client.completions.create(model=MODEL, prompt="San Francisco is a", max_tokens=7, temperature=0)
    assert same.choices[0].text == answer["choices"][0]["text"]
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Tell a joke."},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 40}  # or a small model may ramble for minutes
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]["content"]
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True, max_tokens=40)
    assert any(chunk.choices[0].delta.content for chunk in stream)
