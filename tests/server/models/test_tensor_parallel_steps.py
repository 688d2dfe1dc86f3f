"""Steps of a rank on a CPU are one recorded program, exchanges included."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulated_tp import EmulatedTP
from support.paged import load, logits_of
from support.split_cases import CASES, TOKENS
from support.tiny_models import make_model
from torch import Tensor

from octavo.layers.parallel import SharedMemoryGroup, TensorParallel
from octavo_kernels.cpu import argmax, create_shared_memory
from octavo_kernels.cpu.library import NAMES
from octavo_kernels.cpu.recording import Program, record

EXCHANGES = {"all_reduce", "all_gather", "best_of_ranks"}
recording = threading.Lock()  # one step at a time


def names_of(program: Program[Any]) -> list[str]:
    """The operations of a recorded step, in order."""
    words, names, at = program._words.tolist(), [], 0
    while at < len(words):
        names.append(NAMES[words[at]])
        at += 2 + words[at + 1]
    return names


def recorded(programs: list[Program[Any]]) -> Callable[[Callable[[], Tensor]], Tensor]:
    def run(step: Callable[[], Tensor]) -> Tensor:
        with recording:
            programs.append(record(step))
        programs[-1].replay()
        return programs[-1].outputs

    return run


@contextmanager
def two_ranks(path: Path, quantization: str, dealt: bool = False) -> Iterator[EmulatedTP]:
    """Two ranks in one process that exchange through shared memory."""
    descriptor = create_shared_memory(2, 60, has_cores=False)
    try:
        yield EmulatedTP(
            2,
            lambda tp: load(
                path,
                "float32",
                TensorParallel(tp.rank, 2, SharedMemoryGroup(descriptor, tp.rank, 2), expert_parallel=dealt),
                quantization,
            ),
        )
    finally:
        os.close(descriptor)


# Cases, and whether their experts are dealt.
SAMPLE = {("biases", False), ("one-kv-head", False), ("latents", True), ("experts-beside-an-mlp", False)}
SPARSE = ("experts", "sinks", "latents", "experts-beside-an-mlp")
ALL = [(case, False) for case in CASES] + [(case, True) for case in SPARSE]


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    ("case", "dealt"), [one if one in SAMPLE else pytest.param(*one, marks=pytest.mark.long) for one in ALL]
)
def test_a_step_of_a_rank_is_that_of_one_device_and_exchanges(
    case: str, dealt: bool, quantization: str, tmp_path: Path
) -> None:
    """The same operations in the same order; the bits of ranks in one process whose steps are neither recorded nor in
    chunks."""
    make_model(*CASES[case]).save_pretrained(tmp_path)
    alone: list[Program[Any]] = []
    logits_of(load(tmp_path, "float32", None, quantization), TOKENS, run=recorded(alone))
    assert not EXCHANGES & set(names_of(alone[0]))
    emulated = EmulatedTP(2, lambda tp: load(tmp_path, "float32", tp, quantization), dealt)
    expected = emulated.run(lambda model: logits_of(model, TOKENS))
    with two_ranks(tmp_path, quantization, dealt) as ranks:

        def run(model: Any) -> tuple[list[Tensor], list[str]]:
            programs: list[Program[Any]] = []
            return logits_of(model, TOKENS, chunk=5, run=recorded(programs)), names_of(programs[0])

        for logits, names in ranks.run(run):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits, expected[0], strict=True))
            if quantization == "none":
                assert [name for name in names if name not in EXCHANGES] == names_of(alone[0])
                assert names.count("all_gather") == 1


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_best_token_is_found_without_gathering_logits(quantization: str, tmp_path: Path) -> None:
    make_model(*CASES["biases"]).save_pretrained(tmp_path)
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
    with two_ranks(tmp_path, quantization) as ranks:

        def run(model: Any) -> None:
            logits = model.compute_logits(hidden)
            for wanted in (1, 0):
                found, (index, best, _) = model.lm_head.find_best(hidden, torch.tensor([wanted]))
                assert torch.equal(index, argmax(logits)[0]) and torch.allclose(best, argmax(logits)[1])
                assert not wanted or torch.equal(found.argmax(-1), index)

        ranks.run(run)
