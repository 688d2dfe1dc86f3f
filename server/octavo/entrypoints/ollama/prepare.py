"""From Ollama's requests to the engine's words, and from its answers to Ollama's. Pure."""

from __future__ import annotations

import json
from typing import Any

from octavo.chat.answer import CallDelta
from octavo.chat.messages import Conversation, check_messages
from octavo.chat.structured import Constraint, make_constraint
from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.generation.run import TokenLimit
from octavo.entrypoints.ollama.answers import Call, CallFunction
from octavo.entrypoints.ollama.protocol import ChatRequest, GenerateRequest, Options
from octavo.multimodal.items import ImagePart
from octavo.multimodal.pieces import Pieces

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
OPTIONS = {ours: f"options.{name}" for name, ours in _SAMPLING.items()} | {"max_tokens": "options.num_predict"}


def sampling_fields(options: Options) -> dict[str, Any]:
    """Fields of SamplingParams."""
    given = {ours: value for name, ours in _SAMPLING.items() if (value := getattr(options, name)) is not None}
    if given.get("seed") == -1:
        del given["seed"]
    return given


def limit_of(options: Options) -> TokenLimit:
    """The limit of an answer."""
    limit = options.num_predict
    return TokenLimit(None if limit is None or limit < 1 else limit, "options.num_predict", clamps=True)


def constraint_of(form: Any) -> Constraint | None:
    """The constraint that ``format`` names. Raises APIError."""
    if form in (None, ""):
        return None
    if form == "json":
        constraint = make_constraint("format", json_object=True)
    elif isinstance(form, dict):
        constraint = make_constraint("format", json=json.dumps(form))
        constraint.lenient = True
    else:
        raise bad_request(f'format must be "json" or a JSON schema, got {shown(form)}', "format")
    constraint.allows_calls = True
    return constraint


def chat_conversation(body: ChatRequest) -> Conversation:
    """The conversation of /api/chat. Raises APIError naming the message."""
    messages = check_messages(openai_messages(body.messages or []))
    return _with_think(Conversation(messages, body.tools), body.think)


def generate_conversation(body: GenerateRequest) -> Conversation:
    """The conversation that /api/generate stands for: a system prompt and a message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    asked = _with_images(body.prompt, body.images, "images") if body.images else body.prompt or ""
    messages = check_messages([*system, {"role": "user", "content": asked}])
    return _with_think(Conversation(messages, earlier_ids=body.context or []), body.think)


def _with_think(conversation: Conversation, think: bool | str | None) -> Conversation:
    if think is not None:  # the words that templates have for it
        wanted = think is not False and think != "none"
        conversation.chat_template_kwargs = {"enable_thinking": wanted, "thinking": wanted}
    if isinstance(think, str):
        conversation.reasoning_effort = think
    return conversation


def openai_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form. Calls and their results are numbered, since Ollama's need no ids: a result is that of
    the first call of its name which has none yet, else of the first call. Raises APIError naming the message."""
    waiting: list[tuple[str, Any]] = []  # ids and names of calls without results
    found = []
    for at, message in enumerate(messages):
        where = f"messages.{at}"
        known = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
        for key in ("thinking", "tool_name"):
            if not isinstance(message.get(key), str | None):
                raise bad_request(f"{where}.{key} must be a string, got {shown(message[key])}", f"{where}.{key}")
        if thinking := message.get("thinking"):
            known["reasoning_content"] = thinking
        if isinstance(calls := message.get("tool_calls"), list):
            known["tool_calls"] = [_call(call, f"call{at:04}{i:01}", waiting) for i, call in enumerate(calls)]
        if message.get("role") == "tool":
            name = message.get("tool_name", message.get("name"))
            known |= {"name": name} if name is not None else {}
            known["tool_call_id"] = message.get("tool_call_id") or _take(waiting, name)
        if images := message.get("images"):
            known["content"] = _with_images(message.get("content"), images, f"{where}.images")
        found.append(known)
    return found


def _with_images(content: Any, images: Any, where: str) -> Any:
    """A message's content with its images, which come first. Raises APIError naming the one that is no text."""
    if not isinstance(images, list):
        raise bad_request(f"{where} must be a list of images in base64, got {shown(images)}", where)
    parts: list[Any] = []
    for at, image in enumerate(images):
        if not isinstance(image, str | Pieces):
            raise bad_request(f"{where}.{at} must be an image in base64, got {shown(image)}", f"{where}.{at}")
        parts.append(ImagePart(f"{where}.{at}", image, is_base64=True))
    return [*parts, content] if content else parts


def _call(call: Any, number: str, waiting: list[tuple[str, Any]]) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call  # refused by check_messages
    given = call.get("id")
    name = call["function"].get("name")
    waiting.append((given if isinstance(given, str) and given else number, name))
    function = {key: value for key, value in call["function"].items() if key != "index"}
    return {"type": "function", **call, "id": waiting[-1][0], "function": function}


def _take(waiting: list[tuple[str, Any]], name: Any) -> str | None:
    at = next((i for i, (_, called) in enumerate(waiting) if called == name), 0)
    return waiting.pop(at)[0] if waiting else None


def whole_calls(deltas: list[CallDelta]) -> list[Call]:
    """The calls that pieces make together, without those that were cut off: their arguments are no object."""
    texts: dict[int, str] = {}
    heads: dict[int, CallDelta] = {}
    for delta in deltas:
        texts[delta.index] = texts.get(delta.index, "") + delta.arguments
        if delta.id is not None:
            heads[delta.index] = delta
    calls: list[Call] = []
    for index, head in sorted(heads.items()):
        try:
            arguments = json.loads(texts[index] or "{}")
        except ValueError:
            continue
        if isinstance(arguments, dict):
            calls.append(Call(head.id or "", CallFunction(head.name or "", arguments, len(calls))))
    return calls
