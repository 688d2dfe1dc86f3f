"""Draft heads of every kind: nothing that a user sees depends on them, and those that are right save steps."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draft_heads import MIDDLE, Head, MedusaHeads, not_adapting, with_head
from support.examples import examples_of
from support.family_cases import FAMILY_CASES
from support.overlapped import PARAMS, overlapped, prompts_of, tiny
from support.speculation import alike, all_of
from support.tiny_models import FAMILIES, make_model
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError
from octavo.interface.structured_output import StructuredOutputsParams
from octavo.models.eagle import Eagle3Model
from octavo.worker.model_memory import measure_built
from octavo.worker.model_runner import ModelRunner
from octavo.worker.step import Logits
from octavo_kernels.cpu.library import Library

METHODS: dict[str, Any] = {
    "eagle": Head,
    "eagle3": lambda target: Head(target, (0, 1, 2), draft_vocab=200),
    "medusa": lambda target: MedusaHeads(target, count=7, matrices=7),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks": ("llama", {"enable_prefix_caching": False, "long_prefill_token_threshold": 7}),
    "small steps": ("llama", {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 12}),
    "preempted": ("qwen3", {"num_gpu_blocks_override": 14, "max_model_len": 208}),
    "windows": ("gemma2", {"num_gpu_blocks_override": 34, "max_model_len": 208, "long_prefill_token_threshold": 7}),
    "one row": ("llama", {"max_num_seqs": 1}),
}
SAMPLE = {("preempted", "eagle", 5), ("windows", "eagle3", 2), ("small steps", "medusa", 7), ("one row", "eagle3", 1)}


@pytest.mark.parametrize(
    ("case", "method", "k"),
    [
        pytest.param(*one, marks=() if one in SAMPLE else pytest.mark.long)
        for one in product(CASES, METHODS, range(1, 8))
    ],
)
def test_requests_of_every_kind_get_what_they_get_without(
    case: str, method: str, k: int, tmp_path: Path, tiny_checkpoints: dict[str, Path], expected: dict[str, list[Any]]
) -> None:
    """Penalties, bias, top-k, top-p, min-p, stops, min_tokens, n = 3, prompt_logprobs: all in one batch, then again
    with cached prefixes; with two steps in flight, on the runner of GPUs, too."""
    family, changes = CASES[case]
    kind, fields = FAMILIES[family]
    config, path = METHODS[method](make_model(kind, fields)).save(tmp_path), tiny_checkpoints[family]
    more = {"temperature": 0.8, "frequency_penalty": 0.9, "seed": 8, "max_tokens": 30, "logprobs": 3, "n": 2}
    params = [SamplingParams(**values) for values in (*PARAMS, more)]
    if case == "preempted":
        params += [SamplingParams(temperature=0.8, seed=seed, max_tokens=110, ignore_eos=True) for seed in (9, 10)]
    prompts = prompts_of(family, len(params))
    if case not in expected:
        plain = tiny(path, **changes)
        expected[case] = [all_of(plain.generate(prompts, params, use_tqdm=False)) for _ in range(2)]
    for make in (lambda llm: llm, overlapped):
        llm = not_adapting(make(with_head(path, config, k, adapting=True, **changes)))
        for answers in expected[case]:
            made = all_of(llm.generate(prompts, params, use_tqdm=False))
            assert alike(made, answers) if make is overlapped else made == answers
        llm.engine.check_integrity()
        assert llm.totals.spec_decode.num_draft_tokens > 0
        assert case != "preempted" or llm.totals.num_preemptions > 0


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """Of each case, what requests get without guesses: at first, and with cached prefixes."""
    return {}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model of one layer and an EAGLE head that says the same.

    The head's layer is the model's, which embeds tokens to states that its norm leaves as they are. It sees all tokens
    but the first one, of which the others see nothing either: it has a key of its own that none of their queries likes.
    """
    settings = FAMILIES["llama"][1] | {
        "num_hidden_layers": 1,
        "intermediate_size": MIDDLE,
        "tie_word_embeddings": False,
    }
    model, first = make_model("LlamaConfig", settings), 1
    with torch.no_grad():
        layer, table = model.model.layers[0], model.model.embed_tokens.weight
        table.normal_(0, 1)
        table[:, :2] = torch.tensor([1.0, 0.0])
        table[first, 1] = 1.0
        table /= table.pow(2).mean(-1, keepdim=True).sqrt()
        for norm in (layer.input_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        for weight, column, value in (
            (layer.self_attn.q_proj.weight, 0, 40.0),
            (layer.self_attn.k_proj.weight, 1, -40.0),
        ):
            heads = weight.view(-1, 16, weight.shape[1])
            heads[:, [7, 15]] = 0.0  # the pair that rotary embeddings turn least
            heads[:, 7, column] = value
    folder = tmp_path_factory.mktemp("exact")
    model.save_pretrained(folder / "model")
    head = Head(model)
    for name, tensor in layer.state_dict().items():
        if not name.startswith("input_layernorm"):
            head.tensors[f"layers.0.{name}"] = tensor
    head.tensors["fc.weight"] = torch.eye(64, 128)
    return folder / "model", head.save(folder / "head")


@pytest.mark.parametrize("k", [1, 3, 6])
def test_right_guesses_are_all_accepted_in_as_few_steps_as_that_takes(
    k: int, exact: tuple[Path, dict[str, Any]]
) -> None:
    path, config = exact
    prompt, params = [1, *range(20, 55)], SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    expected = all_of(tiny(path).generate([{"prompt_token_ids": prompt}], params, use_tqdm=False))
    assert len(set(expected[0][1][0][1])) > 3, "it does not say the same all the time"
    for in_flight in (1, 2):
        llm = with_head(path, config, k)
        llm = llm if in_flight == 1 else not_adapting(overlapped(llm))
        for _ in range(2):  # without and with a cached prefix
            before = llm.engine.num_steps
            assert all_of(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)) == expected
            steps = llm.engine.num_steps - before - 1 - -(-40 // (k + 1))
            assert steps == 0 or in_flight == 2, "beside the prompt's step, and k + 1 tokens a step"
            assert steps <= 2, "those that are in flight when the last token is seen"
        assert llm.totals.spec_decode.num_accepted_tokens == llm.totals.spec_decode.num_draft_tokens > 0


def test_a_wrong_head_is_left_alone_soon(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    kind, fields = FAMILIES["llama"]
    config = Head(make_model(kind, fields), (0, 1, 2)).save(tmp_path)
    llm = with_head(tiny_checkpoints["llama"], config, 3, adapting=True)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=100, ignore_eos=True)
    llm.generate(prompts_of("wrong", 4), params, use_tqdm=False)
    assert llm.totals.spec_decode.num_draft_tokens < 150, "of 1,200 it would be asked for"


def test_a_drafter_that_fails_costs_no_request(
    tmp_path: Path, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (kind, fields) = tiny_checkpoints["llama"], FAMILIES["llama"]
    llm = with_head(path, Head(make_model(kind, fields), (0, 1, 2)).save(tmp_path), 4)
    steps = llm.engine.executor.worker.runner.drafter.steps
    run, calls = steps.run, []

    def failing(*args: Any) -> tuple[Tensor, Logits]:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise RuntimeError("no")
        state, logits = run(*args)
        assert not len(args[4]) or logits.best_only is None, "one of them is drawn"
        return state, logits._replace(values=logits.values * (float("nan") if len(calls) % 3 == 1 else 1.0))

    monkeypatch.setattr(steps, "run", failing)
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=20, ignore_eos=True)
    expected = tiny(path).generate(prompts_of("fails", 3), params, use_tqdm=False)
    assert all_of(llm.generate(prompts_of("fails", 3), params, use_tqdm=False)) == all_of(expected)
    assert len(calls) > 3


@pytest.mark.parametrize("method", METHODS)
def test_guesses_are_replayed_from_recordings(
    method: str, tmp_path: Path, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two calls of C each, to fill its inputs and to run, and those that are made operation by operation in
    many more; at a temperature, too."""
    config, k = METHODS[method](make_model(*FAMILIES["llama"])).save(tmp_path), 4
    params = [SamplingParams(temperature=t, seed=1, max_tokens=16, ignore_eos=True) for t in (0, 0.7)]
    made: dict[bool, list[Any]] = {True: [], False: []}
    calls, run_at = [0], Library.run_at

    def counted(*args: Any) -> None:
        calls[0] += 1
        run_at(*args)

    monkeypatch.setattr(Library, "run_at", counted)
    for recorded, seen in made.items():
        llm = with_head(tiny_checkpoints["llama"], config, k)
        drafter = llm.engine.executor.worker.runner.drafter
        drafter.steps.obstacle = None if recorded else "none are to be"
        propose = drafter.propose

        def watched(*args: Any, seen: list[Any] = seen, recorded: bool = recorded, propose: Any = propose) -> Any:
            calls[0] = 0
            seen.append(propose(*args))
            if len(seen) == 4:  # of a sequence that has room for all
                assert len(next(iter(seen[-1].values()))) == k
                assert calls[0] <= 2 * k if recorded else calls[0] > 2 * k
            return seen[-1]

        monkeypatch.setattr(drafter, "propose", watched)
        for prompt, one in zip(prompts_of("recorded", 2), params, strict=True):
            llm.generate([prompt], one, use_tqdm=False)
        assert llm.engine.executor.recording_obstacle == drafter.steps.obstacle
    assert made[True] == made[False]


FEW = ("qwen2", "mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3", "opt", "gemma3", "qwen3.5")
# Of Mamba 2 alone transformers gives no embeddings.
_READ = [name for name in FAMILY_CASES if not name.startswith(("gemma3n", "gemma4", "mamba2"))]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in _READ]
)
def test_tapped_states_are_those_of_transformers_layers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fields = FAMILY_CASES[family]
    model = make_model(kind, fields)
    model.save_pretrained(tmp_path / "model")
    count, read = model.config.num_hidden_layers, list[Tensor]()
    head = Head(model, tuple(range(count))).save(tmp_path / "head")
    llm = with_head(tmp_path / "model", head, 2, quantization="none")
    runner = llm.engine.executor.worker.runner
    assert isinstance(runner, ModelRunner) and isinstance(runner.drafter._model, Eagle3Model)
    decoder = runner.drafter._model.model
    join = decoder.join
    monkeypatch.setattr(decoder, "join", lambda taps: read.append(torch.cat(taps, -1)) or join(taps))
    runner.device_runner.recorded_steps = None
    prompt = prompts_of("taps", 1)[0]["prompt_token_ids"][:30] + list(range(5, 30))
    llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1), use_tqdm=False)
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states[:count]
    expected = torch.cat([state[0] for state in states], -1)
    assert (read[0] - expected).abs().max() <= 1e-4 * expected.abs().max()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = [
    "architectures",
    "speculators_model_type",
    "transformer_layer_config",
    "model",
    "eagle_config",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "target_hidden_size",
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_scaling",
    "rope_theta",
    "norm_output",
    "fc_norm",
    "logit_scale",
    "rms_norm_eps",
    "num_heads",
    "medusa_num_heads",
    "max_position_embeddings",
    "intermediate_size",
]


@settings(max_examples=examples_of(120), deadline=None)
@given(st.sampled_from([*METHODS]), st.booleans(), st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
def test_any_config_gives_a_model_or_a_line_of_error(
    some_heads: dict[str, Path], method: str, stored: bool, changes: dict[str, Any]
) -> None:
    folder = some_heads[method]
    stated = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as made:
        for file in folder.glob("*.safetensors"):
            os.link(file, Path(made, file.name))
        Path(made, "config.json").write_text(json.dumps(stated | changes))
        args = EngineArgs(
            model=str(some_heads["target"]),
            load_format="auto" if stored else "dummy",
            skip_tokenizer_init=True,
            speculative_config={"method": method, "model": made, "num_speculative_tokens": 2},
        )
        try:
            config = args.create_engine_config()
            measure_built(replace(config, device="cpu"), 1)
        except (ConfigError, ModelError) as error:
            assert "\n" not in str(error)


@pytest.fixture(scope="module")
def some_heads(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoints: dict[str, Path]) -> dict[str, Path]:
    model, folder = make_model(*FAMILIES["llama"]), tmp_path_factory.mktemp("heads")
    for method, make in METHODS.items():
        make(model).save(folder / method, "released")
    return {"target": tiny_checkpoints["llama"], **{method: folder / method for method in METHODS}}


@pytest.mark.model
@pytest.mark.slow
def test_heads_beside_packed_weights_and_grammars(tmp_path: Path) -> None:
    """Embedding and head are the packed model's; grammars see guesses, too."""
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512, "num_gpu_blocks_override": 256}
    plain, target = LLM(**sizes), SimpleNamespace(config=SimpleNamespace(hidden_size=576, vocab_size=49152))
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    grammar = SamplingParams(temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(json=schema))
    other = SamplingParams(temperature=0.7, seed=3, max_tokens=24, logprobs=2, n=2)
    texts = ["The capital of France is", "Repeat: one two three one two three one", "def add(a, b):"]
    expected = all_of(plain.generate(texts, [grammar, other, grammar], use_tqdm=False))
    for heads in (Head(target), Head(target, (2, 15, 30), draft_vocab=900), MedusaHeads(target, matrices=0)):
        config = heads.save(tmp_path / heads.__class__.__name__) | {"num_speculative_tokens": 3}
        llm = LLM(speculative_config=config, **sizes)
        assert all_of(llm.generate(texts, [grammar, other, grammar], use_tqdm=False)) == expected
        assert llm.engine.executor.recording_obstacle is None
        assert llm.totals.spec_decode.num_draft_tokens > 0
