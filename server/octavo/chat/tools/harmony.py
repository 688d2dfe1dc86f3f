"""Chats with models that speak harmony (gpt-oss): what their templates expect, and the form of constrained answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from octavo.chat.options import AUTO, NONE, ChatOptions
from octavo.chat.structured import CallGrammar, grammar_parts, with_tokens
from octavo.chat.thought_tags import HARMONY
from octavo.chat.tools.choice import knows_tools, own_format
from octavo.chat.tools.parsers.harmony import CALL, RETURN

STOPS = (RETURN, CALL)
_MARKS = ("<|start|>", "<|channel|>final", "<|message|>")
# The templates know low, medium and high: other efforts are the nearest of them.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def speaks_harmony(options: ChatOptions, template: str) -> bool:
    """True if answers are in harmony: if the template is, unless flags name other formats."""
    if options.reasoning_parser not in (None, AUTO, NONE):
        return options.reasoning_parser == HARMONY
    if options.call_format is not None:
        return bool(options.call_format == "openai")
    if all(mark in template for mark in _MARKS):  # the form of whole answers, however the template writes calls
        return True
    if not knows_tools(template):
        return "<|channel|>final" in template
    found = own_format(template) if "<|channel|>" in template else None
    return found is not None and found.parser == "openai"


def nearest_effort(effort: str) -> str:
    """``reasoning_effort`` in the words of harmony."""
    return _EFFORTS.get(effort, effort)


def harmony_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as harmony's templates want them: thoughts as ``thinking``, and a message for each call, followed by
    its result."""
    found, at = [], 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message["role"] != "assistant":
            found.append(message)
            continue
        calls = message.get("tool_calls")
        message = _with_thinking(message, bool(calls))
        if not calls:
            found.append(message)
            continue
        end = at
        while end < len(messages) and messages[end]["role"] in ("tool", "function"):
            end += 1
        found += _one_by_one(message, calls, messages[at:end])
        at = end
    return found


def _with_thinking(message: dict[str, Any], calls: bool) -> dict[str, Any]:
    """Move thoughts, and the content beside calls, into "thinking": beside calls a template takes only one of them."""
    names = ("thinking", "reasoning_content", "reasoning")
    thoughts = [text for name in names if isinstance(text := message.get(name), str) and text][:1]
    kept = {key: value for key, value in message.items() if key not in names}
    if calls:
        thoughts += [kept["content"]] if kept["content"] else []
        kept["content"] = ""
    return {**kept, "thinking": "\n".join(thoughts)} if thoughts else kept


def _one_by_one(
    message: dict[str, Any], calls: list[dict[str, Any]], results: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    found, left = [], list(results)
    plain = {key: value for key, value in message.items() if key != "thinking"}
    for i, call in enumerate(calls):
        found.append({**(plain if i else message), "tool_calls": [call]})
        mine = next(
            (r for r in left if r.get("tool_call_id") is not None and r["tool_call_id"] == call.get("id")), None
        )
        if mine is None and left and left[0].get("tool_call_id") is None:
            mine = left[0]  # results without ids come in the order of the calls
        if mine is not None:
            left.remove(mine)
            found.append(mine)
    return found + left


def harmony_grammar(answer: str | None, calls: CallGrammar | None, token_id: Callable[[str], int | None]) -> str:
    """The grammar of thoughts, perhaps, and then a final message that is an ``answer`` (a grammar) or a call. One of
    both may be None. ``token_id`` gives the id of a text that is one token of the vocabulary, else None."""
    ends, rules, parts = [], "", {}
    if answer is not None:
        ends.append('{<|channel|>} "final" (" "? {<|constrain|>} "json")? {<|message|>} @answer')
        parts["answer"] = answer
    if calls is not None:
        ends.append(calls.rule)
        rules, parts = calls.rules, {**parts, **calls.parts}
    lead = f'start: thoughts? ({" | ".join(ends)})\nthoughts: {{<|channel|>}} "analysis" {{<|message|>}} thinking'
    lead += ' {<|start|>} "assistant"\n'
    if token_id("<|end|>") is None:
        lead += "thinking[suffix={<|end|>}]: /(.|\\n)*/\n"
    else:
        lead += "thinking: /(.|\\n)*/ {<|end|>}\n"
    first = {"lark_grammar": with_tokens(lead + rules, token_id)}
    others = [{**grammar_parts(part)[0], "name": name} for name, part in parts.items()]
    return json.dumps({"grammars": [first, *others]})
