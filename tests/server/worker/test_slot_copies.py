"""Adapters come into slots beside the steps under way, in an order that streams of a simulated device keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker import lora

SLOTS = 3


class Stream:
    """What is known to be done before whatever is launched next: numbers of launches."""

    def __init__(self) -> None:
        self.done = set[int]()

    def wait_event(self, event: Event) -> None:
        self.done |= event.done

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done


class Event:
    done = frozenset[int]()
    device: Device

    def record(self) -> None:
        self.done = frozenset(self.device.current.done)


class Device:
    """Streams without a way for the host to wait."""

    def __init__(self) -> None:
        self.steps = self.current = Stream()
        self.launched: list[frozenset[int]] = []  # what each launch comes after

    def launch(self) -> int:
        number = len(self.launched)
        self.launched.append(frozenset(self.current.done))
        self.current.done.add(number)
        return number

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def cuda(self) -> SimpleNamespace:
        event = type("OfDevice", (Event,), {"device": self})
        return SimpleNamespace(Stream=Stream, Event=event, stream=self.stream, current_stream=lambda: self.current)


@given(st.lists(st.one_of(st.integers(0, SLOTS - 1), st.sets(st.integers(0, SLOTS - 1))), max_size=30))
def test_a_slot_is_neither_read_before_it_is_full_nor_filled_while_it_is_read(what):
    """A number: this slot is filled; a set: a step reads these."""
    device = Device()
    fills: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    reads: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    memory = SimpleNamespace(fill=lambda slot, image: fills[slot].append(device.launch()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "torch", SimpleNamespace(cuda=device.cuda()))
        copies = lora.SlotCopies(memory, torch.device("cuda"))  # type: ignore[arg-type]
        for one in what:
            if isinstance(one, set):
                if one:
                    copies.begin_step(one)
                number = device.launch()
                for slot in one:
                    assert set(fills[slot]) <= device.launched[number]
                    reads[slot].append(number)
            else:
                copies.fill(one, torch.empty(0))
                assert set(reads[one]) <= device.launched[fills[one][-1]]


def test_a_copy_does_not_wait_for_a_step_of_other_slots(monkeypatch):
    device, fills = Device(), list[int]()
    memory = SimpleNamespace(fill=lambda slot, image: fills.append(device.launch()))
    monkeypatch.setattr(lora, "torch", SimpleNamespace(cuda=device.cuda()))
    copies = lora.SlotCopies(memory, torch.device("cuda"))  # type: ignore[arg-type]
    copies.begin_step({0})
    first = device.launch()
    copies.begin_step({1})
    second = device.launch()
    copies.fill(0, torch.empty(0))
    assert first in device.launched[fills[0]] and second not in device.launched[fills[0]]
    copies.begin_step({1})
    assert fills[0] not in device.launched[device.launch()]
