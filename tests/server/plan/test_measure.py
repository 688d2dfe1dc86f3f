"""Measures that are kept are those that would be made again, and nothing that happens to the cache changes a plan."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import FAMILIES, make_model

from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError
from octavo.interface.engine_config import EngineConfig
from octavo.interface.ranks import ONE_STAGE, Stage
from octavo.memory.ledger import ModelMemory
from octavo.plan import measure as measuring
from octavo.plan.measure import measure
from octavo.worker.model_memory import measure_built

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS = {"llama": "LlamaConfig", "experts": "Qwen3MoeConfig", "windows": "MistralConfig"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def write(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(MODELS[kind], FAMILIES["llama"][1] | (EXPERTS if kind == "experts" else {}))
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def config_of(folder: Path, device: str = "cpu", **options: Any) -> EngineConfig:
    args = EngineArgs(model=str(folder), load_format="dummy", max_model_len=options.pop("length", 100), **options)
    return replace(args.create_engine_config(progress=False), device=device)


def outcome(call: Any, *args: Any, **named: Any) -> ModelMemory | str:
    try:
        found: ModelMemory = call(*args, **named)
    except (ConfigError, ModelError) as error:
        return str(error)
    return found


def test_kept_measures_are_those_that_would_be_made(tmp_path: Path) -> None:
    """Of every way to run a model that changes what it takes, refusals too; asked for twice, in any order."""
    folders = [write(tmp_path / kind, kind) for kind in MODELS]
    folders += [write(tmp_path / "fp8", quantization_config=FP8), write(tmp_path / "tied", tie_word_embeddings=True)]
    rng = random.Random(4)
    for _ in range(60):
        options: dict[str, Any] = {
            "dtype": rng.choice(["auto", "float32", "float16", "bfloat16"]),
            "length": rng.choice([50, 100]),
            "kv_cache_dtype": rng.choice(["auto", "bfloat16", "int8"]),
            "block_size": rng.choice([16, 32]),
        }
        folder = rng.choice(folders)
        options["enable_expert_parallel"] = folder.name == "experts" and rng.random() < 0.5
        config = config_of(folder, rng.choice(["cpu", "cuda"]), **options)
        ranks, stage = rng.choice([1, 2]), rng.choice([ONE_STAGE, ONE_STAGE, Stage(0, 2), Stage(1, 2)])
        made = outcome(measure_built, config, ranks, stage, is_described=True)
        for _ in range(2):
            assert outcome(measure, config, ranks, stage) == made, (options, ranks)


def test_other_configurations_and_headers_are_measured_anew(tmp_path: Path) -> None:
    model = make_model("LlamaConfig", FAMILIES["llama"][1])
    folder, found = tmp_path / "m", set()
    for dtype in ("float32", "bfloat16"):
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        args = EngineArgs(model=str(folder), max_model_len=100, dtype="float32")
        found.add(measure(replace(args.create_engine_config(progress=False), device="cpu"), 1).weights)
    assert len(found) == 2, "the checkpoint's own bits are kept"
    sizes = {measure(config_of(write(tmp_path / "m2", num_hidden_layers=layers)), 1).parameters for layers in (1, 2)}
    assert len(sizes) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"x": 1}', "entries", "folder", "read-only"])
def test_a_damaged_cache_costs_time_alone(damage: bytes | str, tmp_path: Path, plans: Path) -> None:
    config = config_of(write(tmp_path / "m"))
    first = measure(config, 1)
    (path,) = plans.glob("*.json")
    if damage == "entries":
        kept = json.loads(path.read_text())
        for name in kept:
            kept[name] = of_other_fields(kept[name])
        path.write_text(json.dumps(kept))
    elif isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            plans.rmdir()
            plans.write_bytes(b"no folder")
    assert measure(config, 1) == measure(config, 1) == first


def of_other_fields(entry: dict[str, Any]) -> Any:
    return {**entry, "weights": None, "specs": [[{"size": 1}, 2]]}


def test_a_kept_measure_needs_no_torch_and_another_names_the_way_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    assert main(["plan", str(folder), "--memory", "4GiB", "--max-model-len", "100"]) == 0
    code = (
        "import sys; sys.modules['torch'] = None; from octavo.cli.main import main; "
        f"sys.exit(main(['plan', {str(folder)!r}, '--memory', '4GiB', '--max-model-len', sys.argv[1]]))"
    )
    seen = []
    for length in ("100", "64"):  # of another length, tables have other sizes
        ran = subprocess.run([sys.executable, "-c", code, length], capture_output=True, text=True)
        seen.append((ran.returncode, ran.stderr))
    assert seen[0] == (0, ""), seen
    assert seen[1][0] != 0 and "pip install" in seen[1][1] and "Traceback" not in seen[1][1], seen


def test_a_release_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: Path) -> None:
    config = config_of(write(tmp_path / "m"))
    measure(config, 1)
    monkeypatch.setattr(measuring, "_code", lambda: ("another", 0))
    measure(config, 1)
    assert len(list(plans.glob("*.json"))) == 2
