"""State that outlives its server: responses after kill -9, through the SDK of OpenAI."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import openai
import pytest
from support.reciting import Recital, small_tokenizer, write_reciting_model

CUES = {"the first question": "An answer to remember: é日.", "the second question": "Another one, which follows."}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def reciting(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reciting") / "model"
    backend = small_tokenizer(["question answer"], ["<|im_start|>", "<|im_end|>"])
    write_reciting_model(folder, backend, Recital(CUES, TEMPLATE, "<|im_end|>"))
    return folder


@pytest.fixture(scope="module")
def serve(start, reciting):
    """Start a server on a file of its own or a given one."""

    def serve(path: Path | str, *flags: str):
        names = ("--served-model-name", "reciting", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "2048")
        return start(*names, "--responses-store", str(path), *flags, model=reciting)

    return serve


def ask(client: openai.OpenAI, text: str, stream: bool = False, **more):
    """The response; of a stream its last event's."""
    asked = {"model": "reciting", "input": text, "temperature": 0, **more}
    if not stream:
        return client.responses.create(**asked)
    return list(client.responses.create(**asked, stream=True))[-1].response


def test_a_conversation_survives_kill_9(serve, tmp_path: Path) -> None:
    """What a client was told is stored when it is told, whole or in a stream: nothing is between the answer and the
    kill."""
    path = tmp_path / "responses.db"
    server = serve(path)
    first = ask(server.client(), "the first question")
    server.kill()
    assert first.output_text == CUES["the first question"] and first.store
    again = serve(path)
    client = again.client()
    assert client.responses.retrieve(first.id).output_text == first.output_text
    other = ask(client, "the first question").id
    client.responses.delete(other)
    second = ask(client, "the second question", stream=True, previous_response_id=first.id)
    again.kill()
    assert second.output_text == CUES["the second question"]
    client = serve(path).client()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other)
    listed = client.responses.input_items.list(second.id, order="asc").data
    texts = [item.content[0].text for item in listed]
    assert texts == ["the first question", first.output_text, "the second question"]
    client.responses.delete(first.id)
    assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_an_answer_is_given_where_it_cannot_be_stored(serve, tmp_path: Path) -> None:
    """A file that another process has locked: the answer says store: false, going on says what is wrong, and all is
    well again when the lock is gone."""
    path = tmp_path / "responses.db"
    server = serve(path)
    client = server.client()
    first = ask(client, "the first question")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for stream in (False, True):
        answer = ask(client, "the second question", stream)
        assert answer.output_text == CUES["the second question"] and answer.store is False
    other.execute("ROLLBACK")
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.close()
    assert "is not stored: database is locked" in server.log
    metrics = server.get("/metrics").text
    assert "octavo:responses_stored_total{" in metrics and 'outcome="failed"' in metrics
    with pytest.raises(openai.BadRequestError, match="was not stored"):
        ask(client.with_options(max_retries=3), "the second question", previous_response_id=answer.id)
    second = ask(client, "the second question", previous_response_id=first.id)
    assert second.store and client.responses.retrieve(second.id) == second


def test_two_servers_may_share_a_file(serve, tmp_path: Path) -> None:
    one, other = (serve(tmp_path / "responses.db").client() for _ in range(2))
    first = ask(one, "the first question")
    second = ask(other, "the second question", previous_response_id=first.id)
    assert one.responses.retrieve(second.id).output_text == CUES["the second question"]


def test_memory_is_lost_with_its_server(serve) -> None:
    server = serve("memory")
    first = ask(server.client(), "the first question")
    assert ask(server.client(), "the second question", previous_response_id=first.id).output_text
    server.kill()
    with pytest.raises(openai.BadRequestError) as raised:
        ask(serve("memory").client(), "x", previous_response_id=first.id)
    assert raised.value.code == "previous_response_not_found"


@pytest.fixture(scope="module")
def keeper(serve, tmp_path_factory):
    """One server for the tests that leave it as it was."""
    return serve(tmp_path_factory.mktemp("keeper") / "responses.db")


def texts_of(client: openai.OpenAI, conversation_id: str, **query) -> list[str]:
    listed = client.conversations.items.list(conversation_id, **{"order": "asc", **query})
    return [item.content[0].text for item in listed]


def test_a_conversation_has_the_life_that_openai_gives_it(keeper) -> None:
    client = keeper.client()
    said = [{"type": "message", "role": "user", "content": f"number {number}"} for number in range(3)]
    made = client.conversations.create(items=said, metadata={"topic": "demo"})
    assert client.conversations.retrieve(made.id) == made and made.metadata == {"topic": "demo"}
    assert client.conversations.update(made.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "other"}
    call = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
    added = client.conversations.items.create(made.id, items=[call, result])
    assert [item.type for item in added.data] == ["function_call", "function_call_output"]
    newest = client.conversations.items.list(made.id, limit=2)
    assert [item.id for item in newest.data] == [added.last_id, added.first_id] and newest.has_more
    assert len(list(newest)) == 5, "pages follow one another"
    one = client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    assert one == added.data[0]
    for item in added.data:
        assert client.conversations.items.delete(item.id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError, match="not found in this conversation"):
        client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError, match="not found in this conversation"):
        client.conversations.items.delete(added.first_id, conversation_id=made.id)
    assert texts_of(client, made.id) == ["number 0", "number 1", "number 2"]
    assert client.conversations.delete(made.id).deleted
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            call(made.id)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_go_on_with_a_conversation_after_kill_9(serve, tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "responses.db"
    server = serve(path)
    client = server.client()
    made = client.conversations.create(items=[{"role": "developer", "content": "Be brief."}])
    first = ask(client, "the first question", stream, conversation=made.id, store=False)
    assert first.conversation.id == made.id and not first.store
    server.kill()
    client = serve(path).client()
    second = ask(client, "the second question", stream, conversation={"id": made.id})
    by_hand = ask(
        client,
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "the first question"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "the second question"},
        ],
    )
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    expected = ["Be brief.", "the first question", first.output_text, "the second question", second.output_text]
    assert texts_of(client, made.id) == expected
    assert client.conversations.items.list(made.id).data[0].id == second.output[0].id
    client.conversations.delete(made.id)
    assert client.responses.retrieve(second.id).conversation.id == made.id, "responses stay"


def test_conversations_are_their_tenants(keeper) -> None:
    client = keeper.client()
    one, other = ({"x-octavo-tenant": name, "x-octavo-tenant-id": f"{name}'s secret"} for name in ("one", "other"))
    made = client.conversations.create(items=[{"role": "user", "content": "mine"}], extra_headers=one)
    calls = client.conversations
    for call in (calls.retrieve, calls.delete, calls.items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id, extra_headers=other)
    with pytest.raises(openai.NotFoundError):
        calls.update(made.id, metadata={}, extra_headers=other)
    with pytest.raises(openai.NotFoundError):
        calls.items.create(made.id, items=[{"role": "user", "content": "x"}], extra_headers=other)
    with pytest.raises(openai.NotFoundError):
        ask(client, "x", conversation=made.id, extra_headers=other)
    assert len(calls.items.list(made.id, extra_headers=one).data) == 1


def test_ids_of_clients_are_not_taken_over(keeper) -> None:
    """Nobody makes an item that a reference to another's item finds."""
    client = keeper.client()
    first = ask(client, "the first question")
    item_id = first.output[0].id
    forged = {"type": "message", "role": "user", "content": "forged", "id": item_id}
    made = client.conversations.create(items=[forged])
    assert client.conversations.items.list(made.id).data[0].id != item_id
    again = client.conversations.create(items=[{"type": "item_reference", "id": item_id}])
    assert texts_of(client, again.id) == [first.output_text]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/conversations", {"items": [{"role": "user", "content": "x"}] * 21}, 400, "items"),
        ("/v1/conversations", {"items": [{"type": "computer_call"}]}, 400, "items.0"),
        ("/v1/conversations", {"items": [{"type": "item_reference", "id": "msg_none"}]}, 400, "items.0"),
        ("/v1/conversations", {"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
        ("/v1/conversations/conv_none", {"metadata": {}}, 404, 'conversation "conv_none" is not found'),
        ("/v1/conversations/resp_none/items", {"items": [{"role": "user", "content": "x"}]}, 404, '"resp_none"'),
        ("/v1/responses", {"input": "x", "conversation": "conv_none"}, 404, 'conversation "conv_none"'),
        ("/v1/responses", {"input": "x", "conversation": 5}, 400, "conversation"),
        (
            "/v1/responses",
            {"input": "x", "conversation": "a", "previous_response_id": "b"},
            400,
            "drop it or previous_",
        ),
    ],
)
def test_wrong_conversations_are_refused_by_name(keeper, path: str, body: dict, status: int, says: str) -> None:
    answer = keeper.post(path, body)
    assert answer.status_code == status and says in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "after=msg_none"])
def test_wrong_pages_are_refused_by_name(keeper, query: str) -> None:
    made = keeper.client().conversations.create()
    answer = keeper.get(f"/v1/conversations/{made.id}/items?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]


def noise(size: int) -> str:
    """A text that is half as long when it is stored."""
    return os.urandom(size // 2).hex()


def test_a_store_that_is_full(serve, tmp_path: Path) -> None:
    """The oldest makes room, and what asks for it hears that. What is larger than the store is refused, or an answer
    says that it is not stored; all else stays."""
    server = serve(tmp_path / "responses.db", "--responses-max-bytes", "1MiB")
    client = server.client()
    first = ask(client, "the first question")
    made = [client.conversations.create(items=[{"role": "user", "content": noise(200_000)}]) for _ in range(16)]
    with pytest.raises(openai.NotFoundError, match="made room for others"):
        client.conversations.retrieve(made[0].id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="made room for others") as raised:
        ask(client, "the second question", previous_response_id=first.id)
    assert raised.value.code == "previous_response_not_found"
    newest = client.conversations.retrieve(made[-1].id)
    large = [{"role": "user", "content": noise(3 << 20)}]
    for call in (client.conversations.create, lambda items: client.conversations.items.create(newest.id, items=items)):
        with pytest.raises(openai.APIStatusError, match=r"--responses-max-bytes\): send less") as refused:
            call(items=large)
        assert (refused.value.status_code, refused.value.code) == (413, "store_full")
        assert "retry-after" not in refused.value.response.headers
    assert len(texts_of(client, newest.id)) == 1, "nothing of it was added"
    for stream in (False, True):
        answer = ask(client, "the first question", stream, user=noise(3 << 20))
        assert answer.output_text == CUES["the first question"] and answer.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
    assert "is not stored: the store of responses has no room for this" in server.log
    assert client.conversations.retrieve(newest.id) == newest, "the others lose nothing"


def test_what_is_stored_expires(serve) -> None:
    client = serve("memory", "--responses-ttl", "1").client()
    first = ask(client, "the first question")
    assert first.store
    deadline = time.monotonic() + 60
    with pytest.raises(openai.NotFoundError):
        while time.monotonic() < deadline:
            client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="has expired"):
        ask(client, "the second question", previous_response_id=first.id)
