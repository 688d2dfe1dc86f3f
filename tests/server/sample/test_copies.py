"""What the sampler's state brings to a device never lets the host wait for the step that is under way there."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.interface.sampling_params import SamplingParams
from octavo.sample import devices
from octavo.sample.states import SamplingStates

ELSEWHERE = torch.device("meta")  # stands for a GPU


class Copies(TorchDispatchMode):
    """Notes the copies from the host to elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_to_copy" and args[0].device.type == "cpu" and kwargs.get("device") == ELSEWHERE:
            self.sources.append((args[0].data_ptr(), kwargs.get("non_blocking", False)))
        if name == "copy_" and args[1].device.type == "cpu" and args[0].device == ELSEWHERE and args[1].ndim:
            self.sources.append((args[1].data_ptr(), (args[2:] or (kwargs.get("non_blocking", False),))[0]))
        return func(*args, **kwargs)


def test_every_copy_is_from_pinned_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []

    def pinned(host: torch.Tensor) -> torch.Tensor:
        kept.append(host.clone())
        return kept[-1]

    monkeypatch.setattr(devices, "pinned", pinned)
    states = SamplingStates(4, 500, ELSEWHERE)
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        presence_penalty=1.0,
        repetition_penalty=1.1,
        min_tokens=3,
        logit_bias={3: 1.0},
        allowed_token_ids=[1, 2, 3],
        logprobs=1,
    )
    with Copies() as copies:
        for row in range(3):
            states.add_request(row, params, [1, 2, 3], [4] * row, frozenset([7]), 0, 0)
            states.table()
            states.make_metadata([row], [3 + row])
    pointers = [tensor.data_ptr() for tensor in kept]
    assert copies.sources, "nothing was noted"
    assert all(pointer in pointers and non_blocking for pointer, non_blocking in copies.sources)
    assert len({source for source, _ in copies.sources}) == len(copies.sources), "memory was used twice"


def test_on_a_cpu_the_table_is_a_copy() -> None:
    states = SamplingStates(2, 500, use_kernels=True)
    states.add_request(0, SamplingParams(temperature=0.5), [1], [], frozenset(), 0, 0)
    table = states.table()
    states.add_request(1, SamplingParams(temperature=0.7), [1], [], frozenset(), 0, 0)
    assert table.temperature[1] == 0
    assert states.table().temperature[1] == pytest.approx(0.7)
