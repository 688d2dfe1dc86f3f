"""/v1/embeddings through OpenAI's client: the vectors of the offline engine, in both encodings."""

from __future__ import annotations

import base64
import json
import math
import struct

import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import LLM
from octavo.entrypoints.batches.lines import parse_line
from octavo.entrypoints.openai.byte_vectors import IN_BYTES
from octavo.entrypoints.openai.float_vectors import packed

TEXTS = ["The capital of France is Paris.", "naïve café 日本語 🙂", "x"]


@pytest.fixture(scope="module")
def client(shared_server):
    return shared_server.client()


def embed(client, texts, **options):
    answer = client.embeddings.create(model="tiny", input=texts, **{"encoding_format": "float", **options})
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_the_offline_engine(client, tiny_model, pooling):
    llm = LLM(str(tiny_model), load_format="dummy", num_gpu_blocks_override=64)
    expected = llm.embed(TEXTS, pooling=pooling)
    found = embed(client, TEXTS, extra_body={"pooling": pooling})
    for vector, wanted in zip(found, expected, strict=True):
        assert vector == pytest.approx(wanted, abs=1e-5)
        assert math.hypot(*vector) == pytest.approx(1)


def test_mean_is_the_default_and_last_differs(client):
    assert embed(client, TEXTS[0]) == embed(client, TEXTS[0], extra_body={"pooling": "mean"})
    assert embed(client, TEXTS[0]) != embed(client, TEXTS[0], extra_body={"pooling": "last"})


def test_texts_and_token_ids_in_every_shape(client, shared_server):
    ids = [shared_server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    vectors = embed(client, TEXTS)
    assert embed(client, TEXTS[0]) == vectors[:1] == embed(client, ids[0])
    assert embed(client, ids) == vectors


def test_base64_is_the_same_to_the_bit(client, shared_server):
    """The client asks for base64 when it is not told otherwise, and decodes it (its strict mode knows lists only)."""
    lax = openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none")
    packed = lax.embeddings.create(model="tiny", input=TEXTS).data
    for item, vector in zip(packed, embed(client, TEXTS), strict=True):
        assert list(item.embedding) == [struct.unpack("<f", struct.pack("<f", value))[0] for value in vector]


KINDS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@given(vector=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_floats_are_rounded_as_torch_does(vector):
    for name, dtype in KINDS.items():
        wanted = torch.tensor(vector).to(dtype).view(torch.uint8).numpy().tobytes()
        assert packed(vector, name, "native") == wanted
        size = dtype.itemsize
        swapped = b"".join(wanted[i : i + size][::-1] for i in range(0, len(wanted), size))
        assert {packed(vector, name, "little"), packed(vector, name, "big")} == {wanted, swapped}
    assert packed([1.0], "float16", "big") == b"\x3c\x00"
    assert packed([1.5, -2.0], "float32", "big") == struct.pack(">2f", 1.5, -2.0)
    assert packed([1.0], "bfloat16", "little") == b"\x80\x3f"


@pytest.mark.parametrize("order", [None, "big"])
@pytest.mark.parametrize("dtype", [None, *KINDS])
def test_vectors_in_bytes_are_the_same(client, shared_server, dtype, order):
    """vLLM's answer: the bytes of all, and a header that says where each is."""
    vectors = embed(client, TEXTS)
    asked = {"input": TEXTS, "embed_dtype": dtype, "endianness": order}
    answer = shared_server.post("/v1/embeddings", {**asked, "encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream"
    found = json.loads(answer.headers["metadata"])
    assert set(found) == {"id", "created", "model", "data", "usage"} and found["model"] == "tiny"
    parts = [packed(vector, dtype or "float32", order or "little") for vector in vectors]
    for i, (item, part, vector) in enumerate(zip(found["data"], parts, vectors, strict=True)):
        assert answer.content[item["start"] : item["end"]] == part
        stated = {"index": i, "embed_dtype": dtype or "float32", "endianness": order or "little"}
        assert item == stated | {"start": item["start"], "end": item["end"], "shape": [len(vector)]}
    alone = shared_server.post("/v1/embeddings", {**asked, "encoding_format": "bytes_only"})
    assert alone.content == b"".join(parts) and "metadata" not in alone.headers
    written = shared_server.post("/v1/embeddings", {**asked, "encoding_format": "base64"}).json()
    assert [base64.b64decode(item["embedding"]) for item in written["data"]] == parts
    assert written["usage"] == found["usage"]


def test_a_header_has_room_for_the_places_of_so_many_texts(shared_server):
    for count, status in ((256, 200), (257, 400)):
        answer = shared_server.post("/v1/embeddings", {"input": ["x"] * count, "encoding_format": "bytes"})
        assert answer.status_code == status
        assert len(answer.headers.get("metadata", "")) < 40_000
    assert "at most 256 texts" in answer.json()["error"]["message"]
    assert (
        shared_server.post("/v1/embeddings", {"input": ["x"] * 257, "encoding_format": "bytes_only"}).status_code == 200
    )


def test_a_batch_cannot_hold_bytes():
    body = {"input": "x", "encoding_format": "bytes"}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": body}).encode()
    assert "encoding_format bytes is no JSON" in parse_line(1, line).problem


def test_usage_counts_the_prompts(client, shared_server):
    answer = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    counts = [shared_server.post("/tokenize", {"prompt": text}).json()["count"] for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(counts)
    assert answer.model == "tiny" and answer.object == "list"


def test_more_texts_than_the_queue_holds(client):
    """A long list is worked off in parts, in order."""
    texts = [f"text {i}" for i in range(400)]
    vectors = embed(client, texts)
    assert len(vectors) == 400
    assert embed(client, texts[399]) == [pytest.approx(vectors[399], abs=1e-6)]


def test_dimensions_may_only_be_the_models(client):
    assert len(embed(client, "x", dimensions=32)[0]) == 32
    with pytest.raises(openai.BadRequestError, match="dimensions must be 32, got 16"):
        embed(client, "x", dimensions=16)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, ["input"]),
        ({"input": []}, ["input"]),
        ({"input": ""}, ["input", "empty"]),
        ({"input": ["fine", ""]}, ["input.1", "empty"]),
        ({"input": [1, "x"]}, ["input"]),
        ({"input": [-1]}, ["input", "-1"]),
        ({"input": [10_000]}, ["input", "10000"]),
        ({"input": True}, ["input"]),
        ({"input": "x" * 100_000}, ["input", "1024"]),
        ({"input": ["x"] * 2049}, ["2048", "2049"]),
        ({"input": "x", "encoding_format": "int8"}, ["encoding_format"]),
        ({"input": "x", "embed_dtype": "fp8_e4m3"}, ["embed_dtype"]),
        ({"input": "x", "endianness": "middle"}, ["endianness"]),
        ({"input": "x", "dimensions": 0}, ["dimensions"]),
        ({"input": "x", "pooling": "median"}, ["pooling"]),
    ],
)
def test_bad_input_is_refused_by_name(shared_server, body, says):
    answer = shared_server.post("/v1/embeddings", body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert all(word in message for word in says), message


def test_the_servers_default_can_be_the_last_token(unusual):
    client = unusual.client()
    assert embed(client, TEXTS[0]) == embed(client, TEXTS[0], extra_body={"pooling": "last"})
    assert embed(client, TEXTS[0]) != embed(client, TEXTS[0], extra_body={"pooling": "mean"})


def test_coheres_form_is_of_the_same_vectors(shared_server):
    theirs = shared_server.post("/v1/embeddings", {"input": ["a fox", "a dog"]}).json()
    asked = {"texts": ["a fox", "a dog"], "input_type": "search_query", "embedding_types": ["float", "base64"]}
    answer = shared_server.post("/v2/embed", asked).json()
    assert answer["embeddings"]["float"] == [one["embedding"] for one in theirs["data"]]
    for written, vector in zip(answer["embeddings"]["base64"], answer["embeddings"]["float"], strict=True):
        assert struct.unpack(f"<{len(vector)}f", base64.b64decode(written)) == pytest.approx(vector, abs=1e-6)
    tokens = theirs["usage"]["prompt_tokens"]
    assert answer["meta"] == {"billed_units": {"input_tokens": tokens}, "api_version": {"version": "2"}}
    assert answer["texts"] == asked["texts"] and answer["response_type"] == "embeddings_by_type"
    long = {"texts": ["brown fox " * 2000]}
    both = [shared_server.post("/v2/embed", {**long, "truncate": side}).json() for side in ("START", "END")]
    assert both[0]["embeddings"] != both[1]["embeddings"]
    for wrong, word in (
        ({**long, "truncate": "NONE"}, "texts.0 has"),
        ({"texts": ["a", "brown fox"], "truncate": "NONE", "max_tokens": 1}, "texts.1 has"),
        ({"texts": [""]}, "texts.0"),
        ({"texts": []}, "texts"),
        ({"texts": ["x"], "images": ["x"]}, "images"),
        ({"texts": ["x"], "output_dimension": 10_000}, "output_dimension"),
        ({"texts": ["x"], "embedding_types": ["int4"]}, "embedding_types"),
    ):
        refused = shared_server.post("/v2/embed", wrong)
        error = refused.json()["error"]
        assert refused.status_code == 400 and word in error["message"], refused.text
        assert error["param"].startswith(word.split()[0]) and "truncate_prompt_tokens" not in refused.text
    no_cut = shared_server.post("/v2/embed", {"texts": ["a", "brown fox " * 800], "truncate": "NONE"}).json()["error"]
    assert no_cut["param"] == "texts.1" and no_cut["message"].endswith("; shorten it, or set truncate")


@given(vector=st.lists(st.floats(-1.5, 1.5, width=32), min_size=1, max_size=40))
def test_bytes_are_those_of_numpy(vector):
    """Signs as sentence-transformers packs them; integers within half a step of the number, at length 1."""
    exact = np.array(vector)
    packed = np.packbits(exact > 0)
    assert IN_BYTES["ubinary"](vector) == packed.tolist()
    assert IN_BYTES["binary"](vector) == (packed.astype(int) - 128).tolist()
    found = np.array(IN_BYTES["int8"](vector))
    length = np.linalg.norm(exact) or 1
    assert (np.abs(found / 127 - exact / length) <= 0.5 / 127 + 1e-9).all()
    assert IN_BYTES["uint8"](vector) == (found + 127).tolist()


def test_coheres_bytes_are_of_the_same_vectors(shared_server):
    kinds = ["float", *IN_BYTES]
    found = shared_server.post("/v2/embed", {"texts": ["a fox", "a dog"], "embedding_types": kinds}).json()[
        "embeddings"
    ]
    assert list(found) == kinds
    for kind, make in IN_BYTES.items():
        assert found[kind] == [make(vector) for vector in found["float"]]
