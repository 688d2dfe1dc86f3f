"""The special tokens that a model's files declare beside tokenizer.json, found in the places and the order in which
transformers finds them: a token may have its id from one file, its flags from another and its role from a third."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.system.file_reading import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    Token = str | AddedToken

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_EXTRA, _OLD_EXTRA, _DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"
_ADDED, _MAP = "added_tokens.json", "special_tokens_map.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_declared_tokens(backend: Backend, config: Mapping[str, Any], folder: Path | None = None) -> dict[str, str]:
    """Add to ``backend`` the tokens that ``config`` (tokenizer_config.json) and files in ``folder`` declare. Returns
    those with a role, as "eos_token" or "image_token", by it: the variables of chat templates. Raises ModelError.

    A token that neither tokenizer.json nor the vocabulary has gets the next free id, whatever id a file gives it.
    """
    decoder = config.get(_DECODER)
    # tokenizer_config.json is whole with ids; without them it is of a time when other files held a part.
    mapped = _read(folder, _MAP) if decoder is None else {}
    named, extra = _named(config, mapped), _extra(config, mapped)
    present = backend.get_added_tokens_decoder()
    if decoder is None:
        special = _called_special(config, mapped)
        declared = [(number, _plain(text, text in special)) for text, number in _read(folder, _ADDED).items()]
        declared += present.items()
    else:
        tokens = [(int(number), _token(given)) for number, given in _object(decoder).items()]
        declared = [(number, _added(token)) for number, token in tokens if token is not None]
    by_text = {token.content: token for _, token in declared}
    named |= {role: by_text.get(str(named[role]), named[role]) for role in NAMED_TOKENS if role in named}
    backend.add_tokens(_missing(present, dict(declared), named, extra))
    return {role: str(token) for role, token in named.items()}


def _missing(
    present: Mapping[int, AddedToken],
    with_id: Mapping[int, AddedToken],
    named: Mapping[str, Token],
    extra: Iterable[Token],
) -> list[AddedToken]:
    """Return the tokens that the tokenizer lacks, in the order of ids: tokens with an id in a file, tokens with a role,
    the others. If two have the same text, the second's flags count."""
    as_they_are = {repr(token) for token in present.values()}
    found: list[Token] = [token for _, token in sorted(with_id.items())]
    known = {str(token) for token in [*present.values(), *found]}
    for token in [*named.values(), *extra]:
        if str(token) not in known and token not in found:
            found.append(token)
    roles = {str(token) for token in named.values()}
    times = Counter(map(str, found))
    missing = []
    for given in found:
        token = _added(given)
        token.special = token.special or token.content in roles
        if repr(token) not in as_they_are or times[token.content] > 1:
            missing.append(token)
    return missing


def _named(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> dict[str, Token]:
    """Tokens by role: special_tokens_map.json's before tokenizer_config.json's, but for texts with roles of the model's
    own, which are the other way round."""
    marked = {key: _special(value) for key, value in mapped.items()}
    texts = {key: value for key, value in config.items() if isinstance(value, str)}
    own = {**{key: value for key, value in config.items() if key not in texts}, **marked, **texts}
    given = {role: {**config, **marked}.get(role) for role in NAMED_TOKENS}
    given |= {key: value for key, value in own.items() if key.endswith("_token") and key not in NAMED_TOKENS}
    for files in (config, mapped):
        if isinstance(files.get(_EXTRA), Mapping):
            given |= files[_EXTRA]
    return {role: token for role, value in given.items() if (token := _token(value)) is not None}


def _extra(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> list[Token]:
    """Special tokens without a role: those under the newer name, else under the older one. An object's have roles."""
    given, further = ({key: file[key] for key in (_EXTRA, _OLD_EXTRA) if key in file} for file in (config, mapped))
    if not given.get(_EXTRA) and _OLD_EXTRA in given:
        given[_EXTRA] = given.pop(_OLD_EXTRA)
    if isinstance(given.get(_EXTRA), Mapping):
        del given[_EXTRA]
    if isinstance(further.get(_EXTRA), list):
        further[_EXTRA] = [*(given.get(_EXTRA) or ()), *map(_special, further[_EXTRA])]
    both = {key: value for key, value in {**given, **further}.items() if not isinstance(value, Mapping)}
    listed = both.get(_EXTRA, both.get(_OLD_EXTRA))
    return [token for one in listed or () if (token := _token(one)) is not None]


def _called_special(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> frozenset[str]:
    """Texts that added_tokens.json, which has no flags, means as special tokens: tokenizer_config.json's where they are
    texts there, and special_tokens_map.json's by the newer name."""
    listed = config.get(_EXTRA) or config.get(_OLD_EXTRA)
    if _EXTRA in mapped and not isinstance(mapped[_EXTRA], list):
        listed = None
    texts = [config.get(role) for role in NAMED_TOKENS if role not in mapped]
    texts += listed if isinstance(listed, list) else []
    entries = [mapped.get(role) for role in NAMED_TOKENS]
    entries += mapped[_EXTRA] if isinstance(mapped.get(_EXTRA), list) else []
    tokens = [text for text in texts if isinstance(text, str)] + [_token(entry) for entry in entries]
    return frozenset(str(token) for token in tokens if token is not None)


def _special(value: Any) -> Any:
    """An entry of special_tokens_map.json: what is there is special."""
    return {**value, "special": True} if isinstance(value, Mapping) and "content" in value else value


def _token(given: Any) -> Token | None:
    """None for what is no token: null, and settings whose name ends as those of tokens do."""
    from tokenizers import AddedToken

    if isinstance(given, Mapping) and isinstance(given.get("content"), str):
        return AddedToken(given["content"], **{flag: bool(given[flag]) for flag in _FLAGS if flag in given})
    return given if isinstance(given, str) else None


def _added(token: Token) -> AddedToken:
    from tokenizers import AddedToken

    return AddedToken(token, special=True) if isinstance(token, str) else token


def _plain(text: str, special: bool) -> AddedToken:
    from tokenizers import AddedToken

    return AddedToken(text, special=special, normalized=not special)


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    path = None if folder is None else folder / name
    return read_json(path) if path is not None and path.exists() else {}


def _object(decoder: Any) -> Mapping[str, Any]:
    if not isinstance(decoder, Mapping) or not all(str(number).isdecimal() for number in decoder):
        raise ModelError(
            f"tokenizer_config.json: {_DECODER} must be an object of tokens by id, got {type(decoder).__name__}; "
            "fetch the model again"
        )
    return decoder
