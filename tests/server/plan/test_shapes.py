"""Sizes in numbers are those of the model that is built: every family, dtype, format and number of ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from support.family_cases import FAMILY_CASES, architecture

from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError
from octavo.interface.architectures import ENCODERS, IMAGE_READERS, MODELS
from octavo.plan.measure import measure_in_numbers
from octavo.plan.shapes import _FAMILIES
from octavo.worker.model_memory import measure_built

OPTIONS = [
    {"quantization": quantization, "dtype": dtype, "kv_cache_dtype": kv_dtype}
    for quantization in (None, "int8")
    for dtype in ("auto", "float32", "float16")
    for kv_dtype in ("auto", "bfloat16")
]


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_numbers_are_those_of_the_model_that_is_built(case: str, tmp_path: Path) -> None:
    config_class, settings = FAMILY_CASES[case]
    made = getattr(transformers, config_class)(**settings)
    config = json.loads(made.to_json_string(use_diff=False))
    config.setdefault("architectures", None)
    config["architectures"] = config["architectures"] or [architecture(FAMILY_CASES[case])]
    config["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    random.seed(case)
    for options in random.sample(OPTIONS, 2):
        args = EngineArgs(model=str(tmp_path), load_format="dummy", max_model_len=100, **options)
        try:
            engine = args.create_engine_config(progress=False)
        except ConfigError:
            continue
        for device, ranks in (("cpu", 1), ("cpu", 2), ("cuda", 1), ("cuda", 2)):
            if (engine.model.architecture not in _FAMILIES) or (ranks == 2 and options["quantization"]):
                continue
            asked = replace(engine, device=device)
            try:
                built = measure_built(asked, ranks)
            except (ConfigError, ModelError):
                continue
            assert measure_in_numbers(asked, ranks) == built, (options, device, ranks)
            if ranks == 2 and engine.model.num_experts:
                asked = replace(asked, parallel=replace(asked.parallel, enable_expert_parallel=True))
                built = measure_built(asked, ranks)
                assert measure_in_numbers(asked, ranks) == built, "with whole experts on each rank"


def test_most_families_are_planned_without_torch() -> None:
    """Those with state of their own by layer, or a head of classes, are built instead."""
    left = {name for name in MODELS if name not in _FAMILIES and name not in ENCODERS}
    built = {"llama4", "gemma3n", "gemma4", "classifiers", "granite", "text_of_vision"}
    built |= {MODELS[name] for name in IMAGE_READERS}
    assert {MODELS[name] for name in left} <= built, left
    assert set(_FAMILIES) <= set(MODELS)
