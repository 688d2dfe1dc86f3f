"""What a step asks of a GPU, seen without one: real engines on a pretended Hopper (`support.pretended_gpu`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one, see test_gpu.py"),
]

ROOT = Path(__file__).parents[3]
# Of the model's graph for few rows, in each layer: four linears, two norms, rotation and cache write, attention and the
# sum of its chunks, the activation.
OF_A_LAYER = {
    "small_linear_kernel": 4,
    "rms_norm_kernel": 2,
    "rope_and_cache_kernel": 1,
    "decode_attention": 1,
    "reduce_chunks": 1,
    "silu_and_mul_kernel": 1,
}


Seen = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """What is seen of a case, by its name."""
    paths = [str(ROOT / part) for part in ("tests", "server", "kernels")]
    command = [sys.executable, "-m", "support.on_pretended_gpu"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def see(case: str) -> dict[str, Any]:
            print(case, file=asked, flush=True)
            found: dict[str, Any] = json.loads(answers.readline())
            assert not found.get("status"), found["log"][-4000:]
            return found

        yield see
        asked.close()


def test_the_checks_see_what_they_are_for(seen: Seen) -> None:
    found = seen("what is noticed")
    assert found["refused"] == found["wrong"]
    assert found["refused wrongly"] == []


def test_weights_come_through_pinned_memory(seen: Seen) -> None:
    """10 MB in two pieces; 20 MB in three, which are converted on the device."""
    assert seen("weights of a file")["launches"] == {"copy_": 2 + 3, "_to_copy": 3}


def test_vectors_are_pooled_without_waiting(seen: Seen) -> None:
    """In every way: the host knows how many rows each text has."""
    assert {str(shapes) for shapes in seen("pooling")["shapes"].values()} == {"[[3, 8], [2, 8]]"}


def test_parts_are_turned_off_one_by_one(seen: Seen) -> None:
    """Each word of OCTAVO_GPU_OFF changes what it names and nothing else, and requests are answered."""
    found = seen("parts off")
    whole = found.pop("")
    assert whole["errors"] == [] and whole["pdl"] and whole["small-linear"]
    for word, seen_then in found.items():
        changed = {name for name in whole if seen_then[name] != whole[name]}
        expected = {"prompt-graphs": {"graphs", "replays"}, "captured-sampler": {"replays"}, "exchange": set()}
        assert changed == expected.get(word, {word}), word


@pytest.mark.sampled(share=5)
@pytest.mark.parametrize("case", ["one group", "many lanes", "few rows", "exact", "fp8 cache"])
def test_no_request_waits(seen: Seen, case: str) -> None:
    """Neither for a kernel to be compiled once the engine is ready, nor the host for the device within a step."""
    found = seen(case)
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert found["embeddings"] == [1024] * 5


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize(
    "case, kernels",
    [
        ("awq", {"group_linear_kernel", "group_dequantize_kernel"}),
        ("fp8 in blocks", {"quantize_kernel", "scaled_linear_kernel"}),
        ("fp8 while loading", {"quantize_kernel", "scaled_linear_kernel"}),
    ],
)
def test_no_request_of_a_quantised_checkpoint_waits(seen: Seen, case: str, kernels: set[str]) -> None:
    """The same for codes that stay codes on the device: by the kernels for few rows, and by that for many."""
    found = seen(case)
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert kernels <= {*found["kernels"]}


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize("case", ["experts", "experts in fp8", "gpt-oss"])
def test_no_request_of_a_mixture_of_experts_waits(seen: Seen, case: str) -> None:
    """Whatever experts its rows are for, and the graphs hold the kernels of experts and no operation instead."""
    found = seen(case)
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert {"route_kernel", "moe_sort_kernel", "moe_gemm_kernel", "moe_sum_kernel"} <= {*found["kernels"]}
    assert {"nonzero", "topk", "sort", "softmax", "_softmax"} & {*found["kernels"]} == set()


def test_no_request_of_latent_attention_waits(seen: Seen) -> None:
    """DeepSeek's graphs hold the kernels of latents, and no product or rotation by torch instead."""
    found = seen("latents")
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert {"latent_cache_kernel", "head_linear_kernel", "decode_attention"} <= {*found["kernels"]}
    assert {"bmm", "cat", "_softmax", "index"} & {*found["kernels"]} == set()


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("case", ["gemma 3n", "gemma 4"])
def test_no_request_of_layers_that_share_keys_waits(seen: Seen, case: str) -> None:
    """Queries alone are normed and turned, embeddings of each layer gate what enters it."""
    found = seen(case)
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert {"rms_norm_kernel", "rope_kernel", "activate_kernel", "decode_attention"} <= {*found["kernels"]}


def test_no_guess_makes_a_request_wait(seen: Seen) -> None:
    """Of none, one, some and 7 tokens: each step replays a model and a sampler, and brings the device which tokens it
    has; none is compiled or kept."""
    found = seen("drafts")
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert max(found["kept"]) < 4096
    assert all(len(steps) > 10 for steps in found["steps"])
    for k, steps in enumerate(found["steps"]):
        assert all(step.pop("replay") == 2 for step in steps), k
        assert sum(sum(step.values()) <= (4 if k else 0) for step in steps) > 0.7 * len(steps), k
        assert all(sum(step.values()) <= 7 for step in steps), (k, steps)


@pytest.mark.sampled(share=5)
@pytest.mark.parametrize(
    ("method", "reads"),
    [
        ("draft_model", 0),
        ("eagle3", 1),
        ("mtp", 2),
        ("eagle", 1),
        ("medusa", 1),
    ],
)
def test_guesses_in_the_worker_stay_on_the_device(seen: Seen, method: str, reads: int) -> None:
    """Steps overlap: a model, a sampler, what the drafter reads of them, and a replay for each guess; the host says
    which tokens there are, no more."""
    found = seen(f"drafts of {method}")
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert max(found["kept"]) < 4096
    for k, steps in zip((0, 3, 6), found["steps"], strict=True):
        assert len(steps) > 10 and all(step.pop("replay") == 2 + reads + k for step in steps), k
        assert sum(sum(step.values()) <= (2 if k else 0) for step in steps) > 0.7 * len(steps), k


@pytest.mark.sampled(share=5)
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3-vl", "idefics3", "qwen2.5-vl"])
def test_no_request_with_images_waits(seen: Seen, name: str) -> None:
    """Neither for kernels of the tower, or of prompts with its embeddings, nor the host for the device; steps beyond
    images are those of text."""
    found = seen(f"images of {name}")
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    assert found["encoded"] == 6
    assert len(found["steps"]) > 10 and all(step.pop("replay") == 2 for step in found["steps"])
    assert all(sum(step.values()) <= 5 for step in found["steps"])


@pytest.mark.sampled(share=4)
@pytest.mark.parametrize("case", ["adapters", "adapters of codes", "adapters that guess", "adapters of fp8"])
def test_no_request_of_an_adapter_waits(seen: Seen, case: str) -> None:
    """Steps with adapters replay graphs of their own, as few as the others, whose graphs hold nothing of adapters."""
    found = seen(case)
    assert found["errors"] == []
    assert found["compiled while serving"] == []
    for graph in found["graphs"]:
        ours = {name for name in graph if name.startswith("lora")}
        assert not ours or {"lora_expand_kernel"} < ours
        assert {"nonzero", "sort", "bmm", "where"} & {*graph} == set() or case == "adapters that guess"
    # As of guesses without adapters. By their times steps overlap or wait for guesses: a turn may start two, or none.
    most, replays = (7, {0, 2, 4}) if case == "adapters that guess" else (5, {2})
    if case != "adapters of codes":
        adapted = [graph for graph in found["graphs"] if any(name.startswith("lora") for name in graph)]
        assert 0 < len(adapted) == len(found["graphs"]) / 2
        assert any("moe_sort_kernel" in graph for graph in adapted)
        for steps in found["steps"].values():
            counts = [step.pop("replay", 0) for step in steps]
            assert len(steps) > 10 and {*counts} <= replays and sum(counts) <= 2 * (len(steps) + 2)
            assert all(sum(step.values()) <= most for step in steps)
    assert [name for step in found["steps"]["none"] for name in step if name.startswith("lora")] == []


@pytest.mark.long
def test_no_request_of_an_adapter_on_ranks_waits(seen: Seen) -> None:
    """Neither on rank 0 nor on another, which reads its part of each adapter; plans count the slots."""
    found = seen("ranks of adapters")
    assert found["answers"] == [] and found["steps"] > 10
    assert found["compiled while serving"] == []
    adapted = [graph for graph in found["graphs"] if "lora_expand_kernel" in graph]
    assert 0 < len(adapted) == len(found["graphs"]) / 2
    assert sum(graph.get("one_shot_kernel", 0) for graph in adapted) == sum(
        graph.get("one_shot_kernel", 0) for graph in found["graphs"] if graph not in adapted
    )
    measured, planned = found["parts"]
    assert 0 < measured["adapters"] <= planned["adapters"] <= 1.15 * measured["adapters"]


def test_a_whole_model(seen: Seen) -> None:
    """Llama-3.1-8B: few launches a step, one graph after the other while the batch stays, memory within its limit."""
    found = seen("whole model")
    assert found["errors"] == []
    model, sampler, cuts = found["decodes"][-3:]  # those of one sequence
    for name, count in OF_A_LAYER.items():
        beside = 1 if name == "rms_norm_kernel" else 0  # the last one
        assert model.pop(name) == found["layers"] * count + beside, name
    assert sum(model.values()) <= 3, model
    assert sum(sampler.values()) <= 4, sampler
    assert sum(cuts.values()) <= 6, cuts
    # Steps of 128 sequences: two graphs each, and sometimes new blocks for all of them at once.
    assert len(found["steady"]) > 50
    assert all(step.pop("replay") == 2 for step in found["steady"])
    assert sum(not step for step in found["steady"]) >= 0.9 * len(found["steady"])
    assert all(sum(step.values()) <= 3 for step in found["steady"])
    # Prompts: the same, the last layer's rest apart; what is beside the graph does not grow with the layers.
    for prompts in found["prompts"]:
        assert prompts.pop("prefill_attention") == found["layers"]
        assert sum(prompts.values()) <= found["layers"] * sum(OF_A_LAYER.values()) + 3
    assert found["step of prompts"].pop("replay") == 1
    assert sum(found["step of prompts"].values()) <= 50
    assert 0.9 * found["limit"] < found["peak"] <= found["limit"]


def test_plans_of_quantised_checkpoints_are_what_is_loaded(seen: Seen) -> None:
    """To the byte, by headers and by config.json alone."""
    found = seen("plans of codes")
    assert len(found) >= 10
    for recipe, (loaded, by_headers, by_config) in found.items():
        assert by_headers == by_config == loaded, recipe


def test_plans_reserve_what_engines_measure(seen: Seen) -> None:
    """A little more for steps and graphs, never less, and as many blocks within one in a hundred."""
    for (measured, blocks, weights), (planned, planned_blocks, planned_weights) in seen("plans")["found"]:
        assert weights == planned_weights
        assert measured.get("encoder cache") == planned.get("encoder cache")
        for part in {"activations", "graphs", "adapters", "encoder"} & measured.keys():
            assert measured[part] <= planned[part] <= 1.15 * measured[part], (part, measured, planned)
        assert 0.99 * blocks <= planned_blocks <= blocks


@pytest.mark.sampled(share=5)
@pytest.mark.parametrize(
    "case", ["ranks", "ranks that guess", "ranks of experts", "ranks of latents", "ranks of float16"]
)
def test_no_request_of_ranks_waits(seen: Seen, case: str) -> None:
    """Of several GPUs: exchanges are in the graphs, none is waited for by the host, on rank 0 as on another; greedy
    tokens and those drawn without cuts are exchanged, not logits. Plans count what is mapped."""
    found = seen(case)
    assert found["answers"] == [] and found["steps"] > 30
    assert found["compiled while serving"] == []
    models = [graph for graph in found["graphs"] if "decode_attention" in graph]
    shared = 1 if case == "ranks of latents" else 0  # layers whose shared expert is rounded apart, as one process does
    for graph in [*models, *(graph for graph in found["graphs"] if "prefill_attention" in graph)]:
        sums = graph.get("one_shot_kernel", 0) + graph.get("two_shot_kernel", 0)
        whole = 2 * found["layers"] + 1  # the embedding; the last layer's rest is not in graphs of prompts
        assert whole - 2 <= sums <= whole + shared, graph
    samplers = [graph for graph in found["graphs"] if "scan_kernel" in graph]
    assert samplers and models
    for graph in samplers:
        assert (graph.get("gather_kernel", 0), graph.get("best_kernel", 0)) in ((0, 1), (1, 0)), graph
    assert any(graph.get("best_kernel") for graph in samplers)
    measured, planned = found["parts"]
    assert measured["communication"] == planned["communication"] > 0
    assert found["weights"][0] == found["weights"][1]
