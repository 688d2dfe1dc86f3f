"""Encoders in GGUF files: the vectors, scores and tokens of the checkpoint that a file was made of."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from support.encoders import VOCABULARY, WORDS
from support.gguf_encoders import CONTROL, NAMES, NORMAL, UNKNOWN, UNUSED, write_encoder
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo import LLM
from octavo.engine.args import EngineArgs
from octavo.errors import ModelError
from octavo.gguf.header import GGUFFile
from octavo.gguf.tokenizer import tokenizer_json

TEXTS = ["paris is the capital of france", "A city, a cat!", "dog " * 40, "is it so é", ""]


def vectors(model: Path, **options: Any) -> torch.Tensor:
    llm = LLM(str(model), dtype="float32", **options)
    return torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])


@pytest.mark.parametrize("family", NAMES)
def test_vectors_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path, family)
    assert torch.equal(vectors(path), vectors(tmp_path / "hf"))


@pytest.mark.parametrize(("kind", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_the_file_says_how_it_pools(kind: int, pooling: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "bert", __pooling_type=kind)
    found = EngineArgs(model=str(path)).create_engine_config(progress=False).model.pooler
    assert (found.pooling, found.normalize, found.tasks) == (pooling, True, ("embed",))


@pytest.mark.parametrize("family", ["bert", "nomic-bert", "modernbert"])
def test_quantised_files_give_nearly_the_same(family: str, tmp_path: Path) -> None:
    """In sums over 64 columns few errors of rounding cancel."""
    path = write_encoder(tmp_path, family, qtype="Q8_0")
    assert torch.cosine_similarity(vectors(path), vectors(tmp_path / "hf")).min() >= 0.998


def test_texts_together_are_texts_alone(tmp_path: Path) -> None:
    llm = LLM(str(write_encoder(tmp_path, "nomic-bert", qtype="Q8_0")))
    together = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    assert together == [llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS]


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "modernbert"])
def test_scores_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path, family, head=True, __classifier__output_labels=["good", "bad"])
    ours, its = (LLM(str(model), dtype="float32").classify(TEXTS, use_tqdm=False) for model in (path, tmp_path / "hf"))
    assert [output.outputs.probs for output in ours] == [output.outputs.probs for output in its]


def test_a_file_without_the_pooler_is_scored_without_it(tmp_path: Path) -> None:
    """The converter drops BERT's pooler: what the file has left is computed."""
    path = write_encoder(tmp_path, "bert", head=True)
    llm = LLM(str(path), dtype="float32")
    found = torch.tensor([output.outputs.probs for output in llm.classify(TEXTS, use_tqdm=False)])
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    with torch.inference_mode():
        for row, text in zip(found, TEXTS, strict=True):
            states = model.bert(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state
            assert (row - model.classifier(states[0, 0]).softmax(-1)).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    folder = tmp_path_factory.mktemp("pieces")
    file = GGUFFile(write_encoder(folder, "bert"))
    theirs = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    theirs.add_special_tokens(VOCABULARY[:5])
    return Tokenizer.from_str(json.dumps(tokenizer_json(file.metadata, file.path))), theirs


TEXT = st.lists(st.sampled_from([*WORDS, "Café", "a.b", "日本", "[SEP]", " ", "\n", "xyz"]) | st.text(max_size=4)).map(
    " ".join
)


@given(first=TEXT, second=st.none() | TEXT)
def test_word_pieces_are_cut_as_the_checkpoint_does(
    word_pieces: tuple[Tokenizer, Tokenizer], first: str, second: str | None
) -> None:
    ours, theirs = (tokenizer.encode(first, second) for tokenizer in word_pieces)
    assert (ours.ids, ours.type_ids) == (theirs.ids, theirs.type_ids)


def charsmap() -> bytes:
    """The smallest table of SentencePiece: a trie that matches nothing, and no text that it would write."""
    trie = struct.pack("<256I", *[0] * 256)
    return struct.pack("<I", len(trie)) + trie


@pytest.fixture(scope="module")
def unigrams(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A vocabulary as XLM-R has it, and the same out of a file."""
    theirs = Tokenizer(models.Unigram())
    spaces = pre_tokenizers.Metaspace()
    theirs.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap()), normalizers.Replace(" ", " ")])
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    theirs.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    theirs.train_from_iterator([" ".join(WORDS), *TEXTS] * 20, trainer)
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    pieces = json.loads(theirs.to_str())["model"]["vocab"]
    path = tmp_path_factory.mktemp("unigrams") / "m.gguf"
    writer = GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([text for text, _ in pieces] + ["[PAD0]", "[PAD1]"])
    writer.add_token_scores([*(score for _, score in pieces), 0.0, 0.0])
    kinds = [UNKNOWN if text == "<unk>" else CONTROL if text in special else NORMAL for text, _ in pieces]
    writer.add_token_types([*kinds, UNUSED, UNUSED])
    for name, id in {"bos": 0, "eos": 2, "unknown": 3, "padding": 1}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    writer.add_bool("tokenizer.ggml.remove_extra_whitespaces", True)
    writer.add_precompiled_charsmap(charsmap())
    writer.add_tensor("token_embd.weight", torch.zeros(1, 1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_str(json.dumps(tokenizer_json(GGUFFile(path).metadata, path))), theirs


@given(first=TEXT, second=st.none() | TEXT)
def test_unigrams_are_cut_as_the_checkpoint_does(
    unigrams: tuple[Tokenizer, Tokenizer], first: str, second: str | None
) -> None:
    ours, theirs = (tokenizer.encode(first, second) for tokenizer in unigrams)
    assert ours.ids == theirs.ids
    assert unigrams[0].decode(ours.ids) == unigrams[1].decode(theirs.ids)


def test_rows_without_a_text_never_match(unigrams: tuple[Tokenizer, Tokenizer]) -> None:
    ours, theirs = (tokenizer.encode("a [PAD0] b") for tokenizer in unigrams)
    assert ours.ids == theirs.ids


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("bert", {"__block_count": 2}, r"no place for 16 tensors"),
        ("bert", {"__attention__head_count": 5}, r"bert\.attention\.head_count"),
        ("bert", {"__pooling_type": 9}, r"bert\.pooling_type must be from 0 to 4, got 9"),
        ("modernbert", {"__attention__sliding_window": 0}, r"modern-bert\.attention\.sliding_window"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write_encoder(tmp_path, family, **changes)
    with pytest.raises(ModelError, match=said):
        LLM(str(path))
