"""Weights come from where they should, all of them, with little memory; and what does not fit is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import write_gguf
from support.paged import load, logits_of, model_config
from support.tiny_models import FAMILIES, make_model

from octavo.errors import ConfigError, ModelError
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.weights import WeightSlot
from octavo.loader import load_model as loading
from octavo.loader.dummy import DummyWeight
from octavo.loader.load_model import build_model, load_model
from octavo_kernels.weight_memory import HUGE_PAGE

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80]]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    return tmp_path


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",  # a part of a merged weight
        "model.layers.2.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, llama: Path) -> None:
    change_weights(llama, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"lacks tensor '{name}'"):
        load(llama)


def test_many_missing_tensors_are_counted(llama: Path) -> None:
    change_weights(llama, lambda tensors: [tensors.pop(name) for name in [*tensors] if ".layers.1." in name])
    with pytest.raises(ModelError, match=r"lacks 9 tensors, such as 'model\.layers\.1\."):
        load(llama)


def test_more_layers_than_there_are_is_one_number(llama: Path) -> None:
    change_config(llama, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"num_hidden_layers is 5, the checkpoint has 3; .*not of one model"):
        load(llama)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.v_proj.weight", "model.norm.weight"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name: str, llama: Path) -> None:
    change_weights(llama, lambda tensors: tensors.update({name: torch.zeros(7, 3)}))
    with pytest.raises(ModelError, match=rf"{name}.* has shape \[7, 3\].* asks for \["):
        load(llama)


def test_tensors_without_a_place_are_refused(llama: Path) -> None:
    """A bias that config.json does not speak of would silently give other answers."""
    change_weights(llama, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"no place for tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load(llama)


def test_tables_that_follow_from_the_config_and_a_tied_head_are_left_alone(llama: Path) -> None:
    before = logits_of(load(llama), TOKENS)[0]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    table = "model.embed_tokens.weight"
    change_weights(llama, lambda tensors: tensors.update(extra, **{"lm_head.weight": tensors[table].clone()}))
    assert torch.equal(logits_of(load(llama), TOKENS)[0], before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["BloomForCausalLM"]},
            r"'BloomForCausalLM' is not supported; the nearest that is: \w+ForCausalLM",
        ),
        ({"intermediate_size": "absent"}, r"lacks 'intermediate_size'"),
        ({"hidden_act": "mish"}, r"'mish'.*silu"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads.*3.*num_attention_heads.*4"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantised with 'hqq'.*not supported"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], said: str, llama: Path) -> None:
    change_config(llama, **changes)
    with pytest.raises(ModelError, match=said):
        load(llama)


def test_a_quantisation_that_is_not_known_is_refused(llama: Path) -> None:
    config = replace(model_config(llama), quantization="int3")
    with pytest.raises(ConfigError, match="'int3'"):
        load_model(config)
    assert load_model(replace(config, quantization="none"))


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_lies_on_the_device_in_the_dtype_of_computation(
    family: str, tiny_checkpoints: dict[str, Path]
) -> None:
    model = load_model(model_config(tiny_checkpoints[family], "bfloat16"), device="meta")
    in_float32 = [m.weight for m in model.modules() if isinstance(m, RMSNorm) and m.offset is not None]
    assert bool(in_float32) == family.startswith("gemma") and {p.dtype for p in in_float32} <= {torch.float32}
    others = [p for p in model.parameters() if all(p is not norm for norm in in_float32)]
    assert {(p.device.type, p.dtype, p.requires_grad) for p in others} == {("meta", torch.bfloat16, False)}
    assert {b.device.type for b in model.buffers()} <= {"meta"}
    assert torch.get_default_dtype() == torch.float32


def test_the_number_of_threads_is_as_before(llama: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        load(llama)
        with pytest.raises(ModelError):
            load_model(model_config(llama, intermediate_size=3))
        with ThreadPoolExecutor(1) as pool:
            assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (2, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_sane_and_repeatable(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    config = model_config(tiny_checkpoints[family])
    (first,), (again,) = (logits_of(load_model(config, "dummy"), TOKENS) for _ in range(2))
    assert torch.equal(first, again)
    assert first.isfinite().all() and 1e-3 < first.std() < 10
    (other,) = logits_of(load_model(replace(config, seed=1), "dummy"), TOKENS)
    assert not torch.equal(first, other)


PEAK = """
import gc, os, resource, sys
from dataclasses import replace
from pathlib import Path
from support.paged import model_config
from octavo.loader.load_model import load_model
from octavo.system.limits import trim_memory
import torch

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def measure(quantization, small, big):
    torch.set_num_threads(2)
    configs = [replace(model_config(path, "float32"), quantization=quantization) for path in (small, big)]
    load_model(configs[0])  # whatever is imported or made once
    gc.collect()
    trim_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before, faults = memory("VmRSS"), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model = load_model(configs[1])
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    print(memory("VmHWM") - before, model.num_weight_bytes(), faults * resource.getpagesize(), flush=True)

for argument in sys.argv[1:]:
    if (child := os.fork()) == 0:  # none takes memory that another one has left
        measure(*argument.split(","))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_peak_memory_is_the_model_and_a_few_rows(tmp_path: Path) -> None:
    """However many bits a weight has in the file and in memory, it goes to its place some rows at a time."""
    sizes = FAMILIES["llama"][1] | {"hidden_size": 512, "intermediate_size": 3072}
    experts = {"intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 2}
    families = {
        "dense": ("LlamaConfig", sizes),
        "experts": ("MixtralConfig", sizes | experts),  # saved one by one
        "stacked experts": ("GraniteMoeConfig", sizes | experts),
    }
    forms = [(family, "safetensors", how) for family in families for how in ("none", "int8")]
    forms.append(("dense", "Q4_0", "int8"))
    paths: dict[tuple[str, str], list[Path]] = {}
    for family, (config_class, settings) in families.items():
        for layers in (1, 3):
            model = make_model(config_class, settings | {"num_hidden_layers": layers})
            path = tmp_path / f"{family}-{layers}"
            model.save_pretrained(path, max_shard_size="64MB")
            paths.setdefault((family, "safetensors"), []).append(path)
            if family == "dense":
                write_gguf(path.with_suffix(".gguf"), model, arch="llama", qtype="Q4_0", vocabulary=False)
                paths.setdefault((family, "Q4_0"), []).append(path.with_suffix(".gguf"))
    run = subprocess.run(
        [sys.executable, "-c", PEAK, *(",".join([how, *map(str, paths[family, file])]) for family, file, how in forms)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OCTAVO_CACHE": str(tmp_path / "cache")},
    )
    print(run.stdout)
    for form, line in zip(forms, run.stdout.splitlines(), strict=True):
        used, held, touched = map(int, line.split())
        if form[1:] == ("safetensors", "int8"):  # each thread rounds some rows at a time, to their place
            assert 0.5 * held < used < 1.1 * held + (12 << 20), form
            continue
        # A MiB of the file at a time goes to its place, through memory that is used again: fresh pages, which a virtual
        # machine takes microseconds for, are those of the weights alone, and the rest of the last huge page in both of
        # the regions that they fill.
        assert 0.5 * held < used and max(used, touched) < 1.1 * held + (4 << 20) + 2 * HUGE_PAGE, form


def test_an_optional_tensor_may_be_missing_or_there(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, read = model_config(llama), []
    model = build_model(config, "cpu", TensorParallel())
    slots = {"model.scale": [WeightSlot(0, "scale", (1,), read.append, optional=True)]}
    monkeypatch.setattr(loading, "weight_slots", lambda model: slots)

    def take(*sources: DummyWeight) -> None:
        loading.fill(loading.taken_weights(model, [("scale", source) for source in sources], config))

    take()
    assert not read
    source = DummyWeight("scale", (1,), 0, "cpu")
    take(source)
    assert read == [source]
    with pytest.raises(ModelError, match=r"'scale' has shape \[2\]"):
        take(DummyWeight("scale", (2,), 0, "cpu"))
