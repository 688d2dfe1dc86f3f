"""Engines whose layers are dealt to stages: they answer as one process does, bit for bit."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.serving import are_gone, tiny_model
from support.speculation import Oracle, accepted, all_of, speculate
from support.split_cases import CASES
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.executor.places import create_memory, local_place
from octavo.executor.ranks import Ranks, send_results
from octavo.interface.engine_config import ParallelConfig
from octavo.interface.kv_cache_layout import groups_of_stage, make_groups
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.ranks import split_layers
from octavo.interface.step import ModelRunnerOutput, NewRequestData
from octavo.system.channel import Channel
from octavo.worker.input_batch import InputBatch
from octavo.worker.request_states import RequestStates

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8], [*range(3, 60)], [9] * 33, [*range(100, 140)])]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, seed=8, max_tokens=40, ignore_eos=True, n=3, top_p=0.9, presence_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=2),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
}


def answers(llm: LLM, prompts: Sequence[Any] = PROMPTS, params: Any = PARAMS) -> list[Any]:
    """All that a request gives: tokens, and log-probabilities to the last bit."""
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [
        (output.prompt_logprobs, [(sample.token_ids, sample.logprobs) for sample in output.outputs])
        for output in outputs
    ]


@pytest.mark.sampled(share=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "stages", "ranks"),
    [("llama", 2, 1), ("gemma3", 2, 2), ("experts", 2, 2), ("gemma3", 3, 1)],
)
def test_stages_answer_as_one_does(family: str, stages: int, ranks: int, tmp_path: Path) -> None:
    """Greedy and sampled, of several samples, with penalties and log-probabilities of prompts, in chunks; the same with
    fewer blocks than all need, and where prefixes are found. Every step is recorded, and a stage holds its layers.
    Of a mixture, the ranks of a stage have some experts of its layers whole."""
    config_class, settings = (FAMILIES | {"experts": CASES["experts"]})[family]
    make_model(config_class, settings | {"num_hidden_layers": 5}).save_pretrained(tmp_path)
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "enable_expert_parallel": family == "experts", **OPTIONS}
    expected = answers(LLM(str(tmp_path), **options))
    blocks = 12 if family == "llama" else 60
    llm = LLM(str(tmp_path), num_gpu_blocks_override=blocks, pipeline_parallel_size=stages, **options)
    executor, under_way = llm.engine.executor, list[int]()
    others = executor._ranks
    begin_step = others.begin_step

    def watched(step_id: int) -> None:
        begin_step(step_id)
        under_way.append(len(others._steps))

    others.begin_step = watched
    assert answers(llm) == expected and executor.recording_obstacle is None
    assert max(under_way) == stages and sum(count == stages for count in under_way) > len(under_way) / 2
    assert answers(llm) == expected and llm.totals.prefix_cache_hits
    assert family != "llama" or llm.totals.num_preemptions
    layers = [layer for layer in executor.worker.model.model.layers if list(layer.parameters())]
    assert len(layers) == len(executor.worker.runner.kv_cache.layers) == (3 if stages == 2 else 2)
    pids = [rank.process.pid for rank in others._ranks]
    assert len(pids) == stages * ranks - 1
    del llm, executor
    gc.collect()
    assert are_gone(pids)


@pytest.mark.sampled(share=2)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "stages", "ranks"), [("gemma3", 2, 2), ("llama", 3, 1)])
def test_stages_verify_guesses(family: str, stages: int, ranks: int, tmp_path: Path) -> None:
    """The first stage proposes and the last one decides, which changes no bit: of right guesses, which save steps, of
    wrong ones and both, with few blocks; and by the methods that there are."""
    config_class, settings = FAMILIES[family]
    make_model(config_class, settings | {"num_hidden_layers": 5}).save_pretrained(tmp_path)
    options: dict[str, Any] = {"tensor_parallel_size": ranks, **OPTIONS}
    plain = LLM(str(tmp_path), **options).generate(PROMPTS, PARAMS, use_tqdm=False)
    for method in ("ngram", "suffix"):
        speculative = {"method": method, "num_speculative_tokens": 4}
        llm = LLM(
            str(tmp_path),
            pipeline_parallel_size=stages,
            num_gpu_blocks_override=12 if family == "llama" else 60,
            speculative_config=speculative,
            **options,
        )
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == all_of(plain), method
    steps = dict[str, int]()
    for kind in ("right", "half", "wrong"):
        speculate(llm, Oracle(kind, plain, llm.config.model.vocab_size), 4)
        before, drafted = llm.engine.num_steps, accepted(llm)
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == all_of(plain), kind
        drafts, right = (now - then for now, then in zip(accepted(llm), drafted, strict=True))
        assert drafts > 20 and (kind == "half" or right == (drafts if kind == "right" else 0))
        steps[kind] = llm.engine.num_steps - before
        llm.engine.check_integrity()
    assert steps["right"] < 0.7 * steps["wrong"] and (family != "llama" or llm.totals.num_preemptions)


@pytest.mark.slow
def test_the_embedded_model_on_two_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """In the file's own codes; with a grammar, which the first stage follows and the last one obeys, also after
    guesses. `octavo plan` says before what each stage holds."""
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    grammar = StructuredOutputsParams(json=schema)
    params = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2),
        SamplingParams(max_tokens=40, structured_outputs=grammar, seed=1, temperature=1.5),
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1),
    ]
    prompts = ["The capital of France is", "My age as JSON: ", "One two three four"]
    llm = LLM(max_model_len=256, pipeline_parallel_size=2)
    plain = LLM(max_model_len=256).generate(prompts, params, use_tqdm=False)
    assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(plain)
    for kind in ("right", "half"):
        speculate(llm, Oracle(kind, plain, llm.config.model.vocab_size), 4)
        assert all_of(llm.generate(prompts, params, use_tqdm=False)) == all_of(plain), kind
    assert accepted(llm)[1] > 20
    assert main(["plan", "--cpu", "-pp", "2", "--max-model-len", "256", "--json"]) == 0
    said, executor = json.loads(capsys.readouterr().out), llm.engine.executor
    assert said["served"] and said["layers_per_stage"] == [17, 13]  # and a head of the size of eight
    assert said["weights_bytes_per_stage"][0] == executor.worker.ledger.weights
    assert said["num_blocks"] == executor.num_blocks - 1 and said["max_model_len"] == 256


@given(
    num_layers=st.integers(1, 40),
    stages=st.integers(1, 8),
    head=st.integers(0, 12),
    whole=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 12)), max_size=3),
)
def test_layers_are_dealt_evenly_and_what_belongs_together_stays(
    num_layers: int, stages: int, head: int, whole: list[tuple[int, int]]
) -> None:
    """The last stage's head counts as layers, but for one that it has in any case."""
    ranges = [range(first, min(first + size, num_layers)) for first, size in whole if first < num_layers]
    cuts = [cut for cut in range(1, num_layers) if not any(one.start < cut < one.stop for one in ranges)]
    if len(cuts) < stages - 1:
        with pytest.raises(ConfigError, match=f"{num_layers} layers cannot be dealt to {stages} pipeline stages"):
            split_layers(num_layers, stages, ranges, head)
        return
    found = split_layers(num_layers, stages, ranges, head)
    assert [layer for part in found for layer in part] == list(range(num_layers)) and all(found)
    assert all(part.start in (0, *cuts) for part in found)
    if not ranges:
        *others, last = map(len, found)
        costs = [*others, last + head] if last > 1 or not others else [*others, min(others) + 1]
        assert max(costs) - min(costs) <= 1 and (not others or others[0] == max(others))
        assert last > 1 or not others or max(others) <= 2 + head


@given(windows=st.lists(st.sampled_from([None, None, 8, 24]), min_size=2, max_size=30), stages=st.integers(2, 4))
def test_groups_are_the_same_on_every_stage(windows: list[int | None], stages: int) -> None:
    """As many of each window, in one order; no layer is missing, and none has another's window."""
    specs = [KVCacheSpec(2, 16, "float32", window=window) for window in windows]
    whole, first = make_groups(specs, 64), 0
    for part in split_layers(len(specs), min(stages, len(specs))):
        groups = groups_of_stage(whole, part)
        assert [group.window for group in groups] == [group.window for group in whole]
        assert sorted(layer for group in groups for layer in group.layers) == list(range(len(part)))
        assert all(windows[first + layer] == group.window for group in groups for layer in group.layers)
        first += len(part)


def test_states_go_from_stage_to_stage() -> None:
    """Of steps of any size, two on the way, in memory that grows; whoever waits for one that has ended is told."""
    parallel = ParallelConfig(pipeline_parallel_size=2)
    first, last = (local_place(parallel, rank, own) for rank, own in enumerate(create_memory(parallel, False)))
    assert first.before is None and last.after is None and first.after is not None and last.before is not None
    sent = [
        [torch.randn(rows, 5), torch.randn(rows, 17).to(torch.bfloat16)][: 1 + rows % 2]
        for rows in (1, 3, 200, 2, 1000, 1000, 7)
    ]
    for before, states in zip([None, *sent], [*sent, None], strict=True):
        if states is not None:
            first.after.send(states)
        if before is not None:
            assert all(map(torch.equal, last.before.receive(), before))
    first.after.send(sent[0])
    first.after._channel.close()
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        [last.before.receive() for _ in range(2)]


def test_results_of_any_size_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.executor.ranks._PIECE", 100)
    ours, theirs = map(Channel, socket.socketpair())
    ranks = Ranks(2)
    ranks._ranks.append(SimpleNamespace(number=1, name="rank 1", channel=ours))
    sent = [bytes(range(256))[:size] for size in (1, 99, 100, 101, 200, 256)]
    for payload in sent:
        send_results(theirs, payload)
    assert [ranks.next_results(1) for _ in sent] == sent


def test_a_grammar_is_not_told_the_token_of_an_earlier_sequence() -> None:
    """One that has had the same id, and whose token was in flight when it was aborted."""
    told: list[dict[str, list[int]]] = []
    states = RequestStates.__new__(RequestStates)
    states.batch = InputBatch(4, 32, 16)
    states.grammars = _Grammars(told)

    def add(req_id: str) -> None:
        params = SamplingParams(max_tokens=3)
        states.batch.add(NewRequestData(req_id, [1, 2], 2, params, frozenset(), 0, [[1]], 0, 0))

    add("a")
    add("b")
    sampled = states.identities(["a", "b"])
    states.batch.remove("a")
    add("a")
    output = ModelRunnerOutput(sampled_token_ids={"a": [7], "b": [8]}, errors={"b": "nothing could be sampled"})
    states.take_tokens(output, sampled)
    assert told == [{"b": [8]}] and output.grammar_errors == {"b": "no"} and not output.errors


class _Grammars:
    def __init__(self, told: list[dict[str, list[int]]]) -> None:
        self._told = told

    def __len__(self) -> int:
        return 2

    def accept(self, tokens: dict[str, list[int]]) -> dict[str, str]:
        self._told.append(tokens)
        return {"b": "no"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pipeline_parallel_size": 3}, "3 is more than the 2 layers"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer >= 1"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"model": "x", "num_speculative_tokens": 2}},
            "method draft_model does not work with pipeline_parallel_size 2 yet: give method ngram or suffix",
        ),
        ({"pipeline_parallel_size": 2, "nnodes": 3}, "on 3 nodes is not supported yet: each node has a stage, give 3"),
        ({"pipeline_parallel_size": 40, "tensor_parallel_size": 2}, "at most 48 ranks, not 80"),
    ],
)
def test_features_that_stages_lack_are_refused(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    tiny_model(tmp_path)
    arguments.setdefault("load_format", "dummy")
    with pytest.raises(ConfigError, match=said):
        EngineArgs(str(tmp_path), **arguments).create_engine_config()
