"""A model on a hub is planned from headers: the same plan as of its files, for little of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from support.gguf_files import write_gguf
from support.hub_server import Hub, Repo
from support.quantized_files import awq, quantize_checkpoint
from support.s3_judge import KEY, SECRET, S3Judge
from support.tiny_models import FAMILIES, make_model
from support.web_server import Web

from octavo.cli.main import main

LIMIT = ("--memory", "2GiB")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with Hub({}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
        yield server


def plan(capsys: pytest.CaptureFixture[str], model: str) -> dict[str, Any]:
    assert main(["plan", model, "--json", *LIMIT]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {key: value for key, value in said.items() if key != "model"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("form", ["plain", "awq", "gguf"])
def test_headers_are_enough(form: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128}), tmp_path / "m"
    name = "org/model"
    if form == "gguf":
        folder.mkdir()
        write_gguf(folder / "m-q4_0.gguf", model, arch="llama", qtype="Q4_0", vocabulary=False)
        name += ":q4_0"
    else:
        model.save_pretrained(folder)
        if form == "awq":
            described = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
            quantize_checkpoint(folder, tmp_path / "awq", awq(32), described)
            folder = tmp_path / "awq"
    hub.repos["org/model"] = Repo(files_of(folder))
    assert plan(capsys, name) == plan(capsys, str(folder))
    assert not (tmp_path / "hf").exists(), "nothing is kept"


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("form", ["folder", "shards", "gguf"])
def test_an_address_is_planned_from_headers_too(
    scheme: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    model, folder = make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128}), tmp_path / "m"
    name = "models/m"
    if form == "gguf":
        folder.mkdir()
        write_gguf(folder / "m.gguf", model, arch="llama", qtype="Q4_0", vocabulary=False)
        name += "/m.gguf"
    else:
        model.save_pretrained(folder, max_shard_size="100KB" if form == "shards" else "1GB")
        assert len(list(folder.glob("*.safetensors"))) > 1 or form == "folder"
    with Web({f"/models/m/{name}": data for name, data in files_of(folder).items()}) as web:
        address = f"{web.url}/{name}"
        if scheme == "s3":
            web.judge, address = S3Judge(), f"s3://{name}"
            for variable, value in (("ENDPOINT_URL", web.url), ("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET)):
                monkeypatch.setenv(f"AWS_{variable}", value)
        assert plan(capsys, address) == plan(capsys, str(folder / "m.gguf" if form == "gguf" else folder))
        assert not (tmp_path / "octavo" / "web").exists(), "nothing is kept"
        assert main(["fetch", address, "--quiet"]) == 0
        capsys.readouterr()
        asked = len(web.seen)
        plan(capsys, address)
        assert len(web.seen) == asked, "what is here is not asked for again"


def test_a_description_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a quantised checkpoint, whose headers say how large its weights are."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    make_model("LlamaConfig", FAMILIES["llama"][1] | {"intermediate_size": 128}).save_pretrained(tmp_path / "m")
    described = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantize_checkpoint(tmp_path / "m", tmp_path / "awq", awq(32), described)
    exact = plan(capsys, str(tmp_path / "awq"))
    near = plan(capsys, str(tmp_path / "awq" / "config.json"))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_bytes((tmp_path / "awq" / "config.json").read_bytes())
    assert plan(capsys, str(tmp_path / "alone")) == near and "estimated" in near["reasons"][0]
    assert near["kv_bytes_per_token"] == exact["kv_bytes_per_token"] and not exact["reasons"]


def test_little_of_a_large_file_is_read(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
    }
    large = save({"w": torch.zeros(4 << 20)})
    hub.repos["org/model"] = Repo({"config.json": json.dumps(config).encode(), "model.safetensors": large})
    main(["plan", "org/model", "--json", *LIMIT])
    asked = [seen for seen in hub.seen if seen.path.endswith("model.safetensors")]
    assert len(asked) <= 2 and all(seen.start == 0 for seen in asked)


def test_a_repository_of_many_files_takes_two_megabytes(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Thirty shards, as those of Llama 3 70B; its tokenizer alone has nine megabytes."""
    sizes = {"num_hidden_layers": 30, "tie_word_embeddings": True, "intermediate_size": 512}
    model = make_model("LlamaConfig", FAMILIES["llama"][1] | sizes)
    shards: dict[str, dict[str, torch.Tensor]] = {f"model-{n:05}-of-00030.safetensors": {} for n in range(30)}
    for name, tensor in model.state_dict().items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        if name != "lm_head.weight":
            shards[f"model-{layer:05}-of-00030.safetensors"][name] = tensor.contiguous()
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    hub.repos["org/model"] = Repo(
        {
            "config.json": json.dumps(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).encode(),
            "tokenizer.json": bytes(9 << 20),
            "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
            **{name: save(tensors) for name, tensors in shards.items()},
        }
    )
    assert plan(capsys, "org/model")["fits"]
    assert 0 < sum(seen.sent for seen in hub.seen) <= 2e6


def test_a_model_that_is_not_there_is_named(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "org/other", "--json", *LIMIT]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: there is no model org/other")
