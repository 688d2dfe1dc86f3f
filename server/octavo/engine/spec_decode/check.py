"""Finds out before anything is loaded whether a model can guess for another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.errors import ConfigError
from octavo.interface.architectures import PREDICTION_LAYERS
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config import config_class
from octavo.interface.model_config.mtp import PredictionConfig
from octavo.text.tokenizer import Tokenizer


def check_draft(draft: ModelConfig, target: ModelConfig, ids_only: bool) -> None:
    """Raises ConfigError, of one line, for a draft model that cannot guess for ``target``. ``ids_only``: there are no
    tokenizers to be compared."""
    way_out = "give a model with the same tokenizer"
    if draft.is_encoder:
        raise ConfigError(f"speculative_config: model {draft.model} generates no text; {way_out}")
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config: model {draft.model} has a vocabulary of {draft.vocab_size} tokens, {target.model} "
            f"one of {target.vocab_size}; {way_out}"
        )
    if ids_only:
        return
    theirs, ours = _tokenizer_file(draft), _tokenizer_file(target)
    if not theirs.exists() or not ours.exists() or theirs.read_bytes() == ours.read_bytes():
        return
    guessed, known = (Tokenizer.from_files(model.files).backend.get_vocab() for model in (draft, target))
    if guessed != known:
        token = min(guessed.items() ^ known.items(), key=lambda item: (item[1], item[0]))[1]
        names = [next((name for name, i in vocabulary.items() if i == token), None) for vocabulary in (guessed, known)]
        raise ConfigError(
            f"speculative_config: model {draft.model} has another tokenizer than {target.model} (token {token} is "
            f"{names[0]!r}, not {names[1]!r}); {way_out}"
        )


def prediction_layers(model: ModelConfig, num_tokens: int) -> ModelConfig:
    """The layers for multi-token prediction of ``model``, as a model of their own: as many as there are, up to
    ``num_tokens`` unless that is 0. Raises ConfigError."""
    way_out = "give another method, or none"
    architecture = PREDICTION_LAYERS.get(model.architecture)
    if architecture is None:
        known = ", ".join(PREDICTION_LAYERS)
        raise ConfigError(
            f"speculative_config: method mtp is there for {known}, {model.model} is a {model.architecture}; {way_out}"
        )
    kind = config_class(architecture)
    assert issubclass(kind, PredictionConfig)
    field, most, count = kind.counted_by, kind.most_layers, model.hf_config.get(kind.counted_by)
    is_gguf = model.files.format == "gguf"
    stated = "nextn_predict_layers" if is_gguf else field  # by a header, or config.json
    if not count or (is_gguf and not kind.is_in_gguf):
        what = f"{'the header' if is_gguf else 'config.json'} says that it has none"
        what = what if kind.is_in_gguf or not is_gguf else "GGUF files are read without them"
        raise ConfigError(
            f"speculative_config: method mtp needs layers for it in {model.model}, and {what} ({stated}); {way_out}"
        )
    if type(count) is not int or not 0 < count <= most:
        demand = f"an integer from 1 to {most}" if most > 1 else "1"
        raise ConfigError(f"speculative_config: {stated} of {model.model} must be {demand}, got {count!r}; {way_out}")
    own = {
        "architectures": [architecture],
        "prediction_layer": model.num_layers,
        "num_hidden_layers": min(count, num_tokens or count),
        "tie_word_embeddings": False,
    }
    return replace(model, hf_config={**model.hf_config, **kind.changes, **own})


def _tokenizer_file(model: ModelConfig) -> Path:
    return model.files.tokenizer_path / "tokenizer.json"
