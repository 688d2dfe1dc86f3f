"""Ranks on GPUs that are pretended (`support.pretended_gpu`): the engine is rank 0 of several, of which the others are
not there; what these would be sent is kept, and then rank 1 computes it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from support.pretended_gpu import PretendedGpu

from octavo.executor import multiproc, worker_proc
from octavo.executor.device_groups import MappedGroup
from octavo.executor.places import Place
from octavo.executor.ranks import Ranks
from octavo.interface.engine_config import EngineConfig
from octavo.layers.parallel import TensorParallel
from octavo.memory.dry_run import make_plan
from octavo.plan.measure import measure
from octavo.system.channel import Kind
from octavo.worker.grammars.shared_masks import FollowingGrammars
from octavo.worker.worker import Worker
from octavo_kernels.triton.exchange import Exchange


class Alone:
    """A store in which every rank has what this one has."""

    def __init__(self) -> None:
        self._last = ""

    def set(self, key: str, value: str) -> None:
        self._last = value

    def get(self, key: str) -> str:
        return self._last

    def check(self, keys: list[str]) -> bool:
        return True


def place_of(rank: int, ranks: int) -> Place:
    addresses = torch.zeros(ranks + 1, dtype=torch.int64, device="cuda")
    host = torch.zeros(ranks + 1, dtype=torch.int32)
    group = MappedGroup(Exchange(addresses, rank, ranks), host, Alone())  # type: ignore[arg-type]
    return Place(rank, group, TensorParallel(rank, ranks, group))


class OthersAreNotThere(Ranks):
    """See `octavo.executor.rank_processes.RankProcesses`."""

    started: ClassVar[list[OthersAreNotThere]] = []

    def __init__(self, numbers: range, heartbeats: int | None = None) -> None:
        super().__init__(len(numbers) + 1)
        self.sent: list[tuple[Kind, bytearray]] = []
        self.started.append(self)

    def open_place(self, config: EngineConfig) -> Place:
        self.config = config
        return place_of(0, self.size)

    def send(self, kind: Kind, payload: bytes, first: int = 1) -> None:
        self.sent.append((kind, bytearray(payload)))


class Sent:
    """The channel of another rank, at whose end rank 0 ends."""

    def __init__(self, sent: list[tuple[Kind, bytearray]]) -> None:
        self._left = iter(sent)

    def receive(self) -> Iterator[tuple[Kind, bytearray]]:
        found = next(self._left, None)
        if found is None:
            raise EOFError
        return iter([found])

    def wait(self) -> None: ...

    def send(self, kind: Kind, payload: bytes) -> None: ...


def as_ranks(gpu: PretendedGpu, make: Callable[[int], Any], use: Callable[[Any], Any], size: int = 2) -> dict[str, Any]:
    """What `use` gives for the engine that `make` makes of ``size`` ranks; its graphs, what was compiled once it was
    ready, and on rank 1 once that was; parts of the ledger as measured and planned."""
    with (
        mock.patch.object(multiproc, "RankProcesses", OthersAreNotThere),
        mock.patch("octavo.llm._start_beside", return_value=None),  # else those of this machine are started first
    ):
        llm = make(size)
    graphs = [Counter(launch.name for launch in graph.launches) for graph in gpu.graphs]
    worker: Worker = llm.engine.executor.worker
    device = replace(worker._device_memory(), in_use=int(dict(worker.ledger.parts)["others, context"]))
    plan = make_plan(replace(OthersAreNotThere.started[-1].config, device="cuda"), device, measure, size)
    assert plan.ledger is not None
    parts = [dict(worker.ledger.parts), dict(plan.ledger.parts)]
    weights = [worker.ledger.weights, plan.ledger.weights]
    known = set(gpu.kernels)
    gpu.strict = True
    answers = use(llm)
    gpu.strict = False
    new = sorted(gpu.kernels[h].metadata.name for h in set(gpu.kernels) - known)
    layers = worker.config.model.num_layers
    ranks = OthersAreNotThere.started[-1]
    del llm, worker
    gc.collect()
    new += _follow(gpu, ranks)
    steps = sum(kind is Kind.STEP for kind, _ in ranks.sent)
    return {
        "answers": answers,
        "graphs": graphs,
        "compiled while serving": new,
        "parts": parts,
        "weights": weights,
        "layers": layers,
        "steps": steps,
    }


def _follow(gpu: PretendedGpu, ranks: OthersAreNotThere) -> list[str]:
    """Be rank 1 until rank 0 has ended. Returns what it compiles once it is ready."""
    gpu.kernels.clear()
    channel = Sent(ranks.sent)
    inbox, place = worker_proc.Inbox(channel), place_of(1, ranks.size)  # type: ignore[arg-type]
    worker = Worker(
        ranks.config,
        tp=place.tp,
        agree=place.world.smallest,
        make_grammars=lambda _, vocab_size: FollowingGrammars(vocab_size, inbox.next_mask),
    )
    known = set(gpu.kernels)
    gpu.strict = True
    try:
        worker_proc.run(worker, place, channel, inbox, SimpleNamespace(progress=lambda steps: None))  # type: ignore[arg-type]
    except EOFError:
        return sorted(f"{gpu.kernels[h].metadata.name} on rank 1" for h in set(gpu.kernels) - known)
    raise AssertionError("rank 1 has ended before rank 0")
