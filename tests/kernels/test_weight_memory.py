"""Memory for weights: of their own, aligned, in huge pages, and given back."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels.weight_memory import HUGE_PAGE, empty_weight

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(address: int) -> dict[str, int]:
    """Sizes in KiB of the mapping that holds an address."""
    sizes: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and (size := re.match(r"(\w+): +(\d+) kB", line)):
            sizes[size[1]] = int(size[2])
    return sizes


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 3000)), min_size=1, max_size=12), st.data())
@settings(max_examples=20, deadline=None)
def test_weights_do_not_share_a_byte(shapes, data):
    dtypes = [data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])) for _ in shapes]
    weights = [empty_weight(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    for number, (weight, shape, dtype) in enumerate(zip(weights, shapes, dtypes, strict=True)):
        assert weight.shape == shape and weight.dtype == dtype
        assert weight.data_ptr() % 64 == 0 and bool((weight == number).all())


def test_a_model_of_sizes_alone_gets_no_memory():
    with torch.device("meta"):
        assert empty_weight((1 << 40,), torch.uint8).is_meta


@pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="this system has no transparent huge pages"
)
def test_a_weight_lies_in_huge_pages():
    weight = empty_weight((48, HUGE_PAGE), torch.uint8)
    assert weight.data_ptr() % HUGE_PAGE == 0
    weight.fill_(1)
    assert mapping_of(weight.data_ptr())["AnonHugePages"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_with_the_last_weight_in_it():
    weight = empty_weight((48, HUGE_PAGE), torch.uint8)
    part, address = weight[3], weight.data_ptr()
    del weight
    assert mapping_of(address)
    del part
    gc.collect()
    assert not mapping_of(address)
