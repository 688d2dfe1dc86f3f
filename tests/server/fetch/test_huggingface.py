"""Fetching from a hub: only what is needed, checked, resumed, shared between processes; refusals in one clear line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.audit import audited, check_reads_notes_alone
from support.fetch_process import run_fetch, start_fetch
from support.hub_server import BIG, CONFIG, FILES, NEEDED, Hub, Repo

from octavo.errors import ModelError
from octavo.fetch.huggingface import fetch_headers
from octavo.fetch.installed import installed
from octavo.fetch.sources import resolve_model
from octavo.loader.checkpoint import iterate_weights


def fetch(model: str = "org/model", **options: object) -> set[str]:
    """Names of the files that the model's folder then has."""
    folder = Path(resolve_model(model, progress=False, **options).directory)  # type: ignore[arg-type]
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        "org/model",
        "hf://org/model",
        "hf.co/org/model",
        "https://huggingface.co/org/model/",
        "https://huggingface.co/org/model/tree/main",
        "huggingface.co/org/model?library=transformers",
    ],
)
def test_only_what_is_served_from_is_fetched(name: str, hub: Hub) -> None:
    assert fetch(name) == NEEDED
    files = resolve_model(name)
    assert files.model == "org/model"
    ((_, source),) = iterate_weights(files)
    assert torch.equal(source.load(), torch.arange(200_000, dtype=torch.float32))


def test_a_page_may_name_revision_and_file(hub: Hub) -> None:
    gguf = {"model-Q4_K_M.gguf": b"not really", "model-Q8_0.gguf": b"neither"}
    hub.repos["org/gguf"] = Repo(dict(gguf))
    page = "https://huggingface.co/org/gguf/blob/main/model-Q8_0.gguf"
    for name, file in (("hf.co/org/gguf:Q4_K_M", "model-Q4_K_M.gguf"), (page, "model-Q8_0.gguf")):
        with pytest.raises(ModelError, match=file):  # that it is no GGUF file is known once it is here
            resolve_model(name, progress=False)
    with pytest.raises(ModelError, match="no revision 'v9'"):
        resolve_model("https://huggingface.co/org/model/tree/v9", progress=False)
    with pytest.raises(ModelError, match=r"two revisions are named, v9 by .* and main"):
        resolve_model("https://huggingface.co/org/model/tree/v9", revision="main")
    for page in ("hf.co/datasets/org/data", "https://huggingface.co/org", "hf.co/org/model/blob/main/config.json"):
        with pytest.raises(ModelError, match="is not a model's page"):
            resolve_model(page)


def test_a_near_miss_names_what_was_fetched_before(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_model("org/model", progress=False)
    asked = len(hub.seen)
    with pytest.raises(ModelError, match=r"'modle' is not a model; did you mean org/model\?"):
        resolve_model("modle")
    assert len(hub.seen) == asked, "nobody was asked"
    with pytest.raises(ModelError, match=r"there is no model org/modle .*did you mean org/model\?"):
        resolve_model("org/modle")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"org/modle .*did you mean org/model\?"):
        resolve_model("org/modle")


def test_only_the_description_is_fetched_without_weights(hub: Hub) -> None:
    assert fetch(need_weights=False) == NEEDED - {"model.safetensors"}
    assert fetch() == NEEDED


def test_shards_come_by_their_index(hub: Hub) -> None:
    shards = {"a.safetensors": save({"x": torch.ones(4)}), "b.safetensors": save({"y": torch.ones(4)})}
    index = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode()
    extra = {"consolidated.safetensors": b"never", "model.safetensors.index.json": index}
    hub.repos["org/sharded"] = Repo({"config.json": CONFIG, **shards, **extra})
    assert fetch("org/sharded") == {"config.json", "model.safetensors.index.json", *shards}


def test_the_second_start_asks_nobody_and_is_fast(hub: Hub) -> None:
    resolve_model("org/model", progress=False)
    with audited() as events:
        resolve_model("org/model")
    check_reads_notes_alone(events)


def test_refresh_brings_what_is_new(hub: Hub) -> None:
    first = resolve_model("org/model", progress=False).directory
    hub.repos["org/model"] = Repo(FILES | {"chat_template.jinja": b"new"})
    assert resolve_model("org/model").directory == first
    second = resolve_model("org/model", progress=False, refresh=True).directory
    assert second != first
    assert (Path(second) / "chat_template.jinja").read_bytes() == b"new"
    assert resolve_model("org/model").directory == second
    assert len(hub.sent("model.safetensors")) == 1  # the same blob serves both


def test_a_file_that_was_deleted_is_fetched_again(hub: Hub) -> None:
    files = resolve_model("org/model", progress=False)
    os.unlink(os.path.realpath(files.weights[0]))
    assert fetch() == NEEDED
    assert len(hub.sent("model.safetensors")) == 2


def test_huggingface_s_own_tools_share_the_folder(hub: Hub) -> None:
    directory = resolve_model("org/model", progress=False).directory
    script = (
        "from huggingface_hub import hf_hub_download, scan_cache_dir\n"
        "print(hf_hub_download('org/model', 'model.safetensors', local_files_only=True))\n"
        "info = scan_cache_dir(); assert not info.warnings, info.warnings\n"
        "print(sorted(f.file_name for r in info.repos for v in r.revisions for f in v.files))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path, names = done.stdout.splitlines()
    assert path == f"{directory}/model.safetensors"
    assert "model.safetensors" in names


def test_files_fetched_by_huggingface_s_tools_are_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "from huggingface_hub import hf_hub_download\n"
        "for name in ('config.json', 'tokenizer.json', 'model.safetensors'): hf_hub_download('org/model', name)\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch() == {"config.json", "tokenizer.json", "model.safetensors"}


def test_offline_without_the_model_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"org/model .* is not in .*hf/hub, and HF_HUB_OFFLINE.*octavo fetch"):
        resolve_model("org/model")
    assert not hub.seen


# -- GGUF repositories


def test_one_gguf_of_several_is_chosen_by_name_or_quantisation(hub: Hub, tmp_path: Path) -> None:
    from support.gguf_files import write_gguf
    from support.tiny_models import FAMILIES, make_model

    write_gguf(tmp_path / "m.gguf", make_model(*FAMILIES["llama"]), arch="llama")
    data = (tmp_path / "m.gguf").read_bytes()
    repo = Repo({"m.Q4_K_M.gguf": data, "m-q8_0.gguf": data + b"\0", "big/m.F16.gguf": data + b"\0\0"})
    hub.repos["org/gguf"] = repo
    addresses = {
        "org/gguf:Q4_K_M": "m.Q4_K_M.gguf",
        "org/gguf:q8_0": "m-q8_0.gguf",
        "hf://org/gguf/big/m.F16.gguf": "big/m.F16.gguf",
    }
    for address, name in addresses.items():
        files = resolve_model(address, progress=False)
        assert files.format == "gguf"
        assert files.weights[0].endswith(f"/{name}")
    assert resolve_model("org/gguf", progress=False).weights[0].endswith("/m.Q4_K_M.gguf")  # as llama.cpp
    hub.repos["org/two"] = Repo({"m.Q5_K_M.gguf": data, "m-q6_k.gguf": data + b"\0"})
    with pytest.raises(ModelError, match=r"several GGUF files.*m-q6_k\.gguf, m\.Q5_K_M\.gguf"):
        resolve_model("org/two")
    with pytest.raises(ModelError, match=r"org/gguf:Q2_K: no file matches.*m-q8_0\.gguf"):
        resolve_model("org/gguf:Q2_K")
    with pytest.raises(ModelError, match=r"has no file 'x\.gguf'; its GGUF files: big/m\.F16\.gguf"):
        resolve_model("org/gguf/x.gguf")


def test_a_quantisation_means_the_model_beside_towers_and_all_of_its_parts(hub: Hub, tmp_path: Path) -> None:
    from functools import partial

    from gguf import GGUFWriter
    from support import gguf_files
    from support.tiny_models import FAMILIES, make_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "GGUFWriter", partial(GGUFWriter, split_max_tensors=12))
        gguf_files.write_gguf(tmp_path / "m-Q8_0.gguf", make_model(*FAMILIES["llama"]), arch="llama")
    parts = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("*.gguf"))}
    assert len(parts) == 3
    hub.repos["org/gguf"] = Repo({f"mmproj-m-{kind}.gguf": b"a tower" for kind in ("Q8_0", "F16")} | parts)
    for address in ("org/gguf:Q8_0", "org/gguf", f"org/gguf/{[*parts][1]}"):
        files = resolve_model(address, progress=False)
        assert [Path(path).name for path in files.weights] == [*parts]
    assert len([*iterate_weights(files)]) == 29
    assert {path.name for path in Path(files.weights[0]).parent.iterdir()} == {*parts}
    with pytest.raises(ModelError, match="no file matches"):
        resolve_model("org/gguf:F16")
    (model,) = [one for one in installed() if one.name.startswith("org/gguf")]
    assert model.name == "org/gguf:Q8_0"
    path = fetch_headers("org/gguf:Q8_0", into=tmp_path)
    assert path.name == min(parts)
    hub.repos["org/cut"] = Repo(dict([*parts.items()][:2]))
    with pytest.raises(ModelError, match=r"lacks 1 of 3 parts .*00003-of-00003"):
        resolve_model("org/cut:Q8_0")


# -- what hubs refuse


def refused(model: str = "org/model", within: float = 30, **options: object) -> str:
    start = time.perf_counter()
    with pytest.raises(ModelError) as error:
        resolve_model(model, progress=False, **options)  # type: ignore[arg-type]
    assert time.perf_counter() - start < within
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_that_does_not_exist(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no model org/none" in (said := refused("org/none")) and "HTTP 401" in said and "set HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", "good")
    assert "no model org/none" in (said := refused("org/none")) and "HTTP 404" in said


def test_a_private_model_needs_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/private"] = Repo(dict(FILES), token="good")
    assert "set HF_TOKEN" in refused("org/private")
    monkeypatch.setenv("HF_TOKEN", "bad")
    assert "refused HF_TOKEN" in refused("org/private")
    monkeypatch.setenv("HF_TOKEN", " good\n")
    assert fetch("org/private") == NEEDED


def test_the_token_may_lie_in_a_file(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/private"] = Repo(dict(FILES), token="good")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("good\n")
    assert fetch("org/private") == NEEDED


def test_the_token_goes_to_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    fetch()
    by_host = {s.host.split(":")[0]: s.authorization for s in hub.seen}
    assert by_host == {"127.0.0.1": "Bearer secret", "localhost": None}


def test_a_gated_model_says_where_to_ask(hub: Hub) -> None:
    hub.repos["org/gated"] = Repo(dict(FILES), gated=True)
    said = refused("org/gated")
    assert "gated (HTTP 403)" in said and f"{hub.url}/org/gated" in said and "HF_TOKEN" in said


def test_a_revision_that_does_not_exist(hub: Hub) -> None:
    assert "no revision 'v9'" in refused(revision="v9")


def test_a_revision_may_be_a_commit(hub: Hub) -> None:
    commit = hub.repos["org/model"].commit
    assert resolve_model("org/model", revision=commit, progress=False).directory.endswith(commit)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"pytorch_model.bin": b"x", "config.json": CONFIG}, r"pickles \(pytorch_model.bin\)"),
        ({"config.json": CONFIG}, "no safetensors or GGUF weights"),
        ({"README.md": b"x"}, "no config.json"),
        ({"../../evil.json": b"x", "config.json": CONFIG}, "outside its folder; refused"),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": b'{"weight_map": {"x": "../x.safetensors"}}'},
            "refused",
        ),
        ({"config.json": CONFIG, "model.safetensors.index.json": b'{"weight_map": {"x": "x.safetensors"}}'}, "lacks x"),
    ],
)
def test_a_repository_that_is_no_model(files: dict[str, bytes], says: str, hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/odd"] = Repo(files)
    with pytest.raises(ModelError, match=says):
        resolve_model("org/odd", progress=False)
    assert not (tmp_path / "evil.json").exists()


def test_weights_of_an_unknown_architecture_are_not_fetched(hub: Hub) -> None:
    config = json.dumps({"architectures": ["Qwen3NextForCausalLM"]}).encode()
    hub.repos["org/hybrid"] = Repo({"config.json": config, "model.safetensors": BIG})
    with pytest.raises(ModelError, match=r"'Qwen3NextForCausalLM' is not supported .it has state-space"):
        resolve_model("org/hybrid", progress=False)
    assert hub.sent("config.json") and not hub.sent("model.safetensors")
    assert resolve_model("org/hybrid", progress=False, any_architecture=True).weights


def test_nobody_listens(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    said = refused()
    assert "cannot reach http://127.0.0.1" in said and "refused" in said and "HF_ENDPOINT" in said


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[::bad"])
def test_an_address_that_leads_nowhere(endpoint: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert "cannot reach" in refused()


def test_a_hub_that_never_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.3")
    hub.hang = True
    assert "does not answer" in refused()


def test_when_the_hub_is_away_what_is_here_serves(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/model", refresh=True, progress=False).weights
    assert "using org/model as it is" in capsys.readouterr().err


def test_not_a_hub_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/org/model/resolve/main/chat_template.jinja?")
    assert "is this the hub's address?" in refused()


# -- what networks do


def test_a_busy_hub_is_asked_again(hub: Hub) -> None:
    hub.fail = [(503, {}), (429, {"Retry-After": "1"})]
    assert fetch() == NEEDED


def test_a_hub_that_stays_broken_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.fetch.download._LONGEST_WAIT", 0.01)
    hub.fail = [(503, {})] * 20
    assert "answered HTTP 503" in refused()


def test_a_connection_that_breaks_goes_on_where_it_stopped(hub: Hub) -> None:
    hub.drop_after, hub.drops = 300_000, 2
    assert fetch() == NEEDED
    starts = [s.start for s in hub.sent("model.safetensors")]
    assert len(starts) == 3 and starts[0] == 0 and starts[1] > 0 and starts[2] > starts[1]
    assert sum(s.sent for s in hub.sent("model.safetensors")) <= len(BIG) + 2 * (1 << 20)


def test_a_server_that_knows_no_ranges_sends_it_again(hub: Hub) -> None:
    hub.drop_after, hub.drops, hub.ignore_range = 300_000, 1, True
    assert fetch() == NEEDED


def test_damage_on_the_way_is_noticed_and_not_kept(hub: Hub) -> None:
    hub.damage = True
    assert "model.safetensors of org/model is damaged" in refused()
    hub.damage = False
    assert fetch() == NEEDED


def test_damage_in_the_cache_is_noticed_when_it_is_adopted(hub: Hub, tmp_path: Path) -> None:
    weights = Path(resolve_model("org/model", progress=False).weights[0])
    blob = weights.resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\xff")
    weights.unlink()
    assert "is damaged" in refused()
    assert fetch() == NEEDED


# -- several processes


def test_processes_that_fetch_at_once_share_one_download(hub: Hub) -> None:
    hub.pause = 0.005
    processes = [start_fetch("org/model") for _ in range(4)]
    ends = [(p.communicate(timeout=60), p.returncode) for p in processes]
    assert [code for _, code in ends] == [0] * 4, ends
    assert len({out for (out, _), _ in ends}) == 1
    assert sum(s.sent for s in hub.sent("model.safetensors")) == len(BIG)
    assert Path(ends[0][0][0].strip()).read_bytes() == BIG


def test_a_fetch_that_was_killed_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.pause = 0.1
    process = start_fetch("org/model")
    deadline = time.monotonic() + 90
    while sum(s.sent for s in hub.sent("model.safetensors")) < 200_000:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.pause = 0.0
    parts = list((tmp_path / "hf").rglob("*.incomplete"))
    assert [0 < p.stat().st_size < len(BIG) for p in parts] == [True]
    assert fetch() == NEEDED
    assert hub.sent("model.safetensors")[-1].start > 0
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
    assert Path(resolve_model("org/model").weights[0]).read_bytes() == BIG


def test_the_command_ends_with_one_line_and_code_1(hub: Hub) -> None:
    code, out, err = run_fetch("org/none")
    assert (code, out) == (1, "")
    assert err.startswith("octavo: error: there is no model org/none") and err.count("\n") == 1


def test_the_command_prints_where_the_files_lie(hub: Hub) -> None:
    code, out, _ = run_fetch("org/model")
    assert code == 0 and Path(out.strip()).read_bytes() == BIG
    code, out, err = run_fetch("org/model", "--json")
    assert (code, err) == (0, "")  # nothing was to be fetched, nothing is said
    files = resolve_model("org/model")
    assert json.loads(out) == {
        "model": "org/model",
        "format": "safetensors",
        "directory": files.directory,
        "weights": list(files.weights),
        "tokenizer_directory": files.directory,
    }
