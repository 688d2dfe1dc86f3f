"""Modules under vLLM's paths: `sed s/vllm/octavo/` on a program's imports finds the same names."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import subprocess
import sys

import pytest

import octavo
from octavo import SamplingParams

NAMES = {
    "octavo": "LLM AsyncLLMEngine AsyncEngineArgs EngineArgs SamplingParams PoolingParams RequestOutput "
    "CompletionOutput TextPrompt TokensPrompt PromptType EmbeddingRequestOutput ClassificationRequestOutput",
    "octavo.sampling_params": "SamplingParams BeamSearchParams RequestOutputKind StructuredOutputsParams",
    "octavo.pooling_params": "PoolingParams",
    "octavo.inputs": "TextPrompt TokensPrompt PromptType",
    "octavo.outputs": "RequestOutput CompletionOutput PoolingRequestOutput EmbeddingRequestOutput",
    "octavo.logprobs": "Logprob",
    "octavo.sequence": "Logprob RequestMetrics",
    "octavo.lora.request": "LoRARequest",
    "octavo.beam_search": "BeamSearchOutput BeamSearchSequence",
    "octavo.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "octavo.engine.async_llm_engine": "AsyncLLMEngine",
    "octavo.v1.engine.async_llm": "AsyncLLM",
    "octavo.v1.metrics.reader": "Counter Gauge Metric Vector",
    "octavo.entrypoints.llm": "LLM",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_vllm_s_names_and_no_others(module: str) -> None:
    found = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(found, name) is getattr(octavo, name, getattr(found, name)), "one class under all its names"


def test_they_need_nothing_of_the_server() -> None:
    """The offline engine's names are there without the packages that only serving needs."""
    modules = [module for module in NAMES if module != "octavo"]
    program = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"fastapi", "starlette", "pydantic", "zmq", "msgspec", "gguf", "uvicorn"}}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
for module in {modules!r}:
    importlib.import_module(module)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ("guided_decoding", "structured_outputs"),
        ("logits_processors", "logit_bias"),
        ("truncate_prompt_tokens", "token ids"),
        ("use_beam_search", "LLM.beam_search"),
        ("temprature", "did you mean temperature?"),
        ("xyzzy", "leave it out"),
    ],
)
def test_fields_that_are_elsewhere_say_where(field: str, instead: str) -> None:
    with pytest.raises(TypeError, match=field) as refused:
        SamplingParams(**{field: None})
    assert instead in str(refused.value)


def test_parameters_are_copied_as_any_object() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3)
    for other in (copy.copy(params), copy.deepcopy(params), dataclasses.replace(params)):
        assert other == params and other is not params
