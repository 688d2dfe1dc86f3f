"""What is wrong in the config.json or the tensors of any family is one line that names it, before memory is taken.

Which fields a model reads is what its family's class declares: a new family's fields are among them.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from support import cpu_time
from support.encoders import ENCODER_CASES, make_encoder
from support.encoders import FAMILIES as ENCODERS
from support.family_cases import FAMILY_CASES, FIRST_CASES
from support.paged import model_config
from support.tiny_models import make_model

from octavo.engine.args import EngineArgs
from octavo.errors import OctavoError
from octavo.interface.model_config.text import TextConfig
from octavo.loader import checkpoint, load_model
from octavo.loader.weight_bytes import model_without_memory

pytestmark = pytest.mark.slow  # all families together
FAMILIES = FIRST_CASES | {kind.replace("Config", "Model"): family for family, (kind, _) in ENCODERS.items()}
HUGE = 10**4000
# Type of a field's own value -> what cannot be meant; None: it is null or not there, and may be anything but these.
WRONG: dict[type | None, list[Any]] = {
    bool: ["yes", 2, [], {"a": 1}],
    int: ["x", True, float("nan"), HUGE, -7, [64], {"a": 1}],
    float: ["x", True, float("nan"), float("inf"), HUGE, -7.0, [1.0], {"a": 1}],
    str: [3, True, ["x"], {"a": 1}],
    list: [3, "x", {"a": 1}, [{"a": 1}]],
    dict: [3, "x", [1], [{"a": 1}]],
    None: [[{"a": 1}], {"a": 1}],
}
# Fields that are named by what they mean, or by others that contradict them.
SAID: dict[str, tuple[str, ...]] = {
    "layers_block_type": ("layer_types",),
    "num_local_experts": ("num_experts", "with experts"),
    "n_routed_experts": ("num_experts",),
    "use_sliding_window": ("sliding_window",),
    "layer_types": ("layers of type",),
    "rope_parameters": ("partial_rotary_factor",),
}
# What no config.json states, and what is left to those who read it.
UNREAD = {
    "architecture",
    "eos_token_id",
    "quantization_config",
    "dtype",
    "num_nextn_predict_layers",
    "num_ln_in_parallel_attn",
    "clip_qkv",
    "use_bidirectional_attention",
}
TABLES = {"rope_parameters", "rope_scaling", "quantization_config"}


@pytest.fixture(params=FAMILIES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(architecture: str, tmp_path: Path) -> dict[str, Any]:
    """The family's config.json, as transformers writes it, in ``tmp_path``."""
    if architecture in FIRST_CASES:
        name, settings = FAMILY_CASES[FAMILIES[architecture]]
    else:
        name = ENCODERS[FAMILIES[architecture]][0]
        settings = ENCODER_CASES[name]
    described = getattr(transformers, name)(**settings)
    described.architectures = [architecture]
    described.save_pretrained(tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    return found


def start(folder: Path, config: dict[str, Any]) -> TextConfig:
    """All that an engine does before it looks at weights; returns the fields that the model reads."""
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True)
    model = args.create_engine_config(progress=False).model
    model_without_memory(model, "cpu", stored=[])
    return model.text


def line(call: Callable[[], Any], case: str) -> str | None:
    """The line with which ``call`` is refused within a second; None: it is not."""
    text = None
    with cpu_time.at_most(1):
        try:
            call()
        except OctavoError as error:
            text = str(error)
            assert "\n" not in text and len(text) < 600, f"{case}: {text}"
    return text


@pytest.mark.sampled(share=4)
def test_no_field_that_a_model_reads_goes_unchecked(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    sound = start(tmp_path, config)
    common = type(sound).aliases
    own = {key: name for name, key in common.items() if name in config}
    for key in sorted({own.get(field.name, field.name) for field in fields(sound)} - UNREAD):
        value = config.get(key)
        for wrong in WRONG[None if value is None else type(value)]:
            if value is None and isinstance(wrong, dict) and key in TABLES:
                continue  # which may hold anything
            if key == "intermediate_size" and isinstance(value, list) and wrong == 3:
                continue  # one number for all layers
            case = f"{key}={wrong!s:.40}"
            changed = config | {key: wrong}
            text = line(lambda changed=changed: start(tmp_path, changed), case)
            if text is None:  # right where the family does not have the field
                found = start(tmp_path, changed)
                assert getattr(found, common.get(key, key)) == getattr(sound, common.get(key, key)), f"{case} is taken"
            else:
                assert key in text or any(word in text for word in SAID.get(key, ())), f"{case}: {text}"
        without = {name: value for name, value in config.items() if name != key}
        text = line(lambda without=without: start(tmp_path, without), f"without {key}")
        named = [*SAID.get(key, ()), *config, key, common.get(key, key)]
        assert text is None or any(word in text for word in named), f"without {key}: {text}"


def tables(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Configurations with an unknown kind of rope, in each place that has one."""
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if not table:
            continue
        inner = [kind for kind, value in table.items() if isinstance(value, dict)]
        if not inner:
            yield config | {key: {**table, "rope_type": "magic"}}
        for kind in inner:
            yield config | {key: {**table, kind: {**table[kind], "rope_type": "magic"}}}


@pytest.mark.sampled(share=4)
def test_contradictions_are_named(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Unknown kinds, lists of another length, experts that cannot be chosen."""
    cases = [(f"rope {number}", changed, "magic") for number, changed in enumerate(tables(config))]
    for key in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        if config.get(key) and architecture != "GptOssForCausalLM":  # which has its own
            cases.append((key, config | {key: "mish"}, "mish"))
    if config.get("layer_types"):
        cases.append(("layer_types", config | {"layer_types": config["layer_types"][:-1]}, "layer_types"))
        strange = ["strange_attention", *config["layer_types"][1:]]
        cases.append(("kind of layer", config | {"layer_types": strange}, "layer_types"))
    if "num_key_value_heads" in config and architecture not in ("GPTNeoXForCausalLM", "FalconForCausalLM"):
        cases.append(("heads", config | {"num_key_value_heads": 3}, "num_key_value_heads"))
    has_experts = architecture != "NemotronHForCausalLM"  # whose fields say what they would be like
    if config.get("num_experts_per_tok") and has_experts:
        more = config | {"num_experts_per_tok": 4097}
        cases.append(("num_experts_per_tok", more, "num_experts_per_tok"))
        more = config | {"num_experts_per_tok": 100}
        cases.append(("more chosen than there are", more, "num_experts_per_tok"))
    if config.get("n_group") and has_experts:
        cases.append(("groups", config | {"n_group": 3}, "n_group"))
        cases.append(("kept groups", config | {"topk_group": 9}, "n_group"))
    for case, changed, named in cases:
        text = line(lambda changed=changed: start(tmp_path, changed), case)
        assert text is not None and named in text, f"{case}: {text}"


@pytest.fixture
def folder(architecture: str, tmp_path: Path) -> Path:
    """A sound checkpoint of the family."""
    if architecture in FIRST_CASES:
        make_model(*FAMILY_CASES[FAMILIES[architecture]]).save_pretrained(tmp_path)
    else:
        make_encoder(FAMILIES[architecture], tmp_path)
    return tmp_path


UNUSED = "pooler."  # in checkpoints of encoders


def kind_of(name: str) -> str:
    return "".join("#" if letter.isdigit() else letter for letter in name)


@pytest.mark.sampled(share=4)
def test_tensors_that_do_not_fit_are_named_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are missing, of another shape, or left over: of each kind one, of all experts and latents, too."""
    config = model_config(folder)
    stored = [entry for entry in checkpoint.iterate_weights(config.files) if not entry[0].startswith(UNUSED)]
    kinds = {kind_of(name): number for number, (name, _) in reversed([*enumerate(stored)])}

    def weights_of(changed: list[Any]) -> list[Any]:
        monkeypatch.setattr(checkpoint, "iterate_weights", lambda files: iter(changed))
        return checkpoint.stored_weights(config)

    model = model_without_memory(config, "cpu", stored=weights_of(stored))

    def fit(changed: list[Any], again: bool = False) -> None:
        weights = weights_of(changed)
        built = model_without_memory(config, "cpu", stored=weights) if again else model
        load_model.taken_weights(built, weights, config)

    fit(stored)
    for kind, number in kinds.items():
        name, source = stored[number]
        others = [*stored[:number], *stored[number + 1 :]]
        text = line(lambda others=others: fit(others, True), f"without {kind}")
        optional = kind.endswith("layer_scalar")  # Gemma 4's, else 1
        assert optional or (text is not None and " lacks " in text), f"without {kind}: {text}"
        first, *rest = source.shape
        for shape in {(first + 1, *rest), (*source.shape[:-1], source.shape[-1] + 1), (1, first, *rest), (1, *rest)}:
            if shape == source.shape:
                continue
            unlike = copy.copy(source)
            unlike.shape = shape
            text = line(lambda others=others, one=(name, unlike): fit([*others, one]), f"{kind} {list(shape)}")
            assert text is not None, f"{kind} of shape {list(shape)}, not {list(source.shape)}, is taken"
            assert "has shape" in text or " lacks " in text or "no place" in text, f"{kind}: {text}"
        left = f"{name.rpartition('.')[0]}.strange_weight"
        text = line(lambda left=left, source=source: fit([*stored, (left, source)]), f"{kind} beside")
        assert text is not None and "no place" in text, f"{left} is taken: {text}"


@pytest.mark.sampled(share=4)
@pytest.mark.parametrize("quantization", ["none", None])
def test_no_tensor_that_holds_nan_is_taken(
    folder: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them do, each in every number: every job of the loader must fail, and every tensor be named."""
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said: list[str | None] = []

    class Done:
        def result(self) -> None:
            raise InterruptedError

    class Jobs:
        def submit(self, job: Callable[[], None]) -> Done:
            said.append(line(job, "a tensor"))
            return Done()

    @contextmanager
    def one_after_the_other() -> Iterator[Jobs]:
        yield Jobs()

    monkeypatch.setattr(load_model, "_threads", one_after_the_other)
    with pytest.raises(InterruptedError):
        load_model.load_model(replace(model_config(folder), quantization=quantization))
    lines = [text for text in said if text]
    held_otherwise = sum("embed" in name or "wte" in name for name in tensors)  # tables of tokens, in two forms
    assert len(said) - len(lines) <= held_otherwise
    assert all("holds NaN" in text and "fetch it again" in text for text in lines), lines
    assert [
        name for name in tensors if not name.startswith(UNUSED) and not any(f"'{name}" in text for text in lines)
    ] == []


ABSURD = """
import json, resource, sys, time
from pathlib import Path
from octavo.engine.args import EngineArgs
from octavo.errors import OctavoError
from octavo.worker.worker import Worker
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = []
for folder, field, value in json.loads(sys.argv[1]):
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    before = peak()
    for _ in range(2):  # the first one imports what the family needs
        started, text = time.process_time(), None
        try:
            Worker(EngineArgs(model=folder, skip_tokenizer_init=True).create_engine_config(progress=False))
        except OctavoError as error:
            text = str(error)
    found.append((time.process_time() - started, peak() - before, text))
print(json.dumps(found))
"""
SIZES: list[tuple[str, str, int]] = [
    ("llama-gqa-tied", "num_hidden_layers", 2),  # sound: what is taken once is taken
    ("llama-gqa-tied", "num_hidden_layers", 1000),
    ("llama-gqa-tied", "intermediate_size", 1 << 22),
    ("mixtral", "num_local_experts", 4096),
    ("llama4", "intermediate_size", 1 << 20),
    ("llama4", "num_local_experts", 512),
    ("deepseek-v3", "n_routed_experts", 4096),
    ("deepseek-v3", "moe_intermediate_size", 1 << 20),
    ("deepseek-v2", "kv_lora_rank", 1 << 18),
    ("gpt-oss", "intermediate_size", 1 << 20),
    ("gpt-oss", "num_local_experts", 4096),
    ("gpt2", "n_positions", 1 << 24),
]


def test_an_absurd_size_takes_neither_time_nor_memory(tmp_path: Path) -> None:
    cases = []
    for number, (case, field, value) in enumerate(SIZES):
        make_model(*FAMILY_CASES[case]).save_pretrained(tmp_path / str(number))
        cases.append((str(tmp_path / str(number)), field, value))
    run = subprocess.run(
        [sys.executable, "-c", ABSURD, json.dumps(cases)], capture_output=True, text=True, env=dict(os.environ)
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (_, _, sound), *found = json.loads(run.stdout)
    assert sound is None
    for size, (seconds, kilobytes, text) in zip(SIZES[1:], found, strict=True):
        assert text is not None and "\n" not in text and "not of one model" in text, f"{size}: {text}"
        assert seconds < 3 and kilobytes < 64 << 10, f"{size}: {seconds:.2f} s, {kilobytes} KiB"
