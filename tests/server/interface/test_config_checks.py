"""No number of a model's files is used before it is checked: what cannot be meant is one error, at once."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cpu_time
from support.gguf_files import write_metadata
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.errors import OctavoError
from octavo.layers.parallel import TensorParallel
from octavo.loader.load_model import build_model

HUGE = 10**4000
INTEGERS = [0, -1, -5, 10**9, 10**12, HUGE, 1.5, float("nan"), float("inf"), True, "x", "64", [], [64], {}]
NUMBERS = [-1.0, 1e300, HUGE, float("nan"), float("inf"), float("-inf"), True, "x", [1.0], {}]
FLAGS = ["false", 0, 1, [], {"a": 1}]
# Every field that sizes, loops or divides, and what it must not be.
COMMON = {
    **dict.fromkeys(["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"], INTEGERS),
    "max_position_embeddings": INTEGERS,
    "eos_token_id": ["2", -1, 1.5, HUGE, True, ["x"], [[2]], {}],
    "tie_word_embeddings": FLAGS,
    "quantization_config": ["fp8", 3, [], {"quant_method": ["fp8"]}],
}
LLAMA = COMMON | {
    **dict.fromkeys(["num_key_value_heads", "intermediate_size"], INTEGERS),
    "head_dim": [*INTEGERS, 63, 17, 1],
    "rms_norm_eps": [*NUMBERS, 2],
    "rope_theta": [*NUMBERS, 0, 1, -1e4],
    "hidden_act": ["mish", 3, ["silu"]],
    "sliding_window": [x for x in INTEGERS if x != 10**9],
    "max_window_layers": INTEGERS[1:],
    "original_max_position_embeddings": INTEGERS,
    "layer_types": ["full_attention", ["full_attention"], ["x", "x", "x"], [[], [], []], {}, 3],
    "rope_scaling": [
        "linear",
        4,
        ["linear"],
        {"rope_type": ["linear"], "factor": 2.0},
        {"rope_type": "magic"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "4"},
        {"rope_theta": 0},
        {"rope_theta": "x"},
    ],  # without a type it is the default one
    **dict.fromkeys(["attention_bias", "mlp_bias", "use_sliding_window"], FLAGS),
}
GEMMA = {key: values for key, values in LLAMA.items() if key != "hidden_act"} | {
    "hidden_activation": ["mish", 3, ["silu"]],
    "query_pre_attn_scalar": [*NUMBERS, 0],
    "attn_logit_softcapping": [*NUMBERS, 0],
    "final_logit_softcapping": [*NUMBERS, 0],
    "rope_local_base_freq": [*NUMBERS, 0, 1],
    "use_bidirectional_attention": [True, 1],
}
QWEN = LLAMA | {"sliding_window": [x for x in INTEGERS if x not in (0, 10**9)]}  # 0: none, as transformers writes it
FIELDS = dict.fromkeys(("gemma2", "gemma3"), GEMMA) | dict.fromkeys(("qwen2", "qwen3"), QWEN)
OPT = COMMON | {
    **dict.fromkeys(["ffn_dim", "word_embed_proj_dim"], INTEGERS),
    "activation_function": ["mish", 3],
    **dict.fromkeys(["enable_bias", "do_layer_norm_before", "layer_norm_elementwise_affine"], FLAGS),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {
    **dict.fromkeys(["beta_fast", "beta_slow", "attention_factor"], (YARN, [*NUMBERS, 0])),
    "factor": (YARN, [*NUMBERS, 0, 1e-300]),
    **dict.fromkeys(["low_freq_factor", "high_freq_factor"], (LLAMA3, [*NUMBERS, 0])),
    **dict.fromkeys(["mscale", "mscale_all_dim"], (YARN, NUMBERS)),
    "rope_theta": (YARN, [*NUMBERS, 0, 1]),
    "original_max_position_embeddings": (LLAMA3, INTEGERS),
    "truncate": (YARN, FLAGS),
}
GGUF_INTEGERS = [0, -5, 10**9, 10**12, 1.5, float("nan"), True, "x", [64, 65]]
GGUF_NUMBERS = [-1.0, 1e30, float("nan"), float("inf"), True, "x", [1, 2]]
GGUF = {
    **dict.fromkeys(
        [
            "embedding_length",
            "block_count",
            "feed_forward_length",
            "context_length",
            "attention.head_count",
            "attention.head_count_kv",
        ],
        GGUF_INTEGERS,
    ),
    "attention.key_length": [*GGUF_INTEGERS, 63],
    "rope.dimension_count": [*GGUF_INTEGERS, 8, 15, 17, 24, 128],
    "attention.layer_norm_rms_epsilon": GGUF_NUMBERS,
    "rope.freq_base": [*GGUF_NUMBERS, 0.0],
    "rope.scaling.factor": [x for x in GGUF_NUMBERS if x is not True],
    "attention.sliding_window": [x for x in GGUF_INTEGERS if x not in (0, 10**9)],
}


@pytest.fixture(scope="module")
def configs(tiny_checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {family: json.loads((path / "config.json").read_text()) for family, path in tiny_checkpoints.items()}


def start(model: Path) -> None:
    """All that an engine does before it reads weights."""
    config = EngineArgs(model=str(model), load_format="dummy", skip_tokenizer_init=True).create_engine_config()
    build_model(config.model, "meta", TensorParallel())


def refusal(model: Path, case: str) -> str:
    """The one line with which ``model`` is refused, at once and without taking memory."""
    tracemalloc.start()
    try:
        with cpu_time.at_most(1), pytest.raises(OctavoError) as refused:
            start(model)
            pytest.fail(f"{case} is taken")
        text = str(refused.value)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in text and len(text) < 500, text
    return text


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_values_of_config_json_are_refused_by_field(
    family: str, configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    start(write_config(tmp_path, configs[family]))
    for field, values in (OPT if family == "opt" else FIELDS.get(family, LLAMA)).items():
        for value in values:
            case = f"{field}={value!s:.50}"
            text = refusal(write_config(tmp_path, configs[family] | {field: value}), case)
            named = {"mish": "mish", "rope_scaling": "rope"}.get(value if value == "mish" else field, field)
            assert named in text, f"{case}: {text}"


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_hostile_values_of_rope_scaling_are_refused_by_field(
    place: str, configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    plain = {key: value for key, value in configs["llama"].items() if key != "rope_parameters"}
    for field, (table, values) in ROPE.items():
        start(write_config(tmp_path, plain | {place: table}))
        for value in values:
            case = f"{field}={value!s:.50}"
            text = refusal(write_config(tmp_path, plain | {place: table | {field: value}}), case)
            assert f"{place}.{field}" in text, f"{case}: {text}"
    text = refusal(write_config(tmp_path, plain | {place: LLAMA3 | {"high_freq_factor": 1.0}}), "equal factors")
    assert f"{place}.high_freq_factor must be above {place}.low_freq_factor" in text


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**9),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([-1, 0, 1, 2, 3, 8, 63, 64, 96, 1 << 20]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), st.one_of(st.floats(), st.text(max_size=8))),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_values_give_a_model_or_one_line(
    family: str, configs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(family)
    known = sorted(OPT if family == "opt" else LLAMA | {"rope_parameters": None, "partial_rotary_factor": None})

    @settings(max_examples=60, deadline=None)
    @given(changes=st.dictionaries(st.sampled_from(known), ANYTHING, min_size=1, max_size=3))
    def check(changes: dict[str, Any]) -> None:
        # Depth alone makes building slow, and it is bounded above.
        if isinstance(layers := changes.get("num_hidden_layers"), int) and 8 < layers < 1025:
            changes["num_hidden_layers"] = 8
        try:
            start(write_config(folder, configs[family] | changes))
        except OctavoError as error:
            assert "\n" not in str(error) and len(str(error)) < 500

    check()


def gguf(path: Path, arch: str, changes: dict[str, Any]) -> Path:
    values: dict[str, Any] = {
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "context_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "rope.dimension_count": 16,
    } | changes

    def tensors(writer: GGUFWriter) -> None:
        writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
        writer.add_tensor("output_norm.weight", np.zeros(64, np.float32))

    named = {key if key.startswith("tokenizer.") else f"{arch}.{key}": value for key, value in values.items()}
    write_metadata(path, arch, named, tensors)
    return path


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_hostile_values_of_gguf_metadata_are_refused_by_key(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    start(gguf(tmp_path / "good.gguf", arch, {}))
    cases = [(field, value) for field, values in GGUF.items() for value in values]
    cases += [("tokenizer.ggml.eos_token_id", value) for value in ("2", True, -1, 1.5)]
    for number, (field, value) in enumerate(cases):
        text = refusal(gguf(tmp_path / f"{number}.gguf", arch, {field: value}), f"{field}={value!r}")
        assert field in text, f"{field}={value!r}: {text}"


def test_fields_that_a_family_lacks_are_ignored(tmp_path: Path) -> None:
    """As in transformers; a factor above 1 once wrote past the end of a buffer."""
    model = make_model(*FAMILIES["llama"])
    prompt, params = [{"prompt_token_ids": list(range(3, 40))}], SamplingParams(temperature=0, max_tokens=5)
    factor, found = "partial_rotary_factor", []
    for name, changes in (("plain", {}), ("more", {factor: 4.0}), ("less", {factor: 0.3})):
        model.save_pretrained(tmp_path / name)
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        config["rope_parameters"] |= changes
        path.write_text(json.dumps(config | changes))
        llm = LLM(str(tmp_path / name), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64)
        found.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1] == found[2] and len(found[0]) == 5
    path = write_config(tmp_path / "opt", json.loads((tmp_path / "plain/config.json").read_text()))
    opt = {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "head_dim": 63, "num_key_value_heads": 3}
    start(write_config(path, json.loads((path / "config.json").read_text()) | opt))
    assert torch.get_default_dtype() == torch.float32
