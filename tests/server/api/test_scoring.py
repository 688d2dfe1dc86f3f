"""Encoders and rerankers behind HTTP: vectors, scores, rankings and classes are those of the offline engine."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file
from support.encoders import make_encoder, write_modules

from octavo import LLM, PoolingParams

QUERY, DOCUMENTS = "the capital of france", ["a cat runs", "paris is a city", "berlin", "france paris"]


@pytest.fixture(scope="module")
def reranker(start, tmp_path_factory):
    path = tmp_path_factory.mktemp("reranker")
    make_encoder("bert", path, head=True, num_labels=1)
    return start("--served-model-name", "reranker", model=path), LLM(str(path))


@pytest.fixture(scope="module")
def embedder(start, tmp_path_factory):
    path = tmp_path_factory.mktemp("embedder")
    make_encoder("bert", path, is_matryoshka=True)
    write_modules(path, ("Pooling", {"pooling_mode_cls_token": True}))
    prompts = {"query": "is it so ", "document": "a city "}
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return start("--served-model-name", "embedder", model=path), LLM(str(path))


@pytest.mark.parametrize("asked", [{"prompt_name": "query"}, {"input_type": "search_query"}])
def test_texts_have_the_prompt_that_is_asked_for(embedder, asked):
    server, llm = embedder
    (wanted,) = llm.embed("is it so paris", use_tqdm=False)
    found = server.post("/v1/embeddings", {"input": "paris", **asked}).json()["data"][0]["embedding"]
    assert found == pytest.approx(list(wanted), abs=1e-5)
    if "input_type" in asked:
        found = server.post("/v2/embed", {"texts": ["paris"], **asked}).json()["embeddings"]["float"][0]
        assert found == pytest.approx(list(wanted), abs=1e-5)
    refused = server.post("/v1/embeddings", {"input": "paris", "prompt_name": "poem"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_name"
    described = server.get("/openapi.json").json()["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert "'enum': ['query', 'document']" in str(described["prompt_name"])


@pytest.fixture(scope="module")
def prompting(start, tmp_path_factory):
    """A model that pools the first token behind its default prompt and norms it; the server pools the last one."""
    path = tmp_path_factory.mktemp("prompting")
    make_encoder("bert", path)
    pooling = {"pooling_mode_cls_token": True, "include_prompt": False}
    write_modules(path, ("Pooling", pooling), ("LayerNorm", {"dimension": 64}))
    norm = {"norm.weight": torch.rand(64) + 0.5, "norm.bias": torch.randn(64)}
    save_file(norm, path / "2_LayerNorm" / "model.safetensors")
    prompts = {"query": "is it so ", "document": "a city "}
    settings = {"prompts": prompts, "default_prompt_name": "document"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return start("--served-model-name", "prompting", "--embedding-pooling", "last", model=path), LLM(str(path))


def test_ollamas_routes_put_the_default_prompt_before_texts(prompting):
    server, llm = prompting
    (wanted,) = llm.embed([llm.tokenizer.encode("a city paris")], PoolingParams(pooling="last"), use_tqdm=False)
    vector = list(wanted)
    length = math.hypot(*vector)
    found = server.post("/api/embed", {"model": "prompting", "input": "paris"}).json()
    assert found["embeddings"] == [pytest.approx([number / length for number in vector], abs=1e-5)]
    assert found["prompt_eval_count"] == len(llm.tokenizer.encode("a city paris"))
    older = server.post("/api/embeddings", {"model": "prompting", "prompt": "paris"}).json()["embedding"]
    assert older == pytest.approx(vector, abs=1e-5)


def test_a_prompt_is_left_out_of_the_servers_vectors(prompting):
    server, llm = prompting
    first, other = (
        list(llm.embed(text, PoolingParams(pooling="cls"), use_tqdm=False)[0])
        for text in ("paris", [llm.tokenizer.encode("a city paris")])
    )
    found = server.post("/v1/embeddings", {"input": "paris", "pooling": "cls"}).json()["data"][0]["embedding"]
    assert found == pytest.approx(first, abs=1e-5) and found != pytest.approx(other, abs=1e-2)


def test_scores_and_rankings_pool_as_the_server_is_told(prompting):
    server, llm = prompting
    wanted, others = (
        [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, PoolingParams(pooling=kind), use_tqdm=False)]
        for kind in ("last", "cls")
    )
    assert wanted != pytest.approx(others, abs=1e-3)
    scores = server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    assert [one["score"] for one in scores] == pytest.approx(wanted, abs=1e-5)
    ranked = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert {one["index"]: one["relevance_score"] for one in ranked} == pytest.approx(dict(enumerate(wanted)), abs=1e-5)


def scores_of(llm, documents=DOCUMENTS):
    return [output.outputs.score for output in llm.score(QUERY, documents, use_tqdm=False)]


def test_metrics_of_an_encoder_claim_no_prefix_cache(embedder):
    (info,) = [line for line in embedder[0].get("/metrics").text.splitlines() if line.startswith("vllm:cache_config")]
    assert 'enable_prefix_caching="False"' in info


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(reranker, path):
    server, llm = reranker
    expected = scores_of(llm)
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    answer = server.post(path, {"model": "reranker", "query": QUERY, "documents": documents}).json()
    order = sorted(range(4), key=lambda i: -expected[i])
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-6)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert answer["usage"]["total_tokens"] == sum(
        len(output.prompt_token_ids) for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    )
    best = server.post(path, {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}).json()
    assert [list(result) for result in best["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in best["results"]] == order[:2]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_pairs(reranker, embedder, path):
    for server, llm in (reranker, embedder):
        answer = server.post(path, {"text_1": QUERY, "text_2": DOCUMENTS}).json()
        assert [item["index"] for item in answer["data"]] == [0, 1, 2, 3]
        assert [item["score"] for item in answer["data"]] == pytest.approx(scores_of(llm), abs=1e-6)
        one = server.post(path, {"text_1": [QUERY, DOCUMENTS[0]], "text_2": [DOCUMENTS[1], DOCUMENTS[0]]}).json()
        assert one["data"][0]["score"] == pytest.approx(scores_of(llm)[1], abs=1e-6)


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_scores_under_vllms_other_names(reranker, names):
    server, llm = reranker
    parts = {"content": [{"type": "text", "text": DOCUMENTS[1]}]}
    body = {"model": "reranker", names[0]: QUERY, names[1]: [DOCUMENTS[0], parts, *DOCUMENTS[2:]], "text_1": None}
    answer = server.post("/v1/score", body).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx(scores_of(llm), abs=1e-6)


def test_requests_as_clients_write_them(reranker):
    """As recorded of vLLM's examples, Cohere's client (`rerank`) and LangChain's CohereRerank."""
    server, llm = reranker
    expected = scores_of(llm)
    common = {"model": "reranker", "query": QUERY}
    cut = scores_of(llm, [text.split()[0] for text in DOCUMENTS])
    for more, scores in (
        ({"documents": DOCUMENTS, "top_n": 0}, expected),
        ({"documents": DOCUMENTS, "top_n": 50, "max_tokens_per_doc": 4000}, expected),
        ({"documents": [{"text": text} for text in DOCUMENTS], "rank_fields": ["text"]}, expected),
        ({"documents": DOCUMENTS[0]}, expected[:1]),
        ({"documents": DOCUMENTS, "max_tokens_per_doc": 1, "max_tokens_per_query": 4}, cut),
    ):
        response = server.post("/v2/rerank", common | more)
        assert response.status_code == 200, response.text
        found = {result["index"]: result["relevance_score"] for result in response.json()["results"]}
        assert [found[i] for i in range(len(scores))] == pytest.approx(scores, abs=1e-6)
        assert len(found) == len(scores)


def test_vectors_are_left_as_they_are_where_asked_for(embedder):
    server, llm = embedder
    plain = list(llm.embed(DOCUMENTS[0], use_tqdm=False)[0])
    body = {"input": DOCUMENTS[0], "encoding_format": "float"}
    assert server.post("/v1/embeddings", body | {"use_activation": False}).json()["data"][0][
        "embedding"
    ] == pytest.approx(plain, abs=1e-5)
    normal = server.post("/v1/embeddings", body | {"use_activation": True}).json()["data"][0]["embedding"]
    assert normal == pytest.approx([x / math.hypot(*plain) for x in plain], abs=1e-5)


def test_classes(reranker):
    server, llm = reranker
    answer = server.post("/classify", {"input": DOCUMENTS}).json()
    expected = [output.outputs.probs for output in llm.classify(DOCUMENTS, use_tqdm=False)]
    assert [item["probs"] for item in answer["data"]] == [pytest.approx(probs, abs=1e-6) for probs in expected]
    assert {(item["label"], item["num_classes"]) for item in answer["data"]} == {("LABEL_0", 1)}


def test_openais_client_embeds_by_the_models_own_modules(embedder):
    server, llm = embedder
    client = server.client()
    expected = [list(output) for output in llm.embed(DOCUMENTS, use_tqdm=False)]
    assert math.hypot(*expected[0]) != pytest.approx(1), "no module normalises"
    found = client.embeddings.create(model="embedder", input=DOCUMENTS, encoding_format="float").data
    assert [item.embedding for item in found] == [pytest.approx(vector, abs=1e-5) for vector in expected]
    lax = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")  # asks for base64
    assert list(lax.embeddings.create(model="embedder", input=DOCUMENTS[0]).data[0].embedding) == pytest.approx(
        expected[0], abs=1e-5
    )
    short = client.embeddings.create(
        model="embedder", input=DOCUMENTS[0], dimensions=8, encoding_format="float", extra_body={"normalize": True}
    )
    cut = expected[0][:8]
    assert short.data[0].embedding == pytest.approx([x / math.hypot(*cut) for x in cut], abs=1e-5)


def test_long_texts_are_cut_where_that_is_asked_for(embedder):
    server, _ = embedder
    text = "paris " * 300
    refused = server.post("/v1/embeddings", {"input": text})
    assert refused.status_code == 400 and "1800 characters" in refused.json()["error"]["message"]
    answer = server.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1}).json()
    assert answer["usage"]["prompt_tokens"] == 130
    assert (
        server.post("/v1/rerank", {"query": text, "documents": ["x"], "truncate_prompt_tokens": 20}).status_code == 200
    )


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model", "cannot generate text"),
        ("/v1/completions", {"prompt": "x"}, "model", "/v1/embeddings"),
        ("/classify", {"input": "x"}, "model", "cannot classify"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents", "empty"),
        ("/v1/rerank", {"query": "x", "documents": ["y", 3]}, "documents", "entry 1"),
        ("/v1/rerank", {"query": "x", "documents": ["a", "paris " * 400]}, "documents.1", "2400 characters"),
        ("/v1/rerank", {"query": "paris " * 400, "documents": ["a"]}, "query", "2400 characters"),
        ("/v1/rerank", {"query": "x", "documents": ["a"], "top_n": -1}, "top_n", "top_n"),
        ("/v1/rerank", {"query": "x", "documents": ["a"], "max_chunks_per_doc": 9}, "max_chunks_per_doc", "supported"),
        ("/v1/rerank", {"query": ["x", "y"], "documents": ["a"]}, "query", "must be a string"),
        ("/v1/score", {"queries": "a", "text_2": "b"}, "text_1", "got queries and text_2"),
        ("/v1/score", {"queries": ["a", "b"], "items": ["c"] * 3}, "queries", "2 texts and items 3"),
        ("/v1/score", {"text_1": {"content": [{"type": "image_url"}]}, "text_2": "b"}, "text_1", "must be a string"),
        ("/v1/embeddings", {"input": "x", "normalize": True, "use_activation": False}, "normalize", "contradicts"),
        ("/v1/score", {"text_1": ["a", "b", "c"], "text_2": ["d", "e"]}, "text_1", "3 texts and text_2 2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "empty"),
        ("/v1/embeddings", {"input": "x", "dimensions": 65}, "dimensions", "from 1 to 64, got 65"),
    ],
)
def test_bad_input_is_refused_by_name(embedder, path, body, param, says):
    server, _ = embedder
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"], error


def test_models_metrics_and_health_are_an_encoders(embedder):
    server, _ = embedder
    before = server.get("/metrics").text
    server.post("/v1/embeddings", {"input": ["paris is a city"] * 40}).raise_for_status()
    card = server.get("/v1/models").json()["data"][0]
    assert card["id"] == "embedder" and card["max_model_len"] == 130
    after = server.get("/metrics").text

    def value(page, name):
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))

    finished = 'vllm:request_success_total{engine="0",finished_reason="stop"'
    assert value(after, finished) - value(before, finished) == 40
    assert value(after, "vllm:prompt_tokens_total") - value(before, "vllm:prompt_tokens_total") == 40 * 6
    assert value(after, "vllm:generation_tokens_total") == 0
    assert value(after, "vllm:num_requests_waiting{") == value(after, "vllm:num_requests_running{") == 0
    assert server.get("/health").status_code == 200
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/").status_code == 200
