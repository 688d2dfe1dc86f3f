"""Octavo: a paged-attention engine that serves large language models, offline and behind OpenAI's API.

Names are imported lazily: the API process uses this package without ever importing torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from octavo.version import __version__ as __version__

# Read by OpenMP when torch is loaded. Its threads otherwise spin for milliseconds at the end of every parallel region,
# which on a machine that is not ours alone (another pod, our own HTTP process) costs ten times what waking them does.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from octavo.engine.args import EngineArgs as EngineArgs
    from octavo.engine.async_llm_engine import AsyncLLM as AsyncLLM
    from octavo.engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from octavo.engine.llm_options import AsyncEngineArgs as AsyncEngineArgs
    from octavo.interface.beam_search import BeamSearchParams as BeamSearchParams
    from octavo.interface.lora import LoRARequest as LoRARequest
    from octavo.interface.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from octavo.interface.outputs import CompletionOutput as CompletionOutput
    from octavo.interface.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from octavo.interface.outputs import PoolingRequestOutput as PoolingRequestOutput
    from octavo.interface.outputs import RequestOutput as RequestOutput
    from octavo.interface.outputs import ScoringRequestOutput as ScoringRequestOutput
    from octavo.interface.pooling_params import PoolingParams as PoolingParams
    from octavo.interface.prompts import PromptType as PromptType
    from octavo.interface.prompts import TextPrompt as TextPrompt
    from octavo.interface.prompts import TokensPrompt as TokensPrompt
    from octavo.interface.sampling_params import SamplingParams as SamplingParams
    from octavo.interface.structured_output import StructuredOutputsParams as StructuredOutputsParams
    from octavo.llm import LLM as LLM

_EXPORTS = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.engine.async_llm_engine",
    "AsyncLLMEngine": "octavo.engine.async_llm_engine",
    "AsyncEngineArgs": "octavo.engine.llm_options",
    "EngineArgs": "octavo.engine.args",
    "BeamSearchParams": "octavo.interface.beam_search",
    "PromptType": "octavo.interface.prompts",
    "TextPrompt": "octavo.interface.prompts",
    "TokensPrompt": "octavo.interface.prompts",
    "LoRARequest": "octavo.interface.lora",
    "SamplingParams": "octavo.interface.sampling_params",
    "StructuredOutputsParams": "octavo.interface.structured_output",
    "RequestOutput": "octavo.interface.outputs",
    "CompletionOutput": "octavo.interface.outputs",
    "EmbeddingRequestOutput": "octavo.interface.outputs",
    "PoolingRequestOutput": "octavo.interface.outputs",
    "PoolingParams": "octavo.interface.pooling_params",
    "ScoringRequestOutput": "octavo.interface.outputs",
    "ClassificationRequestOutput": "octavo.interface.outputs",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
