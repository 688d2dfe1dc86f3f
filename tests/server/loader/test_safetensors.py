"""Safetensors checkpoints: every tensor as it was saved, one tensor of memory at a time, one line when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from octavo.errors import ModelError
from octavo.fetch.sources import resolve_model
from octavo.loader.checkpoint import iterate_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def checkpoint(folder: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: source.load() for name, source in iterate_weights(resolve_model(str(folder)))}


tensors = st.dictionaries(
    st.text("abc.01", min_size=1, max_size=6),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(spec=tensors)
def test_saved_tensors_are_read_back(spec: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in spec.items()}
    found = read(checkpoint(tmp_path_factory.mktemp("st"), {"model.safetensors": made}))
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_into_a_parameter_converts_as_copying_does(dtype: torch.dtype, tmp_path: Path) -> None:
    made = torch.randn(5, 7)
    folder = checkpoint(tmp_path / "m", {"model.safetensors": {"w": made}})
    ((_, source),) = iterate_weights(resolve_model(str(folder)))
    target = torch.nn.Parameter(torch.empty(5, 7, dtype=dtype), requires_grad=False)
    source.load_into(target)
    assert torch.equal(target, made.to(dtype))
    wide = torch.zeros(5, 9, dtype=dtype)
    source.load_into(wide[:, 1:8])
    assert torch.equal(wide[:, 1:8], made.to(dtype)) and not wide[:, 0].any() and not wide[:, 8].any()


def test_shards_are_read_by_their_index_and_nothing_else(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path / "m",
        {
            "a.safetensors": {"x": torch.ones(2)},
            "b.safetensors": {"y": torch.zeros(3)},
            "c.safetensors": {"z": torch.ones(1)},
        },
        index={"x": "a.safetensors", "y": "b.safetensors"},
    )
    assert read(folder).keys() == {"x", "y"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path / "m", {"a.safetensors": {"x": torch.ones(2)}}, {"x": "a.safetensors", "y": "b.safetensors"}
    )
    with pytest.raises(ModelError, match=r"lacks b\.safetensors.*fetch the model again"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "model.bin", ".."]
)
def test_an_index_cannot_point_out_of_its_folder(name: str, tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = checkpoint(tmp_path / "m", {}, {"x": name})
    with pytest.raises(ModelError, match="refused"):
        resolve_model(str(folder))


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 3}}', "{}"])
def test_a_damaged_index_is_one_clear_line(index: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        resolve_model(str(folder))


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {})
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(ModelError, match=r"pickles \(pytorch_model\.bin\).*refused.*safetensors"):
        resolve_model(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_serves_dummy_ones_only(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {})
    with pytest.raises(ModelError, match=r"no \*\.safetensors weights.*--load-format dummy"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), need_weights=False).weights == ()


WHOLE = save({"first": torch.arange(20.0), "second": torch.ones(3, 4, dtype=torch.bfloat16)})


@settings(max_examples=100, deadline=None)
@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_one_clear_error(length: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = checkpoint(tmp_path_factory.mktemp("cut"), {})
    (folder / "model.safetensors").write_bytes(WHOLE[:length])
    with pytest.raises(ModelError, match=r"not a whole safetensors file.*fetch it again") as error:
        read(folder)
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 170), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_header_is_an_error_or_harmless(changes: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    folder = checkpoint(tmp_path_factory.mktemp("damaged"), {})
    (folder / "model.safetensors").write_bytes(data)
    try:
        read(folder)
    except ModelError as error:
        assert "\n" not in str(error)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"model.safetensors": {"a": torch.ones(1000), "b": torch.ones(1000)}})
    sources = dict(iterate_weights(resolve_model(str(folder))))
    path = folder / "model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 2000)
    sources["a"].load()
    with pytest.raises(ModelError, match="cut short at tensor 'b'"):
        sources["b"].load()


PEAK = """
import sys, torch
from pathlib import Path
from octavo.loader.checkpoint import iterate_weights
from octavo.fetch.sources import resolve_model
files = resolve_model(sys.argv[1])
dtype = getattr(torch, sys.argv[2])
parameters = {name: torch.zeros(source.shape, dtype=dtype) for name, source in iterate_weights(files)}
def memory(name):  # not getrusage's peak, which a process has from the one that has started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
for name, source in iterate_weights(files):
    source.load_into(parameters[name])
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_memory_is_the_model_and_one_tensor(dtype: str, tmp_path: Path) -> None:
    each, count = 16 << 20, 12  # bytes a tensor, tensors
    for shard in range(3):
        made = {f"{shard}.{i}": torch.zeros(each // 4) for i in range(count // 3)}
        checkpoint(tmp_path / "m", {f"s{shard}.safetensors": made})
    index = {f"{s}.{i}": f"s{s}.safetensors" for s in range(3) for i in range(count // 3)}
    checkpoint(tmp_path / "m", {}, index)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "m"), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) < 1.5 * each, f"{int(done.stdout) / each:.1f} tensors over the model"
