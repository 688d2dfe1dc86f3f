"""`LLM` as scripts written for vLLM use it: its arguments, its methods, the shapes of what comes back."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from octavo import LLM, SamplingParams
from octavo.cli.serve import add_arguments
from octavo.engine import vllm_arguments
from octavo.engine.args import EngineArgs
from octavo.engine.llm_options import LLMOptions, split_arguments
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = "The capital of France is a city of many bridges, and its name is"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(
        max_num_seqs=4,
        max_model_len=256,
        num_gpu_blocks_override=64,
        tensor_parallel_size=1,
        swap_space=4,
        trust_remote_code=True,
        disable_log_stats=False,
        tokenizer_mode="auto",
        enable_chunked_prefill=True,
        served_model_name=["mine", "other"],
        max_logprobs=3,
        dtype=torch.float32,
        seed=None,
        quantization=None,
        override_generation_config={"temperature": 0.25},
        enable_lora=False,
        speculative_config=None,
        hf_overrides={},
        limit_mm_per_prompt={},
        use_tqdm_on_load=False,
        chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    )


def test_arguments_that_mean_something_are_effective(llm: LLM) -> None:
    assert llm.config.model.dtype == "float32" and llm.config.model.seed == 0
    assert llm.get_default_sampling_params().temperature == 0.25
    with pytest.raises(ValueError, match="logprobs"):
        llm.generate(PROMPT, SamplingParams(logprobs=4), use_tqdm=False)
    asked = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)[0]
    assert asked.prompt == "<user>hi"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size 2", "9 attention heads", "1, 3, 9"]),
        ({"nnodes": 3}, ["tensor_parallel_size 1 on 3 nodes", "give 3 or a multiple of it"]),
        ({"pipeline_parallel_size": 31}, ["pipeline_parallel_size 31", "30 layers"]),
        ({"decode_context_parallel_size": 2}, ["decode_context_parallel_size=2", "1"]),
        ({"tokenizer_mode": "slow"}, ["tokenizer_mode='slow'", "tokenizer.json"]),
        ({"enable_chunked_prefill": False}, ["enable_chunked_prefill", "chunks"]),
        ({"lora_dtype": "float16"}, ["lora_dtype", "not supported yet"]),
        ({"max_loras": 2}, ["max_loras", "enable_lora"]),
        ({"hf_token": "hf_secret"}, ["hf_token", "HF_TOKEN"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "yarn", "object"]),
        ({"rope_theta": 0}, ["rope_theta", "above 0"]),
        ({"cpu_offload_gb": 4}, ["cpu_offload_gb=4", "0"]),
        ({"dtype": torch.int8}, ["dtype", "int8"]),
        ({"override_generation_config": "greedy"}, ["override_generation_config", "dict", "greedy"]),
    ],
)
def test_impossible_arguments_are_refused_with_the_reason(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**given)
    message = str(refused.value)
    assert "\n" not in message and "secret" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("given", "meant"), [("max_sequences", "max_num_seqs"), ("tensor_paralel_size", "tensor_parallel_size")]
)
def test_unknown_arguments_name_the_one_that_was_meant(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"{given}.*did you mean {meant}\?"):
        LLM(**{given: 1})
    with pytest.raises(TypeError) as unknown:
        LLM(zzzzzz=1)
    assert "did you mean" not in str(unknown.value)


def test_arguments_without_effect_say_so_once_and_their_absence_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        quiet = {"trust_remote_code": False, "compilation_config": None, "disable_cascade_attn": False}
        split_arguments({"swap_space": 4, **quiet})
    assert [record.getMessage() for record in caplog.records] == [
        "swap_space=4 has no effect: preempted requests are recomputed"
    ]


def test_the_command_line_and_the_class_know_the_same_arguments() -> None:
    """What `serve` takes or refuses as a flag of vLLM's, `LLM` takes or refuses as a keyword."""
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {name.removeprefix("--").replace("-", "_") for name in parser._option_string_actions}
    tables = (vllm_arguments.ALWAYS, vllm_arguments.ONLY, vllm_arguments.NO_EFFECT, vllm_arguments.NOT_SUPPORTED_YET)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "one name in two tables"
    assert set(names) <= flags
    assert not set(names) & EngineArgs.field_names(), "a field of ours is no foreign argument"
    for name in EngineArgs.field_names():
        assert name in flags
    # Of the server's own options those that vLLM's engine has, too, are not lost on LLM.
    engine_options = {"served_model_name", "max_logprobs", "disable_log_stats", "override_generation_config"}
    assert engine_options <= set(ServerArgs.__dataclass_fields__) & set(LLMOptions.__dataclass_fields__)


def test_metrics_are_objects_and_add_up(llm: LLM) -> None:
    def read() -> dict[str, float]:
        metrics = llm.get_metrics()
        assert all(metric.labels.get("model_name", "mine") == "mine" for metric in metrics)
        return {
            metric.name + metric.labels.get("finished_reason", ""): metric.value  # type: ignore[attr-defined]
            for metric in metrics
        }

    before = read()
    outputs = llm.generate([PROMPT + " A", PROMPT + " B"], GREEDY, use_tqdm=False)
    again = llm.generate(PROMPT + " A", GREEDY, use_tqdm=False)
    change = {name: value - before[name] for name, value in read().items()}
    prompts = [len(output.prompt_token_ids) for output in (*outputs, *again)]
    assert change["vllm:prompt_tokens"] == change["vllm:prefix_cache_queries"] == sum(prompts)
    assert change["vllm:prefix_cache_hits"] >= again[0].num_cached_tokens == prompts[0] - 1
    assert change["vllm:generation_tokens"] == 12
    assert change["vllm:request_successlength"] == 3 and change["vllm:request_successstop"] == 0
    assert change["vllm:num_preemptions"] == 0
    assert read()["vllm:num_requests_running"] == read()["vllm:num_requests_waiting"] == 0
    info = next(metric for metric in llm.get_metrics() if metric.name == "vllm:cache_config_info").labels
    assert (info["num_gpu_blocks"], info["kv_cache_size_tokens"], info["block_size"]) == ("64", "1024", "16")
    assert float(info["kv_cache_max_concurrency"]) == 4.0


def test_a_prefix_cache_that_is_reset_is_empty_and_right(llm: LLM) -> None:
    first = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    again = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == first.outputs[0].token_ids
    llm.engine.check_integrity()
    # Not while somebody reads from it.
    llm.engine.add_request(llm._input.process("running", PROMPT, GREEDY))
    llm.engine.step()
    assert llm.reset_prefix_cache() is False
    llm.engine.abort_requests(["running"])
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert llm.reset_prefix_cache() is True
    llm.engine.check_integrity()


def test_vectors_come_in_vllm_s_shapes(llm: LLM) -> None:
    texts = ["one", "two words"]
    vectors = llm.embed(texts, use_tqdm=False)
    size = llm.config.model.hidden_size
    for vector, text in zip(vectors, texts, strict=True):
        assert len(vector.outputs.embedding) == vector.outputs.hidden_size == size
        assert vector.prompt_token_ids == llm.get_tokenizer().encode(text) and vector.finished
    assert np.array(vectors).shape == torch.tensor(vectors).shape == (2, size), "a list of them is a matrix"
    encoded = llm.encode(texts, pooling_task="embed", use_tqdm=False)
    for pooled, vector in zip(encoded, vectors, strict=True):
        assert pooled.outputs.data.dtype == torch.float32
        assert pooled.outputs.data.tolist() == pytest.approx(vector.outputs.embedding, abs=1e-7)
    with pytest.raises(ValueError, match="token_embed"):
        llm.encode(texts, pooling_task="token_embed")


# The tokenizer.

TEXTS = ["Hello, world!", "naïve café 日本語 🤖", "", " <|im_start|>user\nhi<|im_end|>"]
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Any:
    path = Path(llm.config.model.files.weights[0])
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_the_tokenizer_is_read_like_transformers(llm: LLM, reference: Any) -> None:
    ours = llm.get_tokenizer()
    for text in TEXTS:
        ids = reference.encode(text)
        assert ours.encode(text) == ids == ours(text).input_ids == ours(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids) == reference.decode(ids), "the default keeps special tokens"
        assert ours.tokenize(text) == reference.tokenize(text)
        assert ours.convert_tokens_to_ids(ours.tokenize(text)) == reference.encode(text, add_special_tokens=False)
    assert ours(TEXTS)["attention_mask"] == reference(TEXTS)["attention_mask"]
    assert ours.batch_decode([[5], [6, 7]]) == reference.batch_decode([[5], [6, 7]])
    assert ours.get_vocab() == reference.get_vocab() and len(ours) == len(reference)
    for name in ("eos_token", "eos_token_id", "bos_token", "bos_token_id", "vocab_size", "is_fast"):
        assert getattr(ours, name) == getattr(reference, name), name
    assert ours.convert_tokens_to_ids("Hello") == reference.convert_tokens_to_ids("Hello")
    assert set(reference.all_special_ids) <= set(ours.all_special_ids)
    assert not hasattr(ours, "no_such_thing")


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}])
def test_chats_are_rendered_like_transformers(llm: LLM, reference: Any, options: dict[str, Any]) -> None:
    ours = llm.get_tokenizer()
    expected = reference.apply_chat_template(CHAT, tokenize=False, **options)
    assert ours.apply_chat_template(CHAT, tokenize=False, **options) == expected
    ids = reference.apply_chat_template(CHAT, return_dict=False, **options)
    assert ours.apply_chat_template(CHAT, **options) == ids
    assert ours.apply_chat_template([CHAT, CHAT], **options) == [ids, ids]
    assert ours.apply_chat_template(CHAT, return_dict=True, **options)["input_ids"] == ids


def test_options_that_the_tokenizer_lacks_are_not_dropped(llm: LLM) -> None:
    for call in (lambda t, **o: t("x", **o), lambda t, **o: t.encode("x", **o)):
        with pytest.raises(ValueError, match="return_tensors"):
            call(llm.get_tokenizer(), return_tensors="pt")
    with pytest.raises(ValueError, match="truncation"):
        llm.get_tokenizer().apply_chat_template(CHAT, truncation=True)


def test_a_checkpoint_without_a_tokenizer(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Token ids in and out, in a process that has nothing but what `LLM` is said to need."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_checkpoints["llama"] / name, tmp_path)
    program = f"""
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"fastapi", "starlette", "pydantic", "zmq", "msgspec", "gguf", "uvicorn",
                                     "prometheus_client", "transformers", "httpx", "openai", "rich"}}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from octavo import LLM, SamplingParams
llm = LLM({str(tmp_path)!r}, dtype="float32", skip_tokenizer_init=True)
output = llm.generate({{"prompt_token_ids": [5, 6, 7]}}, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
vector = llm.embed([5, 6, 7])[0].outputs.embedding
errors = []
for call in (llm.get_tokenizer, lambda: llm.chat([]), lambda: llm.generate("text")):
    try:
        call()
    except ValueError as error:
        errors.append(str(error))
metrics = {{m.name: m.value for m in llm.get_metrics()}}
assert llm.reset_prefix_cache()
print(json.dumps([output[0].outputs[0].token_ids, output[0].outputs[0].text, len(vector), errors,
                  metrics["vllm:generation_tokens"]]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    tokens, text, size, errors, generated = json.loads(run.stdout.splitlines()[-1])
    assert len(tokens) == 3 and text == "" and size == 64 and generated >= 3
    assert len(errors) == 3 and all("skip_tokenizer_init" in error for error in errors)


def test_images_are_refused_and_not_left_out(llm: LLM) -> None:
    with pytest.raises(ValueError, match="takes text only"):
        llm.generate(
            [{"prompt_token_ids": [5], "multi_modal_data": {"image": Image.new("RGB", (8, 8))}}], use_tqdm=False
        )
