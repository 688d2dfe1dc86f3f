"""A model in several files is the model in one; which files of a repository are models, parts, and companions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from support import gguf_files
from support.paged import load, logits_of
from support.tiny_models import FAMILIES, make_model

from octavo.engine.args import EngineArgs
from octavo.errors import ModelError
from octavo.fetch.description import describe_path
from octavo.fetch.sources import resolve_model
from octavo.gguf.file_names import all_parts, by_default, models_of, quantised_as
from octavo.gguf.split import open_gguf
from octavo.plan.measure import measure

TOKENS = [5, 17, 200, 3, 44]


def write(folder: Path, name: str, seed: int = 0, **split: object) -> Path:
    """A tiny Llama; ``split`` as `GGUFWriter` has it. Returns the file, or the first of several."""
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "GGUFWriter", partial(GGUFWriter, **split))
        gguf_files.write_gguf(folder / f"{name}.gguf", make_model(*FAMILIES["llama"], seed=seed), arch="llama")
    return min(folder.glob(f"{name}*.gguf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return logits_of(load(write(tmp_path_factory.mktemp("whole"), "m")), [TOKENS])[0]


@pytest.mark.parametrize("split", [(20, False), (12, False), (5, False), (9, True)], ids=["2", "3", "6", "empty first"])
def test_parts_are_the_whole(split: tuple[int, bool], whole: torch.Tensor, tmp_path: Path) -> None:
    first = write(tmp_path, "m-Q4_K_M", split_max_tensors=split[0], small_first_shard=split[1])
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) > 1 and first == paths[0]
    for path in (first, paths[-1], tmp_path):  # any part, or the folder, means all
        assert torch.equal(logits_of(load(path), [TOKENS])[0], whole)
    files = resolve_model(str(first))
    assert files.weights == tuple(map(str, paths))
    one = write(tmp_path / "one", "m")
    assert describe_path(first).num_parameters == describe_path(one).num_parameters
    config = EngineArgs(model=str(first)).create_engine_config(progress=False)
    assert measure(replace(config, device="cpu"), 1).parameters == describe_path(one).num_parameters


def test_parts_that_are_not_of_one_model_are_refused(tmp_path: Path) -> None:
    def broken(name: str) -> list[Path]:
        write(tmp_path / name, "m", split_max_tensors=12)
        return sorted((tmp_path / name).glob("*.gguf"))

    first, second, _ = broken("missing")
    second.unlink()
    for path in (first, first.parent):
        with pytest.raises(ModelError, match=second.name):
            load(path)
    first, second, third = broken("swapped")
    second.rename(tmp_path / "kept")
    third.rename(second)
    (tmp_path / "kept").rename(third)
    with pytest.raises(ModelError, match=r"split\.no is 2, by its name it is part 1"):
        load(first)
    first, second, third = broken("doubled")
    shutil.copy(second, third)
    with pytest.raises(ModelError, match=r"split\.no is 1, by its name it is part 2"):
        load(first)
    first, second, _ = broken("of two counts")
    shutil.copy(sorted(p for p in (write(tmp_path / "x", "m", split_max_tensors=5).parent).glob("*.gguf"))[1], second)
    with pytest.raises(ModelError, match="one part of 6, beside one of 3"):
        load(first)
    first, *_ = broken("renamed")
    lonely = first.rename(tmp_path / "lonely.gguf")
    with pytest.raises(ModelError, match=r"one part of 3, its name says 1.*llama-gguf-split --merge"):
        load(lonely)


def test_another_part_derives_anew(tmp_path: Path) -> None:
    """What is derived from headers follows all of them, as whether the head is a tensor of its own."""
    first = write(tmp_path / "a", "m", split_max_tensors=12)
    before = resolve_model(str(first)).directory
    other = write(tmp_path / "b", "m", seed=1, split_max_tensors=12)
    assert resolve_model(str(other)).directory == before  # the same headers
    assert open_gguf(first).header_sha256() == open_gguf(other).header_sha256()
    shutil.copy(first, tmp_path / "gone.gguf")
    sorted(first.parent.glob("*.gguf"))[1].unlink()
    with pytest.raises(ModelError, match="00002-of-00003"):
        resolve_model(str(first))


NAMES = [
    "mmproj-model-Q8_0.gguf",
    "mmproj-F16.gguf",
    "model.mmproj-f16.gguf",
    "model-imatrix.gguf",
    "mtp-model-Q8_0.gguf",
    "eagle3-model-Q8_0.gguf",
    "model-Q8_0.gguf",
    "model-Q4_K_M-00001-of-00002.gguf",
    "model-Q4_K_M-00002-of-00002.gguf",
    "BF16/model-00001-of-00002.gguf",
    "BF16/model-00002-of-00002.gguf",
    "model-00009-of-00003.gguf",
    "notes.txt",
]


@pytest.mark.parametrize(
    ("quant", "found"),
    [
        ("Q8_0", ["model-Q8_0.gguf"]),
        ("q4_k_m", ["model-Q4_K_M-00001-of-00002.gguf"]),
        ("BF16", ["BF16/model-00001-of-00002.gguf"]),
        ("F16", []),
        ("Q4_K", []),
    ],
)
def test_a_quantisation_names_one_model(quant: str, found: list[str]) -> None:
    assert quantised_as(models_of(NAMES), quant) == found


def test_a_default_is_taken_as_llama_cpp_takes_it() -> None:
    assert by_default([*models_of(NAMES)]) == "model-Q4_K_M-00001-of-00002.gguf"
    assert by_default(["a-Q8_0.gguf", "a-Q6_K.gguf"]) == "a-Q8_0.gguf"
    assert by_default(["a-Q5_K_M.gguf", "a-Q6_K.gguf"]) is None
    assert by_default(["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"]) is None


def test_names_of_parts_are_taken_apart() -> None:
    assert all_parts("a-00002-of-00002.gguf") == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    for name in ("a.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf", "a-00001-of-99999.gguf"):
        assert all_parts(name) == [name]
