"""Whether a draft model can guess for another one: a token's id must mean the same to both."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ConfigError
from octavo.interface.engine_config import ModelConfig
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


def _tokenizer_file(model: ModelConfig) -> Path:
    return model.files.tokenizer_path / "tokenizer.json"
