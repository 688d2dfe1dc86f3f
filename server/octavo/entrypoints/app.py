"""The ASGI applications: which path leads to which handler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from octavo.entrypoints import health, models, pages
from octavo.entrypoints.anthropic import routes as anthropic
from octavo.entrypoints.anthropic.answers import AnthropicMessage, TokenCount
from octavo.entrypoints.anthropic.protocol import CountTokensRequest
from octavo.entrypoints.batches import routes as batches
from octavo.entrypoints.batches.answers import BatchAnswer, BatchList, FileAnswer, FileDeleted, FileList
from octavo.entrypoints.errors import AnthropicErrorResponse, OllamaErrorResponse, on_http_exception, on_unexpected
from octavo.entrypoints.lora.listed import AdapterReport
from octavo.entrypoints.ollama import embed
from octavo.entrypoints.ollama import models as ollama_models
from octavo.entrypoints.ollama import routes as ollama
from octavo.entrypoints.ollama.answers import ChatAnswer, EmbedAnswer, EmbeddingsAnswer, GenerateAnswer
from octavo.entrypoints.ollama.models import Running, Show, Tags, VersionAnswer
from octavo.entrypoints.ollama.protocol import ShowRequest
from octavo.entrypoints.openai import embed_by_type, embeddings, scoring, tokenization
from octavo.entrypoints.openai import routes as openai
from octavo.entrypoints.openai.answers import ChatCompletion, Completion, ModelCard, ModelList
from octavo.entrypoints.openapi import Operation, answering, document
from octavo.entrypoints.responses import routes as responses
from octavo.entrypoints.responses.items import DeletedResponse, InputTokenCount, ResponseItems, ResponseObject
from octavo.entrypoints.responses.protocol import InputTokensRequest
from octavo.entrypoints.responses.store import ResponseStore
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.middleware import ROUTE_PATH, RequestMiddleware
from octavo.entrypoints.transport.responses import JSON, route

STATE_OPERATIONS = (
    Operation("GET", "/health", health.health, "Check that the server is alive and ready", open=True),
    Operation("GET", "/livez", health.livez, "Check that the engine makes progress or is idle", open=True),
    Operation("GET", "/readyz", health.readyz, "Check that the model is loaded and requests are accepted", open=True),
    Operation("GET", "/ping", health.ping, "Check that the server is alive and ready"),
    Operation("GET", "/metrics", health.metrics, "Get metrics in Prometheus' text format"),
    Operation("GET", "/load", health.load, "Get the number of requests in progress", answer=health.Load),
    Operation("GET", "/version", health.version, "Get the server's version", answer=health.Version),
)
BLOCKS = Operation("GET", "/octavo/blocks", health.blocks, "Show the blocks of the KV cache", answer=health.Blocks)
ADAPTER_OPERATIONS = (  # of the management port alone
    Operation(
        "GET",
        "/v1/adapters",
        models.adapters,
        "List LoRA adapters with their states",
        answer=AdapterReport,
    ),
    Operation("POST", "/v1/adapters/reload", models.reload_adapters, "Read --lora-list again", answer=AdapterReport),
)
OLLAMA_OPERATIONS = tuple(
    replace(operation, error=OllamaErrorResponse, name=operation.name or f"ollama_{operation.id}")
    for operation in (
        Operation("GET", "/api/version", ollama_models.version, "Get Ollama's API version", answer=VersionAnswer),
        Operation("GET", "/api/tags", ollama_models.tags, "List models (Ollama format)", answer=Tags),
        Operation(
            "GET",
            "/api/ps",
            ollama_models.running,
            "Show the loaded model (Ollama format)",
            answer=Running,
        ),
        Operation(
            "POST",
            "/api/show",
            ollama_models.show,
            "Show the model's details (Ollama format)",
            body=ShowRequest,
            answer=Show,
        ),
        answering("/api/chat", ollama.CHAT, "Create a chat answer (Ollama format)", ChatAnswer),
        answering("/api/generate", ollama.GENERATE, "Complete a prompt (Ollama format)", GenerateAnswer),
        answering("/api/embed", embed.EMBED, "Create embeddings (Ollama format)", EmbedAnswer),
        answering("/api/embeddings", embed.EMBEDDINGS, "Create one embedding (older Ollama format)", EmbeddingsAnswer),
        *(
            Operation(
                method, f"/api/{name}", ollama.not_built, f"Not supported: {name} is refused", name=f"ollama_{name}"
            )
            for method, name in (
                ("POST", "pull"),
                ("POST", "push"),
                ("POST", "create"),
                ("POST", "copy"),
                ("DELETE", "delete"),
            )
        ),
    )
)
BATCH_OPERATIONS = (
    Operation("POST", "/v1/files", batches.upload_file, "Upload a file", form=batches.FORM, answer=FileAnswer),
    Operation(
        "GET",
        "/v1/files",
        batches.list_files,
        "List files",
        answer=FileList,
        query=batches.FILES_QUERY,
    ),
    Operation("GET", "/v1/files/{file_id}", batches.retrieve_file, "Retrieve a file's metadata", answer=FileAnswer),
    Operation(
        "GET", "/v1/files/{file_id}/content", batches.file_content, "Download a file", answer="application/octet-stream"
    ),
    Operation("DELETE", "/v1/files/{file_id}", batches.delete_file, "Delete a file", answer=FileDeleted),
    Operation(
        "POST",
        "/v1/batches",
        batches.create_batch,
        "Create a batch",
        body=batches.BatchRequest,
        answer=BatchAnswer,
    ),
    Operation(
        "GET", "/v1/batches", batches.list_batches, "List batches", answer=BatchList, query=batches.BATCHES_QUERY
    ),
    Operation("GET", "/v1/batches/{batch_id}", batches.retrieve_batch, "Retrieve a batch", answer=BatchAnswer),
    Operation("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, "Cancel a batch", answer=BatchAnswer),
)
WORK_OPERATIONS = (
    Operation("GET", "/", pages.index, "Show an overview of this server", answer="text/html"),
    answering("/v1/completions", openai.COMPLETIONS, "Create a completion", Completion),
    answering("/v1/chat/completions", openai.CHAT, "Create a chat completion", ChatCompletion),
    answering("/v1/responses", responses.RESPONSES, "Create a response", ResponseObject),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        "Count a response's input tokens",
        body=InputTokensRequest,
        answer=InputTokenCount,
    ),
    Operation(
        "POST",
        "/v1/responses/compact",
        responses.compact_response,
        "Not supported: compaction is refused",
        answer=ResponseObject,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        responses.retrieve_response,
        "Retrieve a stored response",
        answer=ResponseObject,
    ),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        responses.delete_response,
        "Delete a stored response",
        answer=DeletedResponse,
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        responses.cancel_response,
        "Not supported: there are no background responses",
        answer=ResponseObject,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        responses.list_input_items,
        "List a response's input items",
        answer=ResponseItems,
        query=responses.ITEMS_QUERY,
    ),
    answering(
        "/v1/messages",
        anthropic.MESSAGES,
        "Create a message (Anthropic format)",
        AnthropicMessage,
        error=AnthropicErrorResponse,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_message_tokens,
        "Count input tokens (Anthropic format)",
        body=CountTokensRequest,
        answer=TokenCount,
        error=AnthropicErrorResponse,
    ),
    answering("/v1/embeddings", embeddings.EMBEDDINGS, "Create embeddings", embeddings.EmbeddingList),
    answering("/v2/embed", embed_by_type.DIALECT, "Create embeddings (Cohere format)", embed_by_type.EmbedByType),
    *(
        answering(
            path,
            scoring.RERANK,
            "Rank documents by relevance to a query",
            scoring.RerankResponse,
            name="rerank" + path.replace("/", "_"),
        )
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    *(
        answering(path, scoring.SCORE, "Score text pairs", scoring.ScoreList, name="score" + path.replace("/", "_"))
        for path in ("/v1/score", "/score")
    ),
    answering("/classify", scoring.CLASSIFY, "Classify texts", scoring.ClassificationList),
    Operation("GET", "/props", models.props, "Get server properties (llama.cpp format)", answer=models.Props),
    Operation("GET", "/v1/models", models.list_models, "List models", answer=ModelList),
    Operation("GET", "/v1/models/{model_id:path}", models.retrieve_model, "Retrieve a model", answer=ModelCard),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        models.load_adapter,
        "Load a LoRA adapter, if the server allows it",
        body=models.LoadAdapterRequest,
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        models.unload_adapter,
        "Unload a LoRA adapter",
        body=models.UnloadAdapterRequest,
    ),
    Operation(
        "POST",
        "/tokenize",
        tokenization.tokenize,
        "Tokenize a text or a conversation",
        body=tokenization.TokenizeRequest,
        answer=tokenization.TokenizeResponse,
    ),
    Operation(
        "POST",
        "/detokenize",
        tokenization.detokenize,
        "Detokenize token ids",
        body=tokenization.DetokenizeRequest,
        answer=tokenization.DetokenizeResponse,
    ),
    *BATCH_OPERATIONS,
    *OLLAMA_OPERATIONS,
)


def build_app(state: ServerState) -> Starlette:
    """The ASGI application of the main port."""
    return _build(state, "Octavo", (*WORK_OPERATIONS, *STATE_OPERATIONS), state.args.api_key, state.args.root_path)


def build_management_app(state: ServerState) -> Starlette:
    """The ASGI application of the management port: probes and metrics, without API keys."""
    return _build(state, "Octavo management", (*STATE_OPERATIONS, BLOCKS, *ADAPTER_OPERATIONS))


class _Route(Route):
    """Tells the middleware which route a request took."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, ROUTE_PATH: self.path}


def _build(
    state: ServerState, title: str, operations: Sequence[Operation], api_keys: Sequence[str] = (), root_path: str = ""
) -> Starlette:
    async def openapi(request: Request) -> Response:
        return JSON(document(operations, state, title, root_path))

    endpoints = [(operation.method, operation.path, operation.handler) for operation in operations]
    endpoints.append(("GET", "/icon.svg", pages.icon))
    if not state.args.disable_fastapi_docs:
        docs = [("/openapi.json", openapi), ("/docs", pages.docs), ("/docs/{name}", pages.docs_file)]
        endpoints += [("GET", path, handler) for path, handler in docs]
    app = Starlette(
        routes=[_Route(path, route(handler), methods=[method]) for method, path, handler in endpoints],
        middleware=_middleware(state, api_keys, root_path),
        exception_handlers={HTTPException: on_http_exception, Exception: on_unexpected},
    )
    app.router.redirect_slashes = False
    app.state.server, app.state.title, app.state.responses = state, title, ResponseStore()
    return app


def _middleware(state: ServerState, api_keys: Sequence[str], root_path: str) -> list[Middleware]:
    """Outermost first."""
    inner = Middleware(RequestMiddleware, state=state, api_keys=api_keys, root_path=root_path)
    args = state.args
    if not args.allowed_origins:
        return [inner]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        expose_headers=["x-request-id"],
    )
    return [cors, inner]  # a preflight request has no key
