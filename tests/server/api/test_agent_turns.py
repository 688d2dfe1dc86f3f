"""A coding agent's conversation, turn by turn, in the shape that Claude Code gives it: what was computed stays in the
cache, also behind a search for tools, and thoughts that the client never sees are in the prompt again."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from support.agent_chats import TEMPLATE
from support.reciting import Recital, small_tokenizer, write_reciting_model
from support.sdk_types import fits, named_events

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = [
    "reads",
    "writes",
    "lists",
    "finds",
    "moves",
    "the",
    "a",
    "file",
    "folder",
    "line",
    "of",
    "in",
    "to",
    "and",
    "or",
    "its",
    "name",
    "text",
    "as",
    "it",
    "was",
    "before",
]
PROSE = " ".join(WORDS[i * 7 % len(WORDS)] for i in range(120)) + "."


def tool(name: str, *texts: str, hint: str = "", deferred: bool = False) -> dict[str, Any]:
    """``hint`` ends the schema as JSON, so that a search that finds the tool can be a cue."""
    properties = {text: {"type": "string", "description": f"the {text} to use"} for text in texts}
    schema = {"type": "object", "properties": properties, "required": [hint or texts[0]]}
    made = {"name": name, "description": f"{name}: {PROSE[: 60 if deferred else None]}", "input_schema": schema}
    return {**made, "defer_loading": True} if deferred else made


OWN = [tool(name, "path", "text") for name in ("Ask", "Bash", "Edit", "Glob", "Grep", "Read", "ToolSearch", "Write")]
CLOCK = tool("Clock", "zone", hint="zone of the clock on the wall", deferred=True)
NOTES = tool("Notes", "title", "body", hint="title of the note as it was", deferred=True)
SPARE = tool("Spare", "part", deferred=True)
LAMP = {**tool("Lamp", "state", deferred=True), "defer_loading": False}
FOUND = {"clock": CLOCK, "notes": NOTES}
SYSTEM = "You help with code in a folder. " + PROSE * 20
CLOSING = "\n</system-reminder>"  # of what is told between messages
ENVIRONMENT = "Folder: /src. Today the user wants the failing test of the parser mended"
PLUGGED = "A server of tools was connected, and one was taken away from here"
HASTE = "Only for the turn that comes now: make it short, nobody has time"
# Beside such a text: tools that come and go, and how long it is told.
BESIDE: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    PLUGGED: (
        [
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": LAMP}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Glob"}},
        ],
        {},
    ),
    HASTE: (
        [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Spare"}}],
        {"clear_at": "next_user_message", "output_config": {"effort": "low"}},
    ),
}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USER_ID = json.dumps({"device_id": "b4", "account_uuid": "", "session_id": "fe"})
BETAS = ("claude-code-20250219", "context-management-2025-06-27", "mid-conversation-tool-changes-2026-07-01")


def call(name: str, **values: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


# Many calls before the last search: each reads another file.
NAMES = [f"{first}{second}" for first in ("north", "south", "east", "west", "up") for second in "abcdef"]
Turn = tuple[str, str, str, list[tuple[str, dict[str, str]]]]


def read(name: str) -> str:
    return f"{name} is read to its last line {name}"


READS: list[Turn] = [
    (read(before), f"Next is {name}.", "", [("Read", {"path": f"src/{name}.py"})]) for before, name in pairwise(NAMES)
]
# What ends the prompt of a turn, the thoughts and the text that answer it, and the calls.
TURNS: list[Turn] = [
    (f"{ENVIRONMENT}{CLOSING}", "First I look.", "Let me look.", [("Bash", {"path": "ls -la"})]),
    ("src tests, that is all of the folder", "Two folders, é.", "Two of them.", [("Read", {"path": "src/a.py"})]),
    ("return 1, the end of the first file", "I need a clock.", "I search.", [("ToolSearch", {"path": "clock"})]),
    ('zone of the clock on the wall"]}}\n</tools>', "Now I can ask it.", "It is there.", [("Clock", {"zone": "Z"})]),
    ("noon in the zone that was asked for", "At noon, so.", "", [("Edit", {"path": "a.py", "text": "x = 1\ny = 2"})]),
    ("edited one line of the first file", "Run it.", "I run it.", [("Bash", {"path": "t"}), ("Grep", {"path": "u"})]),
    ("one test of nine has failed again", "Not yet.", "Once more.", [("Edit", {"path": "b.py", "text": '<b> & "c"'})]),
    ("edited two lines of the other file", "And again.", "Again.", [("Bash", {"path": "pytest -q"})]),
    ("all nine tests have passed this time", "Next is the first.", "", [("Read", {"path": f"src/{NAMES[0]}.py"})]),
    *READS,
    (f"{PLUGGED}{CLOSING}", "A lamp!", "I light it.", [("Lamp", {"state": "on"})]),
    (f"{HASTE}{CLOSING}", "Be quick.", "Quickly, then.", [("Spare", {"part": "é"})]),
    ("the part of the lamp was changed as it was told", "Note it.", "A note.", [("ToolSearch", {"path": "notes"})]),
    ('title of the note as it was"]}}\n</tools>', "Write it.", "So.", [("Notes", {"title": "ok", "body": "日本\n語"})]),
    ("the note was written to the last page", "Done.", "The test passes again.", []),
    ("and what did the clock say, please tell", "It said noon.", "Noon, in zone Z.", []),
]


def spoken(thought: str, text: str, calls: list[tuple[str, dict[str, str]]]) -> str:
    """As the template writes it behind `<think>`."""
    return f"{thought}\n</think>\n\n{text}" + "".join("\n\n" + call(name, **values) for name, values in calls)


SEARCH = ("please find a tool that knows the time", "Which tool?", "", [("tool_search", {"query": "time é"})])
WOUND = ('hands of the clock as they are"]}}\n</tools>', "That one.", "", [("Hands", {"hand": "short"})])
SCRIPTS = {cue: spoken(*said) for cue, *said in [*TURNS, SEARCH, WOUND]}
FLAGS = (
    "--served-model-name",
    "reciting",
    "--kv-cache-memory-bytes",
    "256MiB",
    "--max-model-len",
    "32768",
)


SPECIAL = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def reciting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reciting") / "model"
    texts = [*SCRIPTS, *SCRIPTS.values(), *WORDS, SYSTEM, str(OWN)]
    write_reciting_model(folder, small_tokenizer(texts, SPECIAL, MARKS), Recital(SCRIPTS, TEMPLATE, "<|im_end|>"))
    return folder


@pytest.fixture(scope="module")
def server(start, reciting):
    return start(*FLAGS, model=reciting)


class Agent:
    """Asks as the client does, and answers calls with what the next turn is about."""

    def __init__(self, server: Any) -> None:
        self.client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        self.tools = [*OWN, SPARE]
        first = {"role": "user", "content": [{"type": "text", "text": "Mend the failing test."}]}
        told = {"role": "system", "content": [{"type": "text", "text": ENVIRONMENT}]}
        self.messages: list[dict[str, Any]] = [first, told]

    def request(self, turn: int) -> dict[str, Any]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=sdk-cli; cch={turn}a;"
        told = [{"type": "text", "text": text, **EPHEMERAL} for text in ("You are an agent.", SYSTEM)]
        *earlier, last = self.messages
        *blocks, end = last["content"]
        return {
            "model": "reciting",
            "system": [{"type": "text", "text": billing}, *told],
            "messages": [*earlier, {**last, "content": [*blocks, {**end, **EPHEMERAL}]}],
            "tools": self.tools,
            "thinking": {"type": "adaptive", "display": "omitted"},
        }

    def ask(self, turn: int) -> Any:
        with self.client.beta.messages.stream(
            **self.request(turn),
            max_tokens=32_000,
            metadata={"user_id": USER_ID},
            betas=BETAS,
            extra_headers={"x-claude-code-session-id": "fe", "x-app": "cli"},
            extra_body={
                "output_config": {"effort": "high"},
                "temperature": 0,
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            },
        ) as stream:
            return stream.get_final_message()

    def go_on(self, answer: Any, ending: str) -> None:
        """Send the answer back as it came, and results, of which the last ends with the next turn's cue; or the cue is
        told behind them."""
        told = ending.removesuffix(CLOSING)
        if told != ending:
            blocks, how = BESIDE[told]
            self.go_on(answer, "so it is")
            self.messages.append({"role": "system", "content": [*blocks, {"type": "text", "text": told}], **how})
            return
        blocks = [block.to_dict() for block in answer.content]
        self.messages.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        results: list[dict[str, Any]] = [{"type": "text", "text": f"Good; {ending}"}] if not calls else []
        for at, made in enumerate(calls):
            content: Any = f"{PROSE[:80]}: {ending}" if at == len(calls) - 1 else PROSE[:40]
            if made["name"] == "ToolSearch":
                found = FOUND[made["input"]["path"]]
                self.tools = sorted([*self.tools, found], key=lambda known: known["name"])
                content = [{"type": "tool_reference", "tool_name": found["name"]}]
            results.append({"type": "tool_result", "tool_use_id": made["id"], "content": content})
        self.messages.append({"role": "user", "content": results})


BLOCK = 16


def run(agent: Agent, turns: int = len(TURNS)) -> list[Any]:
    """The usage of each turn; every answer is checked."""
    found = []
    for turn, (_, _, text, calls) in enumerate(TURNS[:turns]):
        answer = agent.ask(turn)
        thoughts, *rest = [block.to_dict() for block in answer.content]
        assert (thoughts["type"], thoughts["thinking"]) == ("thinking", "") and thoughts["signature"]
        said = [block["text"].strip() for block in rest if block["type"] == "text"]
        assert said == ([text] if text else []), f"turn {turn}"
        assert [(block["name"], block["input"]) for block in rest if block["type"] == "tool_use"] == calls
        found.append(answer.usage)
        if turn + 1 < len(TURNS):
            agent.go_on(answer, TURNS[turn + 1][0])
    return found


def test_a_conversation_stays_in_the_cache_also_behind_a_search_for_tools(server):
    agent = Agent(server)
    usages = run(agent)
    assert sum(len(calls) for *_, calls in TURNS) >= 40
    for (before, used), (cue, *_) in zip(pairwise(usages), TURNS, strict=False):
        assert used.cache_read_input_tokens / prompt_of(used) >= 0.97
        assert used.cache_creation_input_tokens > used.input_tokens, "the last block is to be kept"
        known = prompt_of(before) + before.output_tokens
        if BESIDE.get(cue.removesuffix(CLOSING), ([], {}))[1]:
            known -= before.cache_creation_input_tokens + before.output_tokens  # its text is gone
        assert used.cache_read_input_tokens >= known - BLOCK, "all of the last turn, but for a block that was not full"
    sealed, plain = (agent.client.beta.messages.count_tokens(**asked).input_tokens for asked in both_ways(agent))
    assert sealed == plain, "thoughts of blocks without text are in the prompt"


def prompt_of(usage: Any) -> int:
    return usage.cache_read_input_tokens + usage.cache_creation_input_tokens + usage.input_tokens


def both_ways(agent: Agent) -> list[dict[str, Any]]:
    """A request with thoughts as they came, sealed, and one with their text."""
    asked, thoughts = agent.request(0), iter(TURNS)
    shown = json.loads(json.dumps(asked))
    for message in shown["messages"]:
        if message["role"] == "assistant":
            message["content"][0] = {"type": "thinking", "thinking": next(thoughts)[1], "signature": "EqQB"}
    return [asked, shown]


def test_deferred_tools_may_stand_at_the_top_and_replicas_open_each_others_seals(server, start, reciting):
    agent = Agent(server)
    run(agent, 4)
    other = Agent(start(*FLAGS, "--deferred-tools", "top", model=reciting))
    first, *_ = run(other, 3)
    behind = other.ask(3).usage
    assert behind.cache_read_input_tokens < prompt_of(first) / 2, "the list of tools is another"
    other.messages, other.tools = agent.messages, agent.tools
    sealed, plain = (other.client.beta.messages.count_tokens(**asked).input_tokens for asked in both_ways(other))
    assert sealed == plain


def function(name: str, text: str, hint: str = "") -> dict[str, Any]:
    schema = {"type": "object", "properties": {text: {"type": "string"}}, "required": [hint or text]}
    return {"type": "function", "name": name, "description": f"{name}: {PROSE}", "parameters": schema, "strict": False}


def test_a_search_that_the_client_of_responses_runs(server):
    """Its call and its result are items of their own; what it found is told of behind all that was computed."""
    query = {"type": "object", "properties": {"query": {"type": "string"}}}
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": query}
    body: dict[str, Any] = {"tools": [function("Write", "text"), search], "temperature": 0, "store": False}
    body |= {"instructions": SYSTEM, "include": ["reasoning.encrypted_content"], "max_output_tokens": 200}
    items: list[dict[str, Any]] = [{"role": "user", "content": SEARCH[0]}]
    first = fits(Response, server.post("/v1/responses", {**body, "input": items}).text)
    made = next(item for item in first.output if item.type == "tool_search_call")
    assert (made.arguments, made.execution, made.status) == ({"query": "time é"}, "client", "completed")
    events = named_events(server.url + "/v1/responses", {**body, "input": items})
    for _, data in events:
        fits(ResponseStreamEvent, data)
    (streamed,) = [json.loads(data)["item"] for name, data in events if name == "response.output_item.done"][1:]
    assert streamed["type"] == "tool_search_call" and streamed["arguments"] == made.arguments
    hands = function("Hands", "hand", hint="hands of the clock as they are")
    found = {"type": "tool_search_output", "call_id": made.call_id, "execution": "client", "tools": [hands]}
    said = [item.to_dict() for item in first.output]
    for item in said:
        if item["type"] == "reasoning":
            item["content"], item["summary"] = None, []  # the client keeps what is sealed alone
    items += [*said, {**found, "status": "completed"}]
    second = fits(Response, server.post("/v1/responses", {**body, "input": items}).text)
    assert [(item.name, item.arguments) for item in second.output if item.type == "function_call"] == [
        ("Hands", '{"hand": "short"}')
    ]
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - BLOCK
