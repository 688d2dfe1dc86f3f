"""What GGUF files are held in, by their headers alone: every family, with tensors of any type."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_families import LAYOUTS, write_family

from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.gguf.header import GGUFFile
from octavo.plan.measure import measure_in_numbers
from octavo.plan.packed import GGUF_KINDS
from octavo.plan.shapes import _FAMILIES
from octavo.worker.model_memory import measure_built
from octavo_kernels.packing import GGUF_TYPES, packed_nbytes
from octavo_kernels.quant import Kind, part_nbytes

TYPES = ["F32", "F16", "BF16", "Q8_K", *GGUF_TYPES]  # Q8_K has no kernel
DRAWS = [["F32"], ["F16"], ["Q4_1"], ["Q4_K", "Q6_K"], ["Q8_0", "F16"], TYPES, TYPES]
# One of each way to name and merge tensors.
FIRST = {"smollm3", "phi3", "cohere2", "gptneox", "mixtral", "qwen2moe", "glm4moe", "deepseek3"}
LAYOUT_PARAMS = [pytest.param(name, marks=[] if name in FIRST else pytest.mark.long) for name in LAYOUTS]
OPTIONS: list[dict[str, Any]] = [
    {"quantization": quantization, "dtype": dtype, "kv_cache_dtype": kv_dtype}
    for quantization in (None, "gguf", "int8", "none")
    for dtype in ("auto", "float32", "float16")
    for kv_dtype in ("auto", "bfloat16")
]


@pytest.mark.parametrize("layout", LAYOUT_PARAMS)
def test_numbers_are_those_of_the_model_that_is_built(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path, read, compared = tmp_path / "m.gguf", GGUFFile._read_header, 0
    write_family(path, LAYOUTS[layout].model(), LAYOUTS[layout])
    rng = random.Random(layout)
    for types in DRAWS:
        own = rng.random()

        def read_other_types(file: GGUFFile, types: list[str] = types, own: float = own) -> None:
            """As if the file held matrices in these types."""
            read(file)
            for name, info in file.tensors.items():
                if len(info.shape) > 1:
                    drawn = random.Random(f"{own} {name}").choice(types)
                    file.tensors[name] = replace(info, qtype=drawn)

        monkeypatch.setattr(GGUFFile, "_read_header", read_other_types)
        options = rng.choice(OPTIONS)
        engine = EngineArgs(model=str(path), max_model_len=100, **options).create_engine_config(progress=False)
        assert engine.model.architecture in _FAMILIES
        for device, ranks in (("cpu", 1), ("cuda", 1), ("cuda", 2)):
            asked = replace(engine, device=device)
            try:
                built = measure_built(asked, ranks)
            except ConfigError:
                continue
            assert measure_in_numbers(asked, ranks) == built, (types, options, device, ranks)
            compared += 1
    assert compared >= 8


def test_codes_take_what_the_kernels_say() -> None:
    assert set(GGUF_KINDS) == set(GGUF_TYPES)
    for name, kind in GGUF_KINDS.items():
        for rows, columns in ((1, 1), (32, 256), (33, 512), (70, 4097)):
            assert kind.nbytes(rows, columns) == packed_nbytes(rows, columns, name)
            twin = Kind(kind.bits, kind.affine, kind.halves, kind.table)
            assert kind.nbytes(rows, columns) == part_nbytes(rows, columns, twin)
