"""What the device finds out about drafts is what comparing them one by one says."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.gpu.draft_plan import PADDING, accept, packed_plan, unpack_plan


@given(st.data())
def test_right_drafts_count_up_to_the_first_wrong_one(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=5))
    count, total = len(lengths), sum(lengths) + len(lengths)
    size = max(1, total + data.draw(st.integers(0, 3)))
    places = min(size, count + data.draw(st.integers(0, 2)))
    rows = np.array(data.draw(st.permutations(range(9)))[:count], dtype=np.int64)
    packed = packed_plan(rows, np.array(lengths, dtype=np.int64) + 1, size, places)
    wider = np.pad(packed, ((0, 0), (0, 2)))  # as memory of a larger step has it
    plan = unpack_plan(torch.from_numpy(wider), size, places)
    token = st.integers(0, 1)
    tokens = data.draw(st.lists(token, min_size=size, max_size=size))
    drafts = data.draw(st.lists(token, min_size=size, max_size=size))
    invalid = data.draw(st.lists(st.sampled_from([False] * 4 + [True]), min_size=size, max_size=size))

    accepted, last = accept(plan, torch.tensor(drafts), torch.tensor(tokens), torch.tensor(invalid))

    at = 0
    for i, length in enumerate(lengths):
        right = 0
        while right < length and tokens[at + right] == drafts[at + right] and not invalid[at + right]:
            right += 1
        if invalid[at + right] and right:
            right -= 1
        assert plan.rows[at : at + length + 1].tolist() == [rows[i]] * (length + 1)
        assert (accepted[i], last[i]) == (right, tokens[at + right]), (i, lengths, tokens, drafts, invalid)
        at += length + 1
    assert plan.rows[at:].tolist() == [PADDING] * (size - at)
    assert accepted[count:].tolist() == [0] * (places - count)
