"""Results of `octavo.LLM` beside text: vectors, classes and scores of prompts, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.engine.scoring import check_pairs, plan_scores, text_of
from octavo.errors import OctavoError
from octavo.interface.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from octavo.interface.pooling_params import PoolingParams, class_pooling, embedding_pooling, prompt_before

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.interface.engine_config import EngineConfig
    from octavo.interface.messages import EngineCoreRequest
    from octavo.interface.pooling import Pooling

Prompt = str | dict[str, Any] | list[int]
Text = str | dict[str, Any]  # see `text_of`


class RunsRequests:
    """`octavo.LLM` as the methods see it that lie in files of their own: it runs their requests."""

    config: EngineConfig
    _input: InputProcessor

    def _run(
        self, requests: list[EngineCoreRequest], texts: list[str | None], show_progress: bool
    ) -> list[RequestOutput]:
        raise NotImplementedError

    def _new_id(self) -> str:
        raise NotImplementedError


class PoolingMethods(RunsRequests):
    """`embed`, `encode`, `classify` and `score` of `octavo.LLM`."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, pooled as the model's own files say: see `PoolingParams` for what can be changed.

        Raises ValueError, naming the field, for what the model cannot do, and OctavoError when the engine fails.
        """
        params = _params(pooling_params, truncate_prompt_tokens, pooling)
        how = embedding_pooling(self._input.pooler, params, self.config.model.hidden_size)
        return [
            EmbeddingRequestOutput(output.request_id, EmbeddingOutput(vector), output.prompt_token_ids)
            for output, vector in self._pool(prompts, how, params, use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_task: str = "embed",
        pooling: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the results of `embed` or, with ``pooling_task`` "classify", of `classify`, as float32 tensors."""
        import torch

        params = _params(pooling_params, truncate_prompt_tokens, pooling)
        if pooling_task == "embed":
            how = embedding_pooling(self._input.pooler, params, self.config.model.hidden_size)
        elif pooling_task == "classify":
            how = class_pooling(self._input.pooler, params)
        else:
            raise ValueError(f"pooling_task {pooling_task!r} is not supported yet: use embed or classify")
        return [
            PoolingRequestOutput(output.request_id, PoolingOutput(torch.tensor(vector)), output.prompt_token_ids)
            for output, vector in self._pool(prompts, how, params, use_tqdm)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each of the model's classes, for every prompt. Raises as `embed`."""
        params = _params(pooling_params, truncate_prompt_tokens, None)
        how = class_pooling(self._input.pooler, params)
        return [
            ClassificationRequestOutput(output.request_id, ClassificationOutput(probs), output.prompt_token_ids)
            for output, probs in self._pool(prompts, how, params, use_tqdm)
        ]

    def score(
        self,
        data_1: Text | Sequence[Text],
        data_2: Text | Sequence[Text],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one of ``data_1`` with each of ``data_2``, or each with its own.

        A reranker reads both at once and gives the sigmoid of its one logit, unless its files say otherwise; a model of
        vectors gives their cosine. Raises as `embed`.
        """
        queries, documents = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        check_pairs(queries, documents, ("data_1", "data_2"))
        params = _params(pooling_params, truncate_prompt_tokens, None)

        def field(is_document: bool, place: int) -> str:
            return f"data_{2 if is_document else 1}[{place}]"

        plan = plan_scores(self._input, queries, documents, params, self._new_id, field)
        outputs = self._run(plan.requests, [None] * len(plan.requests), use_tqdm)
        scores = plan.scores([_result(number, output) for number, output in enumerate(outputs)])
        ids = [output.request_id for output in outputs[-len(scores) :]]
        return [
            ScoringRequestOutput(request_id, ScoringOutput(score), token_ids)
            for request_id, score, token_ids in zip(ids, scores, plan.token_ids, strict=True)
        ]

    def _pool(
        self, prompts: Prompt | Sequence[Prompt], how: Pooling, params: PoolingParams, show_progress: bool
    ) -> Iterable[tuple[RequestOutput, list[float]]]:
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        limit = params.truncate_prompt_tokens
        before = prompt_before(self._input.pooler, params) if how.task == "embed" else ""
        requests = [
            self._input.process_pooling(self._new_id(), prompt, how, truncate_prompt_tokens=limit, before=before)
            for prompt in many
        ]
        outputs = self._run(requests, [None] * len(requests), show_progress)
        return [(output, _result(number, output)) for number, output in enumerate(outputs)]


def is_one_prompt(prompts: Any) -> bool:
    """True if ``prompts`` is a single prompt, not a list of several."""
    return isinstance(prompts, (str, dict)) or (
        isinstance(prompts, (list, tuple)) and bool(prompts) and all(isinstance(p, int) for p in prompts)
    )


def _result(number: int, output: RequestOutput) -> list[float]:
    if output.embedding is None:
        raise OctavoError(f"prompt {number} could not be embedded: {output.error}")
    return output.embedding


def _params(given: PoolingParams | None, truncate_prompt_tokens: int | None, pooling: str | None) -> PoolingParams:
    params = PoolingParams() if given is None else given
    if truncate_prompt_tokens is not None:
        params = replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
    return params if pooling is None else replace(params, pooling=pooling)


def _texts(given: Any, name: str) -> list[str]:
    texts = [text_of(one) for one in ([given] if isinstance(given, (str, dict)) else given)]
    for text in texts:
        if not isinstance(text, str):
            kind = "an object without text" if isinstance(text, dict) else type(text).__name__
            raise ValueError(f"{name} must be a text or a list of texts, got {kind} in it")
    return texts
