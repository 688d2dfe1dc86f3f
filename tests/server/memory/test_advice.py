"""What `octavo plan` and refusals advise holds when it is followed, in plans and in engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.memory.advice import refusal, suggestions
from octavo.memory.dry_run import Plan, make_plan
from octavo.memory.ledger import DeviceMemory
from octavo.plan.gpus import GPUS
from octavo.plan.measure import measure
from octavo.plan.model import planned_model
from octavo.worker.worker import Worker

GIB, MIB = 1 << 30, 1 << 20
BASE = {"dtype": "bfloat16", "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
# The bytes of real models in a quarter of their layers, each four times as large: a plan takes time by the layer.
MODELS = {
    "14b": BASE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 4 * 13824,
        "num_hidden_layers": 12,
        "num_attention_heads": 4 * 40,
        "num_key_value_heads": 4 * 8,
        "head_dim": 128,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
    },
    "8b": BASE
    | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 4 * 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 4 * 32,
        "num_key_value_heads": 4 * 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "windows": BASE
    | {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 4 * 8192,
        "num_hidden_layers": 6,
        "num_attention_heads": 4 * 32,
        "num_key_value_heads": 4 * 32,
        "head_dim": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 65536,
        "sliding_window": 4096,
    },
}
TINY = BASE | {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 112,
    "vocab_size": 320,
    "max_position_embeddings": 32768,
}

GPU = GPUS["l4"].memory()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, config in (MODELS | {"tiny": TINY}).items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    return path


def plan_of(model: Path, device: DeviceMemory, ranks: int, **options: Any) -> tuple[Plan, Any]:
    with planned_model(EngineArgs(model=str(model), load_format="dummy", **options)) as found:
        config = replace(found.config, device=device.kind)
        return make_plan(config, device, measure, ranks), config


def told(words: str) -> int:
    """The length of the sequences that a suggestion promises, if it does."""
    found = re.search(r"sequences of ([\d,]+)", words)
    return int(found[1].replace(",", "")) if found else 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*MODELS]),
    kind=st.sampled_from(["cuda", "cpu"]),
    gib=st.integers(6, 48),
    ranks=st.sampled_from([1, 2]),
    length=st.sampled_from([None, 4096, 8192, 65536, 131072]),
    seqs=st.sampled_from([None, 16, 256]),
)
def test_an_advised_plan_starts_with_its_promised_figures(
    name: str, kind: str, gib: int, ranks: int, length: int | None, seqs: int | None, folder: Path
) -> None:
    own = MODELS[name]["max_position_embeddings"]
    assert isinstance(own, int)
    asked: dict[str, Any] = {"max_num_seqs": seqs} | ({} if length is None else {"max_model_len": min(length, own)})
    device, model = replace(GPU, total=gib * GIB) if kind == "cuda" else DeviceMemory("cpu", gib * GIB), folder / name
    plan, config = plan_of(model, device, ranks, **asked)
    for way in suggestions(config, plan, measure):
        field, value = way.flag[2:].replace("-", "_"), int(way.value) if way.value.isdigit() else way.value
        changed = asked | {field: float(value) if field == "gpu_memory_utilization" else value}
        more = changed.pop("tensor_parallel_size", ranks)
        after, _ = plan_of(model, device, more, **changed)
        assert after.ledger is not None, way.text
        assert after.config.scheduler.max_model_len >= told(way.text), way.text
    if plan.ledger is None and (found := re.search(r"set --max-model-len to (\d+)", refusal(config, plan, measure))):
        longest = int(found[1])
        for tried, starts in ((longest, True), (longest + 1, False)):
            after, _ = plan_of(model, device, ranks, **asked | {"max_model_len": tried})
            assert (after.ledger is not None) == starts, (longest, tried)


@pytest.mark.parametrize("room", [2, 3, 9])
def test_an_engine_starts_with_the_length_that_its_refusal_names_and_with_no_longer_one(
    room: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is what the plan says, too. ``room``: MiB for the KV cache."""
    limit = (256 + 1 + room) * MIB * 10 // 9
    monkeypatch.setattr("octavo.system.limits.memory_limit", lambda: limit)

    def start(length: int) -> Worker:
        args = EngineArgs(
            model=str(folder / "tiny"),
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=length,
            max_num_seqs=4,
        )
        return Worker(args.create_engine_config(progress=False))

    with pytest.raises(ConfigError) as error:
        start(32768)
    found = re.search(r"set --max-model-len to (\d+) or less", str(error.value))
    assert found is not None, error.value
    longest = int(found[1])
    assert f"--max-model-len {longest} (" in str(error.value)
    assert start(longest).ledger.max_model_len == longest
    with pytest.raises(ConfigError):
        start(longest + 1)
    device = DeviceMemory("cpu", limit)
    plan, _ = plan_of(folder / "tiny", device, 1, max_model_len=32768, max_num_seqs=4)
    assert plan.longest == longest


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def said(*words: str) -> list[str]:
        assert main(["plan", *words]) == 0
        return capsys.readouterr().out.splitlines()

    yield said


def test_a_context_that_is_cut_is_told_with_both_lengths(folder: Path, lines: Any) -> None:
    (line,) = [one for one in lines(str(folder / "8b"), "--memory", "17GiB") if "not the model's" in one]
    assert re.match(r"max_model_len is [\d,]+, not the model's 8,192: ", line)
    said = json.loads(lines(str(folder / "8b"), "--memory", "17GiB", "--json")[0])
    assert any("not the model's 8,192" in reason for reason in said["reasons"]) and said["fits"]
    assert not any("not the model's" in one for one in lines(str(folder / "8b"), "--gpu", "a100-40gb"))
