"""A GGUF file's own words decide how its vectors are made: `pooling_type`, else what it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from support.gguf_files import write_gguf
from support.tiny_models import FAMILIES, make_model

from octavo import LLM
from octavo.engine.args import EngineArgs
from octavo.errors import ModelError


def written(path: Path, **metadata: Any) -> Path:
    def more(writer: GGUFWriter) -> None:
        for key, value in metadata.items():
            key = key.replace("__", ".")
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_string(key, value)

    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, make_model(*FAMILIES["qwen3"]), arch="qwen3", more=more)
    return path


def pooler(path: Path) -> Any:
    return EngineArgs(model=str(path), skip_tokenizer_init=True).create_engine_config(progress=False).model.pooler


@pytest.mark.parametrize(
    ("name", "metadata", "pooling"),
    [
        ("m", {"qwen3__pooling_type": 1}, "mean"),
        ("m", {"qwen3__pooling_type": 2}, "cls"),
        ("m", {"qwen3__pooling_type": 3}, "last"),
        ("m", {"qwen3__pooling_type": 0}, "mean"),
        ("m", {}, "mean"),
        ("Some-Embedding-Q8_0", {}, "last"),
        ("m", {"general__basename": "Qwen3-Embedding"}, "last"),
        ("Qwen3-Embedding", {"qwen3__pooling_type": 1}, "mean"),
        ("m", {"qwen3__pooling_type": 0, "general__name": "An Embedder"}, "last"),
    ],
)
def test_the_file_says_how_it_pools(name: str, metadata: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    found = pooler(written(tmp_path / f"{name}.gguf", **metadata))
    assert (found.pooling, found.normalize, found.tasks) == (pooling, True, ("generate", "embed"))


def test_a_vector_is_the_state_that_the_file_names(tmp_path: Path) -> None:
    prompt = [5, 17, 200, 31]
    with torch.inference_mode():
        states = make_model(*FAMILIES["qwen3"]).model(torch.tensor([prompt])).last_hidden_state[0]
    for kind, wanted in ((1, states.mean(0)), (2, states[0]), (3, states[-1])):
        path = written(tmp_path / f"{kind}.gguf", qwen3__pooling_type=kind)
        llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True)
        (output,) = llm.embed({"prompt_token_ids": prompt}, use_tqdm=False)
        assert (torch.tensor(output.outputs.embedding) - wanted / wanted.norm()).abs().max() <= 1e-4


def test_a_ranker_by_yes_and_no_is_one_by_its_answers(tmp_path: Path) -> None:
    """The rows of the head for the two tokens, which the converter writes again, are not needed."""
    words = ["no", "yes"]

    def more(writer: GGUFWriter) -> None:
        writer.add_uint32("qwen3.pooling_type", 4)
        writer.add_array("qwen3.classifier.output_labels", ["yes", "no"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        from support.gguf_files import BYTE_LEVEL_ALPHABET

        tokens = [*BYTE_LEVEL_ALPHABET, *words, "ye"]
        tokens += [f"[{i}]" for i in range(len(tokens), 320)]
        writer.add_token_list(tokens)
        writer.add_token_merges(["n o", "y e", "ye s"])
        writer.add_tensor("cls.output.weight", torch.zeros(2, 64).numpy())

    path = tmp_path / "m.gguf"
    write_gguf(path, make_model(*FAMILIES["qwen3"]), arch="qwen3", vocabulary=False, more=more)
    found = EngineArgs(model=str(path)).create_engine_config(progress=False).model.pooler
    assert found.tasks == ("generate", "classify") and found.token_ids == (256, 257)
    LLM(str(path), dtype="float32")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"qwen3__pooling_type": 7}, r"qwen3\.pooling_type must be from 0 to 4, got 7"),
        ({"qwen3__pooling_type": "mean"}, r"qwen3\.pooling_type must be from 0 to 4, got 'mean'"),
        ({"qwen3__pooling_type": 4}, r"pooling_type 4\) by labels"),
        ({"qwen3__pooling_type": 4, "qwen3__classifier__output_labels": ["a", "b"]}, "only answers yes and no"),
        ({"qwen3__attention__causal": False}, r"qwen3\.attention\.causal is false"),
    ],
)
def test_unsupported_pooling_is_refused_by_key_and_value(metadata: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        pooler(written(tmp_path / "m.gguf", **metadata))
