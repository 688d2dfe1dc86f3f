"""Text to token ids and back, by the `tokenizers` library alone: no transformers, no code from repositories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.interface.model_files import NO_TOKENIZER, ModelFiles
from octavo.system.file_reading import read_json
from octavo.text import chat_template as chat
from octavo.text.special_tokens import add_declared_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """``backend`` is a `tokenizers.Tokenizer`; ``config`` is tokenizer_config.json; ``chat_templates`` are by name,
    the main one is "default"; ``folder`` may hold further files with special tokens."""

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any],
        chat_templates: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Raises ModelError for special tokens that cannot be read."""
        self.backend = backend
        self.config = config
        self.chat_templates = chat_templates or {}
        # Truncation and padding in tokenizer.json are for training.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        self.special_tokens = add_declared_tokens(backend, config, folder)

    @classmethod
    def from_files(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer of a model that was found. Raises ModelError."""
        return cls.from_directory(files.tokenizer_path)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Raises ModelError when tokenizer.json is missing or damaged."""
        from tokenizers import Tokenizer as Backend

        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.exists():
            why = folder / NO_TOKENIZER
            raise ModelError(
                (why.read_text(encoding="utf-8") if why.exists() else f"{folder} has no tokenizer.json")
                + "; name a model or folder that has one with --tokenizer, "
                "or start with --skip-tokenizer-init and send token ids"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is not a readable tokenizer ({error}); fetch the model again") from None
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        return cls(backend, config, _read_chat_templates(folder, config), folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises ValueError for a text that the model's rules cannot cut."""
        return self.encode_batch([text], add_special_tokens)[0]  # a fifth faster than encode: no offsets

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; in parallel for many texts. Raises as `encode` does."""
        encode = self.backend.encode_batch_fast
        return [e.ids for e in _called(encode, list(texts), add_special_tokens=add_special_tokens)]

    def encode_pair(
        self,
        text: str,
        pair: str | None = None,
        max_tokens: int | None = None,
        truncation_side: str = "right",
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Token ids of ``text``, or of two texts that are read together, and which one each token is of (0 or 1).

        Of more than ``max_tokens`` the longer text is cut, special tokens stay.
        """
        backend, special = self.backend, 0
        if max_tokens is not None and add_special_tokens:
            special = backend.num_special_tokens_to_add(pair is not None)
        encoding = _called(backend.encode, text, add_special_tokens=False)
        second = None if pair is None else _called(backend.encode, pair, add_special_tokens=False)
        if max_tokens is not None:
            room = max(0, max_tokens - special)
            first_length, second_length = _fitting(len(encoding), 0 if second is None else len(second), room)
            encoding.truncate(first_length, direction=truncation_side)
            if second is not None:
                second.truncate(second_length, direction=truncation_side)
        whole = backend.post_process(encoding, second, add_special_tokens)
        return whole.ids[:max_tokens], whole.type_ids[:max_tokens]

    def first_tokens(self, text: str, limit: int) -> str:
        """The beginning of ``text`` that its first ``limit`` tokens stand for."""
        offsets = _called(self.backend.encode, text, add_special_tokens=False).offsets
        return text if len(offsets) <= limit else text[: offsets[limit - 1][1]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        return str(_called(self.backend.decode, list(ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of each id; None where there is none."""
        return [self.backend.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """Ids of tokens in the vocabulary's spelling; None for unknown ones."""
        return [self.backend.token_to_id(token) for token in tokens]

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, None if there is none."""
        return self._id("eos_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, None if there is none."""
        return self._id("bos_token")

    @cached_property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, None if there is none."""
        return self._id("pad_token")

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out when it skips special tokens."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def special_text(self, token_id: int) -> str | None:
        """The text of a special token; None for others."""
        return self.decode([token_id], skip_special_tokens=False) if token_id in self.all_special_ids else None

    @cached_property
    def vocab_size(self) -> int:
        """The size without the tokens that were added to the trained vocabulary."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    @cached_property
    def _length(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self._length

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # variables of the template may have any name
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's prompt; ``chat_template`` is a template or the name of one of the model's.

        Raises ValueError when there is no template or when it refuses the conversation.
        """
        template = self.get_chat_template(chat_template, tools=bool(tools))
        return chat.render(
            template,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens, **kwargs},
        )

    def get_chat_template(self, chat_template: str | None = None, *, tools: bool = False) -> str:
        """The named template, else ``chat_template`` itself; None: the model's main one, or with ``tools`` the one for
        tools. Raises ValueError if the model has none."""
        if chat_template is not None:
            return self.chat_templates.get(chat_template, chat_template)
        if tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" in self.chat_templates:
            return self.chat_templates["default"]
        if self.chat_templates:
            raise ValueError(
                f"the model has several chat templates and no default: choose with --chat-template "
                f"{' | '.join(sorted(self.chat_templates))}"
            )
        raise ValueError(
            "the model has no chat template: give one with --chat-template, or use completions with a prompt"
        )

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _called(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the library and return its result. Its panics are no Exception, so handlers would miss them: one cause is a
    pattern of tokenizer.json that backtracks without end. Raises ValueError for them."""
    try:
        return method(*args, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("the model's tokenizer cannot read this text: a pattern of it takes too long here") from None


def _fitting(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts that together fit ``room``: the longer one gives way first."""
    short = min(first, second)
    kept = min(short, max(room // 2, room - max(first, second)))
    rest = min(max(first, second), room - kept)
    return (kept, rest) if first < second else (rest, kept)


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: *.jinja files, or if there are none chat_template.json, else tokenizer_config.json's: one, an
    object or a list of named ones."""
    found: dict[str, str] = {}
    if (folder / "chat_template.jinja").exists():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found or _named_templates(_json_template(folder)) or _named_templates(config.get("chat_template"))


def _named_templates(given: Any) -> dict[str, str]:
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    named = given.items() if isinstance(given, dict) else ()
    return {name: template for name, template in named if isinstance(name, str) and isinstance(template, str)}


def _json_template(folder: Path) -> Any:
    path = folder / "chat_template.json"
    return read_json(path).get("chat_template") if path.exists() else None
