"""Files of families other than Llama, laid out as llama.cpp's converter does: the logits of transformers.

That llama.cpp itself reads them so is in test_llama_cpp.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gguf_families import LAYOUTS, write_family
from support.paged import load, logits_of

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 60)], [7]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    reference = LAYOUTS[layout].model()
    write_family(tmp_path / "m.gguf", reference, LAYOUTS[layout])
    for tokens, ours in zip(TOKENS, logits_of(load(tmp_path / "m.gguf"), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))
