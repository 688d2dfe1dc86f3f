"""A GGUF file gives the weights and configuration of the model that it was made from; a damaged one gives one error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fetch_process import start_fetch
from support.gguf_files import write_gguf, write_metadata
from support.paged import load, logits_of
from support.tiny_models import make_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.bench.hugging_face import transformers_arguments
from octavo.errors import ModelError
from octavo.fetch.gguf_folder import derived_directory
from octavo.fetch.model_config import load_generation_config, load_hf_config
from octavo.fetch.sources import resolve_model
from octavo.gguf import weights
from octavo.gguf.header import GGUFFile
from octavo.layers.weights import ReorderedRows
from octavo.loader.checkpoint import iterate_weights
from octavo.text.tokenizer import Tokenizer

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": ("LlamaConfig", SMALL | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-biases": ("LlamaConfig", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", SMALL | {"rope_theta": 1e6}),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", SMALL | {"head_dim": 32}),
    "gemma2": ("Gemma2Config", SMALL | {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", SMALL | {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 32}),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, make_model(*FAMILIES["llama"]), arch="llama", qtype="Q8_0")
    return path


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q5_1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_under_their_names(family: str, qtype: str, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", make_model(*FAMILIES[family]), arch=family.split("-")[0], qtype=qtype)
    sources = dict(iterate_weights(resolve_model(str(tmp_path / "m.gguf"))))
    assert sources.keys() == expected.keys()
    for name, source in sources.items():
        assert source.shape == expected[name].shape
        np.testing.assert_array_equal(source.load(torch.float32).numpy(), expected[name], err_msg=name)
        for dtype in (torch.float32, torch.bfloat16):
            target = torch.empty(source.shape, dtype=dtype)
            source.load_into(target)
            assert torch.equal(target, source.load(dtype))


@pytest.mark.parametrize("room", [1, 3000, 1 << 20], ids=["least", "some rows", "all"])
def test_pieces_are_the_whole_in_order(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the file that are read to be packed: whole heads of q and k, whose rows change places."""
    write_gguf(tmp_path / "m.gguf", make_model(*FAMILIES["llama-biases"]), arch="llama", qtype="Q8_0")
    monkeypatch.setattr(weights, "_PIECE", room)
    sources = [source for _, source in iterate_weights(resolve_model(str(tmp_path / "m.gguf"))) if source.shape[1:]]
    for source in sources:
        count = source.shape[0]
        for rows in (slice(0, count), slice(16, count), slice(3, count - 5)):
            for multiple in (1, 32):
                pieces = [piece.copy() for piece in source.raw_pieces(rows, multiple)]
                np.testing.assert_array_equal(np.concatenate(pieces), source.raw()[rows], err_msg=source.name)
                assert all(len(piece) % multiple == 0 for piece in pieces[:-1])
                if room == 1 and not source._heads:
                    assert len(pieces) == -(-(rows.stop - rows.start) // multiple)
            values = torch.cat([piece.clone() for piece in source.pieces(torch.bfloat16, rows)])
            assert torch.equal(values, source.load(torch.bfloat16)[rows])
        turned = ReorderedRows(source, torch.arange(count).flip(0))
        np.testing.assert_array_equal(np.concatenate([*turned.raw_pieces(slice(3, count), 32)]), source.raw()[::-1][3:])


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_a_file_gives_the_logits_of_its_model(family: str, tmp_path: Path) -> None:
    """Also where the file's norms are not the checkpoint's, and its header leaves out which layers have a window."""
    config_class, values = FAMILIES[family]
    reference = make_model(config_class, values | {"num_hidden_layers": 7})
    write_gguf(tmp_path / "m.gguf", reference, arch=family)
    tokens = [3 + 7 * i % 300 for i in range(60)]
    model = load(tmp_path / "m.gguf")
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(
        logits_of(model, [tokens])[0], expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item())
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_model_from_the_file(family: str, tmp_path: Path) -> None:
    config_class, values = FAMILIES[family]
    if family == "qwen3":
        values = values | {"head_dim": 128}  # transformers takes its default whatever the file says
    write_gguf(tmp_path / "m.gguf", make_model(config_class, values), arch=family, qtype="Q8_0")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        **transformers_arguments(tmp_path / "m.gguf"), dtype=torch.float32
    )
    files = resolve_model(str(tmp_path / "m.gguf"))
    theirs = reference.state_dict()
    for name, source in iterate_weights(files):
        assert torch.equal(source.load(torch.float32), theirs[name]), name
    # And transformers reads the config.json that we wrote as the configuration that it derives itself.
    shutil.copy(files.path / "config.json", tmp_path / "config.json")
    ours = transformers.AutoConfig.from_pretrained(tmp_path)
    for key in (*SMALL, "tie_word_embeddings", "rope_parameters", "model_type"):
        assert getattr(ours, key) == getattr(reference.config, key), key
    assert ours.rms_norm_eps == pytest.approx(reference.config.rms_norm_eps, rel=1e-6)
    assert ours.architectures == [type(reference).__name__]


@pytest.mark.parametrize("factor", [2.0, 8.0, 32.0])
@pytest.mark.parametrize("original", [4096, 8192])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_rope_scaling_is_recovered_from_its_factors(
    factor: float, original: int, head_dim: int, tmp_path: Path
) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = transformers.LlamaConfig(
        **SMALL | {"head_dim": head_dim, "rope_parameters": parameters | {"rope_theta": 500000.0}}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)

    def more(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())

    write_gguf(tmp_path / "m.gguf", transformers.LlamaForCausalLM(config), arch="llama", more=more)
    files = resolve_model(str(tmp_path / "m.gguf"))
    assert load_hf_config(files)["rope_scaling"] == parameters
    assert "rope_freqs.weight" not in dict(iterate_weights(files))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_keys(values: dict, expected: dict | None, tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        for key, value in values.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"qwen2.rope.scaling.{key}", value)

    write_gguf(tmp_path / "m.gguf", make_model(*FAMILIES["qwen2"]), arch="qwen2", more=more)
    assert load_hf_config(resolve_model(str(tmp_path / "m.gguf"))).get("rope_scaling") == expected


def test_generation_ends_at_end_of_turn_too(tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(17)
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)

    write_gguf(tmp_path / "m.gguf", make_model(*FAMILIES["qwen3"]), arch="qwen3", more=more)
    assert load_generation_config(resolve_model(str(tmp_path / "m.gguf"))) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 17],
        "temperature": 0.6,
        "top_k": 20,
    }


scalars = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(min_size=1, max_size=30),
    st.lists(st.text(max_size=8), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
)


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(st.from_regex(r"[a-z]{1,8}\.[a-z]{1,8}", fullmatch=True), scalars, max_size=8))
def test_metadata_and_tensors_are_what_the_reference_reader_finds(
    values: dict, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("meta") / "m.gguf"
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_metadata(path, "llama", values, lambda writer: writer.add_tensor("t", array))
    ours, reference = GGUFFile(path), GGUFReader(path)
    for key, value in values.items():
        found = ours.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == reference.fields[key].contents() == value
    (tensor,) = reference.tensors
    info = ours.tensors["t"]
    assert (info.offset, info.nbytes, info.shape) == (tensor.data_offset, tensor.n_bytes, (3, 4))
    np.testing.assert_array_equal(ours.raw(info).view(np.float32), array)


@settings(max_examples=80, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_one_clear_error(
    tiny_gguf: Path, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = tiny_gguf.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    # The end may be padding, which nobody misses: the last tensor is what must be whole.
    path.write_bytes(whole[: int(share * (len(whole) - 64))])
    with pytest.raises(ModelError, match=r"m\.gguf.*(cut short|not a GGUF file|not a whole GGUF file).*") as error:
        resolve_model(str(path))
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_an_error_or_harmless(
    tiny_gguf: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(tiny_gguf.read_bytes())
    header = min(info.offset for info in GGUFFile(tiny_gguf).tensors.values())
    for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=6)):
        whole[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(whole)
    try:
        files = resolve_model(str(path))
        load_hf_config(files)
        for _, source in iterate_weights(files):
            source.load(torch.float32)
    except ModelError as error:
        assert "\n" not in str(error)


def test_arrays_nested_without_end_are_an_error(tmp_path: Path) -> None:
    header = b"GGUF" + np.array([3], "<u4").tobytes() + np.array([0, 1, 1], "<u8").tobytes() + b"k"
    nest = np.array([9], "<u4").tobytes() + (np.array([9], "<u4").tobytes() + np.array([1], "<u8").tobytes()) * 100_000
    (tmp_path / "m.gguf").write_bytes(header + nest)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_an_unknown_tensor_type_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = bytearray(tiny_gguf.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    whole[at : at + 4] = (99).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"'blk.0.ffn_up.weight' has GGUF type 99.*known are F32"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    array = np.zeros((2, 32), np.float32)
    write_metadata(tmp_path / "m.gguf", "mamba", {}, lambda writer: writer.add_tensor("token_embd.weight", array))
    with pytest.raises(ModelError, match=r"architecture 'mamba' is not supported; supported are llama"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_the_derived_folder_is_made_once_and_found_without_the_header(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = derived_directory(tiny_gguf)
    stamp = (first / "tokenizer.json").stat().st_mtime_ns
    monkeypatch.setattr("octavo.gguf.header.GGUFFile.__init__", None)  # would fail if it were called
    assert derived_directory(tiny_gguf) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == stamp


def test_processes_that_derive_at_once_agree(tiny_gguf: Path, tmp_path: Path) -> None:
    processes = [start_fetch(str(tiny_gguf), "--json") for _ in range(4)]
    ends = [(*p.communicate(timeout=60), p.returncode) for p in processes]
    assert {(err, code) for _, err, code in ends} == {("", 0)}
    assert len({out for out, _, _ in ends}) == 1
    assert len(Tokenizer.from_directory(json.loads(ends[0][0])["directory"])) == SMALL["vocab_size"]


def test_a_cache_that_cannot_be_written_still_serves_what_it_holds(tiny_gguf: Path, tmp_path: Path) -> None:
    derived = resolve_model(str(tiny_gguf)).directory
    elsewhere = tmp_path / "elsewhere.gguf"  # as when a volume is mounted at another place
    shutil.copy(tiny_gguf, elsewhere)
    index = tmp_path / "cache" / "gguf" / "index"
    shutil.rmtree(index)
    index.write_text("in the way")
    assert resolve_model(str(elsewhere)).directory == derived


def test_a_file_that_changes_is_derived_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_model(*FAMILIES["llama"]), arch="llama")
    first = load_hf_config(resolve_model(str(path)))
    write_gguf(path, make_model(*FAMILIES["qwen3"]), arch="qwen3")
    second = load_hf_config(resolve_model(str(path)))
    assert [first["model_type"], second["model_type"]] == ["llama", "qwen3"]


def test_the_derived_files_are_plain_json(tiny_gguf: Path) -> None:
    folder = derived_directory(tiny_gguf)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert isinstance(json.loads((folder / name).read_text()), dict)
