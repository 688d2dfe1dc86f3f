"""Provide the result of `LLM.get_tokenizer`: the model's tokenizer under the names and defaults of transformers, for
scripts written for those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from octavo.text.special_tokens import NAMED_TOKENS
from octavo.text.tokenizer import Tokenizer


class UserTokenizer:
    """The part of transformers' fast tokenizers that needs no transformers. Ids are lists of ints, never tensors."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.backend_tokenizer = tokenizer.backend

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any) -> dict[str, Any]:
        """``{"input_ids", "attention_mask"}`` of one text or of each of several."""
        _refuse(options)
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return _Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        rows = self._tokenizer.encode_batch(text, add_special_tokens)
        return _Encoding(input_ids=rows, attention_mask=[[1] * len(ids) for ids in rows])

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Token ids of ``text``."""
        _refuse(options)
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """Unlike the answers of an engine, special tokens are in it unless told otherwise."""
        _refuse(options)
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """The text of each sequence of ids."""
        return [self.decode(ids, skip_special_tokens, **options) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The vocabulary's own spelling of the text's tokens."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """A conversation as token ids (with ``tokenize=False`` as text), or each of several. Raises ValueError."""
        as_dict = variables.pop("return_dict", False)
        _refuse({name: variables.pop(name, None) for name in _TENSOR_OPTIONS})

        def one(messages: Sequence[Mapping[str, Any]]) -> str | list[int]:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                documents=documents,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            return self.encode(text, add_special_tokens=False) if tokenize else text

        if conversation and not isinstance(conversation[0], Mapping):
            several: Any = [one(messages) for messages in conversation]  # type: ignore[arg-type]
        else:
            several = one(conversation)  # type: ignore[arg-type]
        return _Encoding(input_ids=several) if as_dict and tokenize else several

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template that `apply_chat_template` would use. Raises ValueError if there is none."""
        return self._tokenizer.get_chat_template(chat_template, tools=bool(tools))

    @property
    def chat_template(self) -> str | None:
        """The main one, None where the model has none."""
        return self._tokenizer.chat_templates.get("default")

    # The vocabulary.

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """One token, or a list, in the vocabulary's spelling."""
        tokens = self._tokenizer.convert_ids_to_tokens([ids] if isinstance(ids, int) else ids)
        return tokens[0] if isinstance(ids, int) else tokens

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """One id, or a list; an unknown token is the unknown token's id, or None where there is none."""
        many = [tokens] if isinstance(tokens, str) else tokens
        ids = [self.unk_token_id if i is None else i for i in self._tokenizer.convert_tokens_to_ids(many)]
        return ids[0] if isinstance(tokens, str) else ids

    def get_vocab(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Added tokens alone, token to id."""
        return {token.content: i for i, token in self.backend_tokenizer.get_added_tokens_decoder().items()}

    @property
    def vocab_size(self) -> int:
        """The size without added tokens; ``len(tokenizer)`` is with them."""
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of all special tokens, ascending."""
        return sorted(self._tokenizer.all_special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens, by ascending id."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by their role ("eos_token")."""
        return dict(self._tokenizer.special_tokens)

    @property
    def is_fast(self) -> bool:
        """Always true: the tokenizer is one of the `tokenizers` library."""
        return True

    def __getattr__(self, name: str) -> Any:
        """``eos_token``, ``eos_token_id`` and so on for bos, unk, pad, sep, cls, mask; None where there is none. A
        model's own, as ``image_token``, likewise."""
        kind = name.removesuffix("_id")
        token = self._tokenizer.special_tokens.get(kind)
        if token is None and kind not in NAMED_TOKENS:
            raise AttributeError(f"the tokenizer has no {name!r}")
        if token is None or kind == name:
            return token
        return self._tokenizer.backend.token_to_id(token)

    def __repr__(self) -> str:
        return f"UserTokenizer({len(self)} tokens)"


class _Encoding(dict[str, Any]):
    """Read as a dict or by attributes, as transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


_TENSOR_OPTIONS = ("return_tensors", "padding", "truncation", "max_length")


def _refuse(options: Mapping[str, Any]) -> None:
    """Options that would change the result are not dropped without a word."""
    for name, value in options.items():
        if value not in (None, False, ""):
            raise ValueError(f"{name}={value!r} is not supported by this tokenizer: ids come as plain lists; drop it")
