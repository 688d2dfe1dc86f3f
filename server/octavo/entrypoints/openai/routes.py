"""The routes of OpenAI's API but for responses and batches; vLLM's routes of scores and tokens; Cohere's embeddings."""

from __future__ import annotations

from octavo.entrypoints.dialect import Dialect
from octavo.entrypoints.fields.values import IMAGES
from octavo.entrypoints.openai import embed_by_type, embeddings, scoring, tokenization
from octavo.entrypoints.openai.answers import ChatCompletion, Completion, whole_chat_completion, whole_completion
from octavo.entrypoints.openai.events import ChatEvents, CompletionEvents
from octavo.entrypoints.openai.prepare import prepare_chat_completion, prepare_completion
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.entrypoints.operation import Operation, answering

CHAT = Dialect(
    "create_chat_completion",
    ChatCompletionRequest,
    prepare_chat_completion,
    whole_chat_completion,
    ChatEvents,
    IMAGES,
)
COMPLETIONS = Dialect("create_completion", CompletionRequest, prepare_completion, whole_completion, CompletionEvents)


OPERATIONS = (
    answering("/v1/completions", COMPLETIONS, "Create a completion", Completion),
    answering("/v1/chat/completions", CHAT, "Create a chat completion", ChatCompletion),
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
)
