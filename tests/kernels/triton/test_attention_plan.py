"""The work lists of a decode step: every key of every tile of queries is somebody's, once, and nobody has more."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import AttentionMetadata
from octavo_kernels.triton import attention

MAX_QUERIES = 8


@st.composite
def steps(draw):
    # No new tokens: padding, whatever its length.
    shapes = draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 30)), min_size=1, max_size=6))
    return {
        "shapes": shapes,
        "padding": draw(st.integers(0, 3)),
        "window": draw(st.sampled_from([None, 1, 40, 300])),
        "chunked": draw(st.booleans()),
        "tokens": draw(st.sampled_from([1, 2, 8])),
        "programs": draw(st.integers(1, 40)),
        "heads": draw(st.sampled_from([1, 2])),
        "fixed": draw(st.sampled_from([0, 64])),
        "lanes": draw(st.sampled_from([2, 128])),
        "min_chunk": draw(st.sampled_from([32, 64])),
    }


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_every_key_is_somebodys_once(device, step):
    block_n, window, tokens = 16, step["window"], step["tokens"]
    news = [new for _, new in step["shapes"]]
    starts = torch.tensor([0, *news], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor([before + new for before, new in step["shapes"]], dtype=torch.int32)
    rows = int(starts[-1])
    short = [new if new <= MAX_QUERIES else 0 for new in news]
    tiles = sum(-(-new // tokens) for new in short)
    smallest = step["fixed"] or step["min_chunk"]
    items = tiles * -(-int(lengths.max()) // smallest) + 3
    metadata = AttentionMetadata(
        starts.to(device), lengths.to(device), torch.empty(0), torch.empty(0), max(news), int(lengths.max()), rows
    )
    splitting = (
        ("TOKENS", tokens),
        ("BLOCK_N", block_n),
        ("NUM_KV_HEADS", step["heads"]),
        ("MIN_CHUNK", step["min_chunk"]),
        ("FIXED_CHUNK", step["fixed"]),
        ("HAS_LIMIT", False),
        ("CHUNKED", step["chunked"]),
    )
    asked = (metadata, rows, MAX_QUERIES, window, step["programs"], items, rows + step["padding"], splitting)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds the largest number
    try:
        with mock.patch.object(attention, "LANES", step["lanes"]):
            plan = attention._plan(*asked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert attention._plan(*asked) is plan, "made once a step"
    work, owners = (part.cpu().tolist() for part in plan)

    at = 0
    for r, (before, new) in enumerate(step["shapes"]):
        begin, length = int(starts[r]), before + new
        for token in range(0, new, tokens) if new <= MAX_QUERIES else ():
            queries, position = min(tokens, new - token), before + token
            first = 0 if window is None else max(0, before - window + 1)
            if window is not None and step["chunked"]:
                first = before // window * window
            chunks = work[at][6]
            for row in range(begin + token, begin + token + queries):
                assert owners[row][:3] == [at, row - begin - token, chunks]
            seen: list[int] = []
            for item in work[at : at + chunks]:
                assert item[:4] + item[6:7] == [r, begin + token, queries, position, chunks]
                low, high = item[4:6]
                assert low % block_n == 0
                seen += range(low, high)
            assert seen == list(range(seen[0] if seen else 0, position + queries)), (
                "each key once, up to the last query"
            )
            assert seen[0] <= first and seen[0] % block_n == 0
            if not step["fixed"]:
                assert chunks == 1 or (length - seen[0]) / chunks > step["min_chunk"] / 2, "no chunk is a crumb"
            at += chunks
        if new > MAX_QUERIES:
            assert all(owners[row][2] == 1 for row in range(begin, begin + new)), "the prompts' kernel writes these"
    assert all(item[0] == -1 for item in work[at:])
    assert all(owner[2] == 0 for owner in owners[rows:])
    if not step["fixed"]:
        assert at * step["heads"] <= tiles * step["heads"] + step["programs"], "no more than the launch has room for"
