"""What clients of Python do with a server of the scripted model: `python cases.py URL CASE`, in an environment that has
the packages of requirements.txt and none of ours. Each is as it comes: no option but address, key and model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HF_HUB_OFFLINE"] = "1"

MODEL = "scripted"
PLAIN, REASON = "One two STOP three", "It is so é 日."
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
FUNCTION = {"name": "now", "description": "The time.", "parameters": ZONE}
TOOL = {"type": "function", "function": FUNCTION}
PLACE = {
    "title": "Place",
    "description": "A place.",
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
}
CASES: dict[str, Callable[[str], None]] = {}


def case(check: Callable[[str], None]) -> Callable[[str], None]:
    CASES[check.__name__] = check
    return check


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def place() -> Any:
    from pydantic import BaseModel

    class Place(BaseModel):
        """A place."""

        open: bool

    return Place


def now(zone: str) -> str:
    """The time."""
    return "[plain]"


@case
def openai(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    chat: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 60}
    with client.chat.completions.stream(**chat, messages=say("[call]"), tools=[TOOL]) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"zone": "UTC"}
    parsed = client.chat.completions.parse(**chat, messages=say("x"), response_format=place())
    assert parsed.choices[0].message.parsed is not None
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    tool: Any = {"type": "function", **FUNCTION, "strict": True}
    with client.responses.stream(**asked, input="[call]", tools=[tool]) as events:
        snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
        assert events.get_final_response().output[-1].arguments == snapshots[-1] == '{"zone": "UTC"}'
    assert client.responses.parse(**asked, input="x", text_format=place()).output_parsed is not None
    assert client.responses.create(**asked, input="[reason]").output_text == REASON


@case
def anthropic(url: str) -> None:
    from anthropic import Anthropic, beta_tool

    client = Anthropic(base_url=url, api_key="none")
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
    with client.messages.stream(
        **asked, messages=say("[call]"), tools=[{"name": "now", "input_schema": ZONE}]
    ) as stream:
        assert stream.get_final_message().content[-1].input == {"zone": "UTC"}
    assert client.messages.parse(**asked, messages=say("x"), output_format=place()).parsed_output is not None
    assert client.messages.count_tokens(model=MODEL, messages=say("x")).input_tokens
    runner = client.beta.messages.tool_runner(**asked, messages=say("[call]"), tools=[beta_tool(now)])
    assert runner.until_done().content[0].text == PLAIN


@case
def ollama(url: str) -> None:
    from ollama import Client

    client, options = Client(url), {"temperature": 0, "num_predict": 60}
    assert client.list().models and client.ps().models and client.show(MODEL).capabilities
    assert client.chat(MODEL, say("[plain]"), options=options).message.content == PLAIN
    lines = client.chat(MODEL, say("[plain]"), options=options, stream=True)
    assert "".join(line.message.content or "" for line in lines) == PLAIN
    (call,) = client.chat(MODEL, say("[call]"), options=options, tools=[now]).message.tool_calls or []
    assert call.function.arguments == {"zone": "UTC"}
    form = client.chat(MODEL, say("x"), options=options, format=PLACE, think=False).message.content
    assert isinstance(json.loads(form or "")["open"], bool)
    assert client.generate(MODEL, "[plain]", options=options).response == PLAIN
    assert len(client.embed(MODEL, ["a", "b"]).embeddings) == 2


@case
def cohere(url: str) -> None:
    from cohere import ClientV2

    client = ClientV2(base_url=url, api_key="none")
    asked: dict[str, Any] = {"model": MODEL, "texts": ["a", "b"], "input_type": "search_document"}
    answer = client.embed(**asked, embedding_types=["float", "base64"])
    assert len(answer.embeddings.float_ or []) == len(answer.embeddings.base64 or []) == 2
    assert answer.response_type == "embeddings_by_type" and answer.texts == ["a", "b"]
    assert answer.meta is not None and answer.meta.billed_units is not None and answer.meta.billed_units.input_tokens


def _langchain(model: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    assert model.invoke("[plain]").text == PLAIN
    assert "".join(chunk.text for chunk in model.stream("[plain]")) == PLAIN
    bound = model.bind_tools([TOOL])
    answer = bound.invoke("[call]")
    assert answer.tool_calls[0]["args"] == {"zone": "UTC"}
    total = None
    for chunk in bound.stream("[call]"):
        total = chunk if total is None else total + chunk
    assert total.tool_calls[0]["args"] == {"zone": "UTC"}
    result = ToolMessage("12", tool_call_id=answer.tool_calls[0]["id"])
    history = [HumanMessage("[call]"), answer, result, HumanMessage("[plain]")]
    assert bound.invoke(history).text == PLAIN
    assert isinstance(model.with_structured_output(place()).invoke("x").open, bool)


@case
def langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI

    shared: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0}
    _langchain(ChatOpenAI(**shared, max_tokens=60))
    _langchain(ChatOpenAI(**shared, max_tokens=60, use_responses_api=True))


@case
def langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage

    model = ChatAnthropic(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=60)
    _langchain(model)
    assert model.get_num_tokens_from_messages([HumanMessage("hi")]) > 0


@case
def langchain_ollama(url: str) -> None:
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    _langchain(ChatOllama(model=MODEL, base_url=url, temperature=0, num_predict=60))
    assert len(OllamaEmbeddings(model=MODEL, base_url=url).embed_documents(["a", "b"])) == 2


def _llama_index(llm: Any) -> None:
    from llama_index.core import PromptTemplate
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    assert llm.chat([ChatMessage(role="user", content="[plain]")]).message.content == PLAIN
    assert list(llm.stream_complete("[plain]"))[-1].text == PLAIN
    answer = llm.chat_with_tools([FunctionTool.from_defaults(now)], user_msg="[call]")
    assert llm.get_tool_calls_from_response(answer)[0].tool_kwargs == {"zone": "UTC"}
    assert isinstance(llm.structured_predict(place(), PromptTemplate("x")).open, bool)


@case
def llama_index_openai_like(url: str) -> None:
    from llama_index.llms.openai_like import OpenAILike

    flags: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True}
    _llama_index(OpenAILike(MODEL, api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=60, **flags))


@case
def llama_index_ollama(url: str) -> None:
    from llama_index.llms.ollama import Ollama

    _llama_index(Ollama(MODEL, base_url=url, temperature=0, additional_kwargs={"num_predict": 60}))


@case
def litellm(url: str) -> None:
    import asyncio

    import litellm as lite

    shared: dict[str, Any] = {"api_key": "none", "temperature": 0, "max_tokens": 120}  # a form is a call to Anthropic
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url), ("ollama_chat", url)):
        asked = {**shared, "model": f"{provider}/{MODEL}", "api_base": base}
        assert lite.completion(**asked, messages=say("[plain]")).choices[0].message.content == PLAIN
        chunks = lite.completion(**asked, messages=say("[plain]"), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PLAIN
        (call,) = lite.completion(**asked, messages=say("[call]"), tools=[TOOL]).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"zone": "UTC"}
        content = lite.completion(**asked, messages=say("x"), response_format=form).choices[0].message.content
        assert isinstance(json.loads(content)["open"], bool), content
    answer = lite.responses(
        model=f"openai/{MODEL}", input="[plain]", api_base=f"{url}/v1", api_key="none", temperature=0
    )
    assert answer.output[-1].content[0].text == PLAIN
    message = lite.anthropic_messages(
        model=f"anthropic/{MODEL}", messages=say("[plain]"), max_tokens=60, api_base=url, api_key="none"
    )
    assert asyncio.run(message)["content"]


if __name__ == "__main__":
    CASES[sys.argv[2]](sys.argv[1])
