"""Qwen3.5's layer for multi-token prediction guesses as the description says, and leaves no trace in a state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.draft_heads import check_head_on_cpu, not_adapting
from support.gguf_families import LAYOUTS, write_family
from support.hybrid_mtp import QwenOracle, qwen_with_mtp
from support.hybrids import engine, prompts, run
from support.quantized_files import compressed, fp8, quantize_checkpoint
from support.speculation import Oracle, all_of
from support.tiny_models import VOCAB_SIZE, make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError
from octavo.interface.outputs import RequestOutput
from octavo.worker.model_memory import measure_built
from octavo.worker.model_runner import ModelRunner
from octavo.worker.spec_decode.prediction_drafter import PredictionDrafter

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen")
    qwen_with_mtp("qwen3.5", folder)
    return str(folder)


def guessing(model: str, number: int, **changes: Any) -> LLM:
    """An engine that guesses so many tokens wherever there is room."""
    config = {"method": "mtp", "num_speculative_tokens": number}
    return not_adapting(engine(model, speculative_config=config, **changes))


def guesses_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What its drafter will have guessed, in order."""
    drafter = llm.engine.executor.worker.runner.drafter  # type: ignore[attr-defined]
    made, propose = list[list[int]](), drafter.propose

    def kept(*args: Any) -> dict[str, list[int]]:
        drafts: dict[str, list[int]] = propose(*args)
        made.extend(drafts.values())
        return drafts

    monkeypatch.setattr(drafter, "propose", kept)
    return made


class Replaced:
    """Has a drafter say something else than it has guessed, by each of ``kinds`` in turn: what is right, wrong, half
    right, or nothing."""

    def __init__(self, llm: LLM, kinds: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> None:
        runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
        assert isinstance(runner, ModelRunner) and isinstance(runner.drafter, PredictionDrafter)
        self._runner, self._propose, self._kinds = runner, runner.drafter.propose, kinds
        self.oracles: dict[str, Oracle] = {}
        self.silent = 0
        monkeypatch.setattr(runner.drafter, "propose", self)

    def knows(self, *outputs: RequestOutput) -> None:
        """What comes is in ``outputs``."""
        self.oracles = {kind: Oracle(kind, list(outputs), VOCAB_SIZE) for kind in ("right", "wrong", "half")}

    def __call__(self, wanted: dict[str, int], step: Any) -> dict[str, list[int]]:
        batch, drafts = self._runner.requests.batch, dict[str, list[int]]()
        for req_id, guessed in self._propose(wanted, step).items():
            kind, row = next(self._kinds), batch.row_of[req_id]
            known = batch.token_ids[row, : batch.num_computed[row] + 1].tolist()
            if kind == "silent":
                self.silent += 1
            elif said := self.oracles[kind].propose(req_id, known, len(guessed)):
                drafts[req_id] = said
        return drafts


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "qwen3.5-three-values-a-key"])
def test_the_layer_guesses_as_described_and_changes_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens: the layer reads its own states for the second one and the third."""
    oracle = qwen_with_mtp(family, tmp_path)
    changes = {"quantization": "none", "num_gpu_blocks_override": 1200}
    llm, _, _ = check_head_on_cpu(family, tmp_path, {"method": "mtp"}, oracle.guesses, monkeypatch, **changes)
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    assert runner.recording_obstacle is None
    drafter, own = runner.drafter._model, runner.model
    assert drafter.model.embed_tokens is own.model.embed_tokens and drafter.lm_head is own.lm_head, "there is one table"


@pytest.mark.parametrize("tight", [False, True], ids=["room", "tight"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_guesses_change_no_bit_whatever_of_them_is_right(
    number: int, tight: bool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in turns that go on from a snapshot taken after rejected ones, and where sequences are preempted."""
    monkeypatch.setattr("octavo.engine.core.DEFAULT_INTERVAL", 8)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    some, plain = prompts(1, 3, 16, 33, 90, 64), engine(model, enable_prefix_caching=False)
    expected = plain.generate(some, params, use_tqdm=False)
    turns = [{"prompt_token_ids": one.prompt_token_ids + list(one.outputs[0].token_ids[:-1])} for one in expected]
    later = plain.generate(turns, params, use_tqdm=False)
    changes = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 40} if tight else {}
    llm = guessing(model, number, **changes)
    replaced = Replaced(llm, cycle(["right", "wrong", "half", "silent", "half", "right", "wrong"]), monkeypatch)
    for _ in range(2):
        for asked, truth in ((some, expected), (turns, later)):
            replaced.knows(*truth)
            assert all_of(llm.generate(asked, params, use_tqdm=False)) == all_of(truth)
            llm.engine.check_integrity()
    counted = llm.totals.spec_decode
    assert replaced.silent and 0 < counted.num_accepted_tokens < counted.num_draft_tokens
    assert llm.totals.num_preemptions > 0 if tight else llm.totals.prefix_cache_hits > 0


def test_samples_of_a_prompt_are_those_without_guesses(model: str) -> None:
    """They share the prompt's state until they add to it."""
    some, params = prompts(37, 21), {"temperature": 1.0, "n": 4, "seed": 3}
    expected = run(engine(model), some, **params)
    for changes in ({}, {"num_gpu_blocks_override": 60}, {"max_num_batched_tokens": 17}):
        llm = guessing(model, 3, max_num_seqs=16, **changes)
        assert run(llm, some, **params) == expected
        assert llm.totals.spec_decode.num_draft_tokens > 0


def test_codes_of_8_bits_guess_and_change_nothing(model: str) -> None:
    some = prompts(37, 21, 90)
    expected = run(engine(model, quantization="int8"), some)
    llm = guessing(model, 2, quantization="int8")
    assert run(llm, some) == expected
    assert llm.totals.spec_decode.num_draft_tokens > 0
    assert llm.engine.executor.worker.runner.recording_obstacle is None  # type: ignore[attr-defined]


WIDE = {
    "hidden_size": 64,
    "linear_key_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@pytest.mark.parametrize("plain", [False, True], ids=["codes", "plain"])
@pytest.mark.parametrize("name", ["W4A16", "fp8"])
def test_the_layer_of_a_quantized_checkpoint_guesses_as_its_values_do(
    name: str, plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As codes or, as releases have it, left in 16 bits beside a quantized model."""
    qwen_with_mtp("qwen3.5-moe", tmp_path, **WIDE)
    if name == "fp8":
        write, description = fp8("block", (64, 64), "weight_scale_inv"), FP8
    else:
        write, description = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    kept = {"linear_attn": None} | ({"mtp.": None} if plain else {})
    left = ["re:.*linear_attn.*", *(["re:^mtp.*"] if plain else ["mtp.fc"])]
    if name == "fp8":
        left = [f"model.layers.{layer}.linear_attn" for layer in range(3)] + (["mtp"] if plain else ["mtp.fc"])
    field = "modules_to_not_convert" if name == "fp8" else "ignore"
    folder = quantize_checkpoint(tmp_path, tmp_path / "out", kept | {"_proj": write}, description | {field: left})
    some, seen = prompts(37, 21, 90), []
    for path in (folder, folder / "values"):
        llm = guessing(str(path), 2, quantization="none")
        guessed = guesses_of(llm, monkeypatch)
        seen.append((run(llm, some), guessed))
    assert seen[0] == seen[1] and any(seen[0][1])
    packed = guessing(str(folder), 2)  # as it is served by default
    assert run(packed, some) == run(engine(str(folder)), some)
    assert packed.totals.spec_decode.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_the_layer_of_a_gguf_file_guesses_as_described(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS[name]
    kind, settings = layout.case
    model, layers = layout.model(), settings["num_hidden_layers"]
    alone = make_model(kind, settings | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, seed=7)
    oracle, path = QwenOracle(model, alone), tmp_path / "m.gguf"
    more = {"block_count": layers + 1, "nextn_predict_layers": 1}
    write_family(path, model, replace(layout, metadata=layout.metadata | more), oracle.as_ggml(layers))
    changes = {"quantization": "none", "num_gpu_blocks_override": 1200}
    check_head_on_cpu("qwen3.5", path, {"method": "mtp"}, oracle.guesses, monkeypatch, **changes)


def test_a_gguf_file_without_the_layer_is_refused(tmp_path: Path) -> None:
    layout, path = LAYOUTS["qwen35"], tmp_path / "m.gguf"
    write_family(path, layout.model(), layout)
    args = EngineArgs(model=str(path), skip_tokenizer_init=True, speculative_config={"method": "mtp"})
    with pytest.raises(ConfigError, match=r"the header says that it has none \(nextn_predict_layers\)"):
        args.create_engine_config(progress=False)


def test_what_the_layer_cannot_be_is_refused_by_name(model: str, tmp_path: Path) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(Path(model) / "model.safetensors")
    for changes, error, named in (
        ({"mtp_num_hidden_layers": 0}, ConfigError, r"says that it has none \(mtp_num_hidden_layers\)"),
        ({"mtp_num_hidden_layers": 2}, ConfigError, "mtp_num_hidden_layers of .* must be 1, got 2"),
        ({"mtp_use_dedicated_embeddings": True}, ModelError, "mtp_use_dedicated_embeddings must be False"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, speculative_config={"method": "mtp"})
        with pytest.raises(error, match=named):
            args.create_engine_config(progress=False)
        engine(str(tmp_path))  # by itself the model is served


def test_a_checkpoint_saved_without_the_layer_is_refused_before_it_is_loaded(model: str, tmp_path: Path) -> None:
    """As transformers saves it: config.json still counts the layer."""
    for file in Path(model).iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(model) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"mtp_num_hidden_layers .* no tensors of them.*another method than mtp"):
        guessing(str(tmp_path), 1)
    engine(str(tmp_path))  # by itself the model is served


def test_a_plan_counts_the_layer_whole_on_each_rank(model: str) -> None:
    args = EngineArgs(model=model, skip_tokenizer_init=True, dtype="float32", speculative_config={"method": "mtp"})
    config = replace(args.create_engine_config(progress=False), device="cpu")
    one, two = (measure_built(config, ranks).drafter for ranks in (1, 2))
    assert one == two > 0
