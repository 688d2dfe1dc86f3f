"""Infilling: the text between a prefix and a suffix, as models for code were trained to write it.

Such a model reads the two texts behind marks of its own ("Efficient Training of Language Models to Fill in the Middle",
Bavarian et al., 2022): prefix first (PSM) by most, suffix first (SPM) by Codestral. Other files come before, oldest
first, so that what stays the same while somebody types stays in the prefix cache. Pure: token ids in, token ids out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.text.tokenizer import Tokenizer

# Spellings of the marks by family: prefix, suffix, middle. Without a mark of the middle the suffix comes first, and the
# answer goes on behind the prefix.
_FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite 4, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Refact
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
_REPOSITORIES = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_ENDS = ("▁<EOT>", "<|endoftext|>", "<｜end▁of▁sentence｜>")  # besides the model's own, which are a chat's at times
# Names of the roles that a GGUF file gives such tokens, see `octavo.gguf.tokenizer`: these win over spellings.
ROLES = ("fim_pre_token", "fim_suf_token", "fim_mid_token", "fim_pad_token", "fim_rep_token", "fim_sep_token")

PREFIX_SHARE = 0.75  # of the room that both texts have: what was typed last says most
MARKS = 3  # around the texts, at most
# llama.cpp's words, so that a prompt has the tokens that it has there: names that clients do not give, and what stands
# between files where the vocabulary has no mark for it.
REPOSITORY, FILE, BETWEEN = "myproject", "filename", "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class InfillTokens:
    """Ids of a model's marks. ``middle`` None: the suffix comes first. ``repository`` and ``file`` stand before their
    names, ``stops`` end an answer."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None = None
    file: int | None = None
    stops: tuple[int, ...] = ()


@dataclass(frozen=True)
class InfillFile:
    """Another file, or a piece of one, that the model is to know."""

    name: str
    text: str


@dataclass(frozen=True)
class Around:
    """All that an infilling goes by, but the text before it: the ``line`` that goes on, the text after it, and other
    files with the oldest first (None: nothing is said of files). Prompts have at most ``room`` tokens."""

    suffix: str
    line: str = ""
    files: Sequence[InfillFile] | None = None
    room: int | None = None  # as many as they have


@dataclass(frozen=True)
class InfillParts:
    """Token ids of the parts of a prompt: ``bos``, other files, and the texts around the middle."""

    bos: list[int]
    files: list[int]
    prefix: list[int]
    suffix: list[int]


def find_infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Find the marks in a vocabulary, by role or by spelling; None where it has none."""
    to_id = tokenizer.backend.token_to_id
    roles = {role: to_id(text) for role in ROLES if (text := tokenizer.special_tokens.get(role)) is not None}

    def first(spellings: Sequence[str], role: str) -> int | None:
        known = (number for text in spellings if (number := to_id(text)) is not None)
        return roles[role] if roles.get(role) is not None else next(known, None)

    marks = _marks(roles, to_id)
    if marks is None:
        return None
    prefix, suffix, middle = marks
    repository, file = first(_REPOSITORIES, "fim_rep_token"), first(_FILES, "fim_sep_token")
    pad = first(_PADS, "fim_pad_token")
    ends = [number for text in _ENDS if (number := to_id(text)) is not None]
    stops = tuple(dict.fromkeys(n for n in (pad, repository, file, *ends) if n is not None))
    return InfillTokens(prefix, suffix, middle, repository, file, stops)


def _marks(roles: dict[str, int | None], to_id: Callable[[str], int | None]) -> tuple[int, int, int | None] | None:
    prefix, suffix, middle = (roles.get(role) for role in ROLES[:3])
    if prefix is not None and suffix is not None and middle is not None:
        return prefix, suffix, middle
    for spellings in _FAMILIES:
        prefix, suffix = to_id(spellings[0]), to_id(spellings[1])
        middle = None if spellings[2] is None else to_id(spellings[2])
        if prefix is not None and suffix is not None and (middle is not None or spellings[2] is None):
            return prefix, suffix, middle
    return None


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a person's text, in which a special token's spelling is text: it is cut in two before it is
    encoded. Raises ValueError."""
    pieces, special = [text], _special_spellings(tokenizer)
    for spelling in special:
        if spelling in text:
            middle = len(spelling) // 2
            pieces = [cut for piece in pieces for cut in _halves(piece, spelling, middle)]
    return [number for piece in pieces if piece for number in tokenizer.encode(piece, add_special_tokens=False)]


def _special_spellings(tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return sorted((token.content for token in added if len(token.content) > 1), key=len, reverse=True)


def _halves(text: str, spelling: str, at: int) -> list[str]:
    pieces, start = [], 0
    while (found := text.find(spelling, start)) >= 0:
        pieces.append(text[start : found + at])
        start = found + at
    return [*pieces, text[start:]]


def encode_suffix(tokenizer: Tokenizer, text: str) -> list[int]:
    """`encode_text` of a text that goes on in the middle of a line: SentencePiece puts a space before what it encodes,
    so that a mark is put there and taken away again."""
    mark = "☺"
    alone, both = encode_text(tokenizer, mark), encode_text(tokenizer, mark + text)
    return both[len(alone) :] if both[: len(alone)] == alone else encode_text(tokenizer, text)


def encode_parts(tokenizer: Tokenizer, tokens: InfillTokens, prefix: str | list[int], around: Around) -> InfillParts:
    """Encode the parts of a prompt, cut to the room that there is. Raises ValueError."""
    bos = tokenizer.encode("", add_special_tokens=True)[:1]
    parts = InfillParts(
        bos if bos and bos[0] == tokenizer.bos_token_id else [],
        _encode_files(tokenizer, tokens, around.files),
        (encode_text(tokenizer, prefix) if isinstance(prefix, str) else prefix) + encode_text(tokenizer, around.line),
        encode_suffix(tokenizer, around.suffix),
    )
    return parts if around.room is None else fit(parts, around.room)


def _encode_files(tokenizer: Tokenizer, tokens: InfillTokens, files: Sequence[InfillFile] | None) -> list[int]:
    """Token ids of other files, and of the name of the one that is completed."""
    if files is None:
        return []
    ids = [] if tokens.repository is None else [tokens.repository, *encode_text(tokenizer, f"{REPOSITORY}\n")]
    for file in files:
        if tokens.file is None:
            ids += encode_text(tokenizer, BETWEEN)
        else:
            ids += [tokens.file, *encode_text(tokenizer, f"{file.name}\n")]
        ids += encode_text(tokenizer, file.text)
    return ids if tokens.file is None else [*ids, tokens.file, *encode_text(tokenizer, f"{FILE}\n")]


def fit(parts: InfillParts, room: int) -> InfillParts:
    """Cut the parts to ``room`` tokens: the oldest of the other files first, then the head of the prefix and the tail
    of the suffix, which keeps a quarter at least as long as it has that."""
    left = room - len(parts.bos) - MARKS
    prefix, suffix = len(parts.prefix), len(parts.suffix)
    if prefix + suffix > left:
        share = int(PREFIX_SHARE * max(0, left))
        prefix = min(prefix, max(share, left - suffix))
        suffix = min(suffix, max(0, left - prefix))
    files = max(0, left - prefix - suffix)
    return InfillParts(
        parts.bos,
        parts.files[max(0, len(parts.files) - files) :],
        parts.prefix[len(parts.prefix) - max(0, prefix) :],
        parts.suffix[:suffix],
    )


def infill_prompt(tokens: InfillTokens, parts: InfillParts) -> list[int]:
    """Token ids of the whole prompt."""
    before = [tokens.prefix, *parts.prefix]
    after = [tokens.suffix, *parts.suffix]
    if tokens.middle is None:
        return [*parts.bos, *parts.files, *after, *before]
    return [*parts.bos, *parts.files, *before, *after, tokens.middle]
