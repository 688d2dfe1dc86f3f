"""Agents of Python frameworks at work with a reciting model: `python frameworks.py URL AGENT LOOP`, in an environment
that has the packages of frameworks.txt and none of ours. Each is as it comes, told address, key and model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from loops import ERROR, LOOPS, MODEL, QUIETLY, SYSTEM, Loop, key, results

os.environ |= {"HF_HUB_OFFLINE": "1", "OTEL_SDK_DISABLED": "true", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
BLOCK = 16  # tokens; one that is not full is not kept


@dataclass
class Told:
    """What a framework says of a loop: calls as (name, arguments), ids of calls and of their results, thoughts and
    (prompt, cached, answer) in tokens a request; None where it does not tell."""

    answer: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    called: list[str] | None = None
    answered: list[str] | None = None
    thoughts: list[str] | None = None
    usages: list[tuple[int, int, int]] | None = None
    keeps_thoughts: bool = False  # it sends them back
    rewrites: bool = False  # it tells the model of its calls in words of its own


AGENTS: dict[str, Callable[[str, Loop], Told]] = {}
RUN: list[tuple[str, dict[str, Any]]] = []  # what the tools were called with
quietly = False


def agent(run: Callable[[str, Loop], Told]) -> Callable[[str, Loop], Told]:
    AGENTS[run.__name__] = run
    return run


def fetch(name: str, arguments: dict[str, Any]) -> str:
    RUN.append((name, arguments))
    result = results(quietly)[key(name, arguments)]
    if result is None:
        raise LookupError(ERROR)
    return result


def look(page: str) -> str:
    """Read a page.

    Args:
        page: which one
    """
    return fetch("look", {"page": page})


def count(word: str, times: int) -> str:
    """Count a word.

    Args:
        word: the word to count
        times: how often to count
    """
    return fetch("count", {"word": word, "times": times})


def _openai_agents(responses: bool, url: str, loop: Loop) -> Told:
    import agents
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    tools: Any = [agents.function_tool(look), agents.function_tool(count)]
    made = agents.Agent(
        name="reader",
        instructions=SYSTEM,
        model=kind(model=MODEL, openai_client=client),
        tools=tools,
        model_settings=agents.ModelSettings(temperature=0, include_usage=True),
    )

    async def run() -> Any:
        if responses:
            return await agents.Runner.run(made, loop.question, max_turns=20)
        streamed = agents.Runner.run_streamed(made, loop.question, max_turns=20)
        async for _ in streamed.stream_events():
            pass
        return streamed

    done = asyncio.run(run())
    calls = [item.raw_item for item in done.new_items if item.type == "tool_call_item"]
    outputs = [item.raw_item for item in done.new_items if item.type == "tool_call_output_item"]
    thoughts = [item.raw_item for item in done.new_items if item.type == "reasoning_item"]
    usages = [answer.usage for answer in done.raw_responses]
    return Told(
        done.final_output,
        [(made.name, json.loads(made.arguments)) for made in calls],
        [made.call_id for made in calls],
        [output["call_id"] for output in outputs],
        ["".join(part.text for part in [*item.summary, *(item.content or [])][:1]) for item in thoughts],
        [(used.input_tokens, used.input_tokens_details.cached_tokens, used.output_tokens) for used in usages],
        keeps_thoughts=responses,
    )


@agent
def openai_agents_responses(url: str, loop: Loop) -> Told:
    return _openai_agents(True, url, loop)


@agent
def openai_agents_chat(url: str, loop: Loop) -> Told:
    return _openai_agents(False, url, loop)


def _pydantic_ai(model: Any, loop: Loop) -> Told:
    from pydantic_ai import Agent, ModelRetry

    def retried(name: str, arguments: dict[str, Any]) -> str:
        try:
            return fetch(name, arguments)
        except LookupError as error:
            raise ModelRetry(str(error)) from error

    made = Agent(model, instructions=SYSTEM, model_settings={"temperature": 0})

    @made.tool_plain(name="look")
    def _(page: str) -> str:
        """Read a page."""
        return retried("look", {"page": page})

    @made.tool_plain(name="count")
    def _(word: str, times: int) -> str:
        """Count a word."""
        return retried("count", {"word": word, "times": times})

    done = made.run_sync(loop.question)
    messages = done.all_messages()
    answers = [message for message in messages if message.kind == "response"]
    said = [part for message in answers for part in message.parts]
    heard = [part for message in messages if message.kind == "request" for part in message.parts]
    calls = [part for part in said if part.part_kind == "tool-call"]
    usages = [answer.usage for answer in answers]
    return Told(
        done.output,
        [(made.tool_name, made.args_as_dict()) for made in calls],
        [made.tool_call_id for made in calls],
        [part.tool_call_id for part in heard if part.part_kind in ("tool-return", "retry-prompt")],
        [
            part.content or "".join((part.provider_details or {})["raw_content"])
            for part in said
            if part.part_kind == "thinking"
        ],
        [(used.input_tokens, used.cache_read_tokens, used.output_tokens) for used in usages],
        keeps_thoughts=True,
    )


@agent
def pydantic_ai_chat(url: str, loop: Loop) -> Told:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return _pydantic_ai(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")), loop)


@agent
def pydantic_ai_responses(url: str, loop: Loop) -> Told:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return _pydantic_ai(model, loop)


@agent
def pydantic_ai_anthropic(url: str, loop: Loop) -> Told:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return _pydantic_ai(AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="none")), loop)


@agent
def smolagents(url: str, loop: Loop) -> Told:
    global quietly
    quietly = True
    from smolagents import ActionStep, OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="none", temperature=0)
    tools = [tool(look), tool(count)]
    made = ToolCallingAgent(tools=tools, model=model, max_steps=20, verbosity_level=0)
    answer = made.run(loop.question + QUIETLY)
    steps = [step for step in made.memory.steps if isinstance(step, ActionStep)]
    said = [step.model_output_message for step in steps if step.model_output_message]
    functions = [call.function for message in said for call in message.raw.choices[0].message.tool_calls]
    *calls, end = [(function.name, json.loads(function.arguments)) for function in functions]
    assert end == ("final_answer", {"answer": loop.answer})
    usages = [message.raw.usage for message in said]
    return Told(
        str(answer),
        calls,
        usages=[
            (used.prompt_tokens, used.prompt_tokens_details.cached_tokens, used.completion_tokens) for used in usages
        ],
        rewrites=True,
    )


def _langgraph(model: Any, loop: Loop) -> Told:
    from langgraph.prebuilt import ToolNode, create_react_agent

    made = create_react_agent(model, ToolNode([look, count], handle_tool_errors=True), prompt=SYSTEM)
    messages = made.invoke({"messages": [("user", loop.question)]}, {"recursion_limit": 50})["messages"]
    answers = [message for message in messages if message.type == "ai"]
    calls = [call for answer in answers for call in answer.tool_calls]
    usages = [answer.usage_metadata for answer in answers]
    return Told(
        messages[-1].text,
        [(made["name"], made["args"]) for made in calls],
        [made["id"] for made in calls],
        [message.tool_call_id for message in messages if message.type == "tool"],
        usages=[
            (used["input_tokens"], used["input_token_details"].get("cache_read", 0), used["output_tokens"])
            for used in usages
        ],
    )


@agent
def langgraph_openai(url: str, loop: Loop) -> Told:
    from langchain_openai import ChatOpenAI

    return _langgraph(ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0), loop)


@agent
def langgraph_openai_responses(url: str, loop: Loop) -> Told:
    from langchain_openai import ChatOpenAI

    shared: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0}
    return _langgraph(ChatOpenAI(**shared, use_responses_api=True), loop)


@agent
def langgraph_anthropic(url: str, loop: Loop) -> Told:
    from langchain_anthropic import ChatAnthropic

    return _langgraph(ChatAnthropic(model=MODEL, base_url=url, api_key="none", temperature=0), loop)


@agent
def qwen_agent(url: str, loop: Loop) -> Told:
    from qwen_agent.agents import FnCallAgent
    from qwen_agent.tools.base import BaseTool

    def offered(made: Callable[..., str], **kinds: str) -> BaseTool:
        class Offered(BaseTool):
            name, description = made.__name__, "Read a page." if made is look else "Count a word."
            parameters: ClassVar = {
                "type": "object",
                "properties": {name: {"type": kind} for name, kind in kinds.items()},
                "required": list(kinds),
            }

            def call(self, params: Any, **_: Any) -> str:
                return made(**json.loads(params))

        return Offered()

    shared = {"model": MODEL, "model_type": "oai", "model_server": f"{url}/v1", "api_key": "none"}
    tools = [offered(look, page="string"), offered(count, word="string", times="integer")]
    settings = {"use_raw_api": True, "temperature": 0}
    made = FnCallAgent(function_list=tools, llm={**shared, "generate_cfg": settings}, system_message=SYSTEM)
    *_, messages = made.run([{"role": "user", "content": loop.question}])
    calls = [message["function_call"] for message in messages if message.get("function_call")]
    return Told(
        messages[-1]["content"],
        [(made["name"], json.loads(made["arguments"])) for made in calls],
        thoughts=[message["reasoning_content"] for message in messages if message.get("reasoning_content")],
    )


@agent
def strands(url: str, loop: Loop) -> Told:
    import strands as sdk
    from strands.models.openai import OpenAIModel

    reached = {"base_url": f"{url}/v1", "api_key": "none"}
    model = OpenAIModel(client_args=reached, model_id=MODEL, params={"temperature": 0})
    tools = [sdk.tool(look), sdk.tool(count)]
    made = sdk.Agent(model=model, tools=tools, system_prompt=SYSTEM, callback_handler=None)
    done = made(loop.question)
    blocks = [block for message in made.messages for block in message["content"]]
    calls = [block["toolUse"] for block in blocks if "toolUse" in block]
    return Told(
        str(done).strip(),
        [(made["name"], made["input"]) for made in calls],
        [made["toolUseId"] for made in calls],
        [block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block],
        [block["reasoningContent"]["reasoningText"]["text"] for block in blocks if "reasoningContent" in block],
    )


def check(loop: Loop, told: Told) -> None:
    """Nothing was lost, and what was computed once was found again."""
    assert told.answer.strip() == loop.answer, told.answer
    assert told.calls == loop.calls, told.calls
    assert sorted(map(str, RUN)) == sorted(map(str, loop.calls)), RUN  # those of a turn run at once
    if told.called is not None and told.answered is not None:
        assert len(set(told.called)) == len(told.called) == len(loop.calls)
        assert sorted(told.answered) == sorted(told.called), (told.called, told.answered)
    if told.thoughts is not None:
        assert [text.strip() for text in told.thoughts] == [turn.thought for turn in loop.turns], told.thoughts
    if told.usages is not None:
        assert len(told.usages) == len(loop.turns)
        for (prompt, _, answer), (longer, cached, _) in pairwise(told.usages):
            known = prompt + (answer if told.keeps_thoughts and not told.rewrites else 0)
            assert longer > cached >= known - BLOCK, told.usages


if __name__ == "__main__":
    address, name, which = sys.argv[1:]
    check(LOOPS[which], AGENTS[name](address, LOOPS[which]))
