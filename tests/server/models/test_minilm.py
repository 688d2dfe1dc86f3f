"""The real all-MiniLM-L6-v2: its package's file, and the vectors of transformers on real sentences."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import transformers
from support.encoders import MINILM, MINILM_SHA256

from octavo import LLM
from octavo.errors import ModelError
from octavo.fetch.sources import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return resolve_model("all-minilm-l6-v2", progress=False).path
    except ModelError as error:
        if "cannot fetch" not in str(error):  # another file than the pinned one is no reason to skip
            raise
        pytest.skip(str(error))


def sentences(count: int) -> list[str]:
    """Sentences of 3 to 60 words from the standard library's own help, which no change of this project alters."""
    paragraphs = [" ".join(paragraph.split()) for topic in sorted(topics) for paragraph in topics[topic].split("\n\n")]
    parts = [part for paragraph in paragraphs for part in re.split(r"(?<=[.]) (?=[A-Z])", paragraph)]
    found = {part for part in parts if re.fullmatch(r"[A-Z][^|=*+:]*[.]", part) and 3 <= len(part.split()) <= 60}
    return random.Random(0).sample(sorted(found), count)


def vectors_of_transformers(path: Path, texts: list[str]) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for first in range(0, len(texts), 50):
            batch = tokenizer(
                texts[first : first + 50], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            mask = batch["attention_mask"][..., None]
            hidden = model(**batch).last_hidden_state
            rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows))


def test_the_file_is_the_one_that_was_published(path: Path) -> None:
    assert MINILM.endswith(f"{path.parent.name}/{path.name}/")
    assert hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() == MINILM_SHA256


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_vectors_are_those_of_transformers(path: Path, count: int) -> None:
    texts = sentences(count)
    expected = vectors_of_transformers(path, texts)
    for quantization, usual, least in (("none", 0.99999, 0.99999), ("int8", 0.999, 0.998)):
        llm = LLM("all-minilm-l6-v2", quantization=quantization)
        assert llm.config.scheduler.max_model_len == 256, "sentence_bert_config.json's"
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        found = torch.tensor([output.outputs.embedding for output in outputs])
        assert found.norm(dim=1).allclose(torch.ones(count)), "its last module normalises"
        similar = torch.nn.functional.cosine_similarity(found, expected).sort().values
        assert similar[count // 1000] >= usual, "one sentence in a thousand may differ more"
        assert similar[0] >= least
