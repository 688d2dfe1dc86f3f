"""Prompts to measure with: random ones, of files, with images, prompts that share prefixes, whole conversations.

For a seed, random lengths and the choice from a file are those of ``vllm bench serve``: runs of both ask for the same.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.image_datasets import IMAGE_DATASETS, RandomImages, add_image_arguments, content_of, text_of
from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer

DATASETS = ("random", "sharegpt", "custom", "prefix_repetition", "multi_turn", *IMAGE_DATASETS)


@dataclass(frozen=True)
class SampleRequest:
    """``prompt`` has ``prompt_len`` tokens; ``output_len`` are asked for. ``content``: a chat's message, text and
    images, of which ``prompt`` is the text."""

    prompt: str
    prompt_token_ids: list[int]
    output_len: int
    follow_up: SampleRequest | None = None  # the next turn of a conversation: its own text, without those before
    content: list[dict[str, Any]] | None = None

    @property
    def prompt_len(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids)


def add_numbers(group: argparse._ActionsContainer, *rows: tuple[str, int, str]) -> None:
    """Add flags of whole numbers: their name, default and text."""
    for flag, default, text in rows:
        group.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")


def add_dataset_arguments(parser: argparse.ArgumentParser, input_len: int = 1024, count: bool = True) -> None:
    """Add the flags that `load_dataset` reads. ``input_len``: the default of random prompts; ``count``: also the
    number of prompts."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="Kind of prompts (default: random)")
    group.add_argument(
        "--dataset-path",
        help="For sharegpt and multi_turn: JSON file of conversations. For custom: JSON lines of prompt and optional "
        "output_tokens. For custom_image: also image_files, or content (default: none)",
    )
    if count:
        add_numbers(group, ("--num-prompts", 1000, "Number of requests; for multi_turn: of conversations"))
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="Send each request of a file at most once, even if --num-prompts is larger (default: repeat requests)",
    )
    group.add_argument("--disable-shuffle", action="store_true", help="Keep the order of the file (default: off)")
    add_numbers(group, ("--seed", 0, "Random seed of prompts and arrivals"))
    group.add_argument("--input-len", type=int, help="Tokens per random prompt (default: --random-input-len)")
    group.add_argument("--output-len", type=int, help="Tokens per answer (default: the dataset's own flag)")
    add_numbers(
        group,
        ("--random-input-len", input_len, "Tokens per random prompt"),
        ("--random-output-len", 128, "Tokens per answer to a random prompt"),
    )
    group.add_argument(
        "--random-range-ratio",
        type=_range_ratio,
        default=(0.0, 0.0),
        metavar="RATIO",
        help="Random lengths are within this fraction of the given ones; "
        '{"input": RATIO, "output": RATIO} sets them separately (default: 0)',
    )
    add_numbers(group, ("--random-prefix-len", 0, "Tokens of a prefix that all random prompts share"))
    group.add_argument(
        "--sharegpt-output-len", type=int, help="Tokens per answer to a sharegpt prompt (default: as in the dataset)"
    )
    add_numbers(
        group, ("--custom-output-len", 256, "Tokens per answer to a custom prompt; -1: the line's output_tokens")
    )
    group.add_argument(
        "--skip-chat-template",
        action="store_true",
        help="Send custom prompts unchanged (default: through the model's chat template)",
    )
    add_numbers(
        group,
        ("--prefix-repetition-prefix-len", 256, "Tokens per shared prefix"),
        ("--prefix-repetition-suffix-len", 256, "Tokens per prompt after its prefix"),
        ("--prefix-repetition-num-prefixes", 10, "Number of shared prefixes"),
        ("--prefix-repetition-output-len", 128, "Tokens per answer"),
        ("--multi-turn-num-turns", 5, "Maximum number of questions per conversation"),
        ("--multi-turn-prefix-len", 256, "Tokens of the prefix that all conversations share"),
        ("--multi-turn-input-len", 64, "Tokens per question"),
        ("--multi-turn-output-len", 128, "Tokens per answer"),
    )
    add_image_arguments(group)


def _range_ratio(text: str) -> tuple[float, float]:
    """Parse the ratios of prompts and of answers: ``0.3``, or ``{"input": 0.3, "output": 0.5}``."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    both = [value.get("input"), value.get("output")] if isinstance(value, dict) else [value, value]
    ratios = [float(ratio) for ratio in both if isinstance(ratio, int | float) and 0 <= ratio < 1]
    if len(ratios) < 2:
        raise argparse.ArgumentTypeError(
            f'takes a number of at least 0 and below 1, or {{"input": 0.3, "output": 0.5}}, got {text!r}'
        )
    return ratios[0], ratios[1]


def load_dataset(args: argparse.Namespace, tokenizer: Tokenizer) -> list[SampleRequest]:
    """``args.num_prompts`` requests, the same for the same seed. Raises ConfigError when the arguments clash."""
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    if args.dataset_path and args.dataset_name in ("random", "random-mm", "prefix_repetition"):
        raise ConfigError(
            f"--dataset-name {args.dataset_name} reads no file: for --dataset-path use sharegpt, custom, custom_image "
            "or multi_turn"
        )
    if args.dataset_name in IMAGE_DATASETS and not _is_chat(args):
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --backend openai-chat: images go in messages")
    makers = {
        "sharegpt": _sharegpt,
        "custom": _custom,
        "prefix_repetition": _prefix_repetition,
        "multi_turn": _multi_turn,
        "random-mm": _random_mm,
        "custom_image": _custom_image,
    }
    return makers.get(args.dataset_name, _random)(args, tokenizer, random.Random(args.seed))


def _is_chat(args: argparse.Namespace) -> bool:
    return str(getattr(args, "backend", "")).endswith("-chat")


def _random(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    return _random_texts(args, tokenizer, rng, np.random.default_rng(args.seed))


def _random_mm(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    draws, images = np.random.default_rng(args.seed), RandomImages(args)
    texts = _random_texts(args, tokenizer, rng, draws)
    return [replace(text, content=[{"type": "text", "text": text.prompt}, *images.draw(draws)]) for text in texts]


def _random_texts(
    args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random, lengths: np.random.Generator
) -> list[SampleRequest]:
    special = len(tokenizer.encode(""))  # the server adds them again
    input_ratio, output_ratio = args.random_range_ratio

    def around(length: int, ratio: float) -> list[int]:
        least, most = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
        drawn: list[int] = lengths.integers(max(least, 1), max(most, 1) + 1, size=args.num_prompts).tolist()
        return drawn

    input_lens = around((args.input_len or args.random_input_len) - special, input_ratio)
    output_lens = around(args.output_len or args.random_output_len, output_ratio)
    words = _Words(tokenizer, rng)
    prefix = words.ids(args.random_prefix_len)
    return [
        words.request(prefix + words.ids(input_len), output_len)
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def _prefix_repetition(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    words = _Words(tokenizer, rng)
    prefixes = [words.ids(args.prefix_repetition_prefix_len) for _ in range(args.prefix_repetition_num_prefixes)]
    requests = [
        words.request(
            prefixes[i % len(prefixes)] + words.ids(args.prefix_repetition_suffix_len),
            args.output_len or args.prefix_repetition_output_len,
        )
        for i in range(args.num_prompts)
    ]
    if not args.disable_shuffle:
        rng.shuffle(requests)
    return requests


def _sharegpt(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    conversations = [said for said in _read_conversations(args) if len(said) >= 2]
    if not args.disable_shuffle:
        rng.shuffle(conversations)
    given = args.output_len or args.sharegpt_output_len
    requests: list[SampleRequest] = []
    for prompt, answer, *_ in conversations:
        ids = tokenizer.encode(prompt)
        output_len = given or len(tokenizer.encode(answer))
        # As vLLM prunes it, so that figures compare.
        if len(ids) < 4 or (output_len < 4 and not given) or len(ids) > 1024 or len(ids) + output_len > 2048:
            continue
        requests.append(SampleRequest(prompt, ids, output_len))
        if len(requests) == args.num_prompts:
            break
    return _oversample(args, requests)


def _custom(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    rows = _read_rows(args)
    if not args.disable_shuffle:
        rng.shuffle(rows)
    # A server puts the messages of a chat into the template itself.
    as_it_is = args.skip_chat_template or _is_chat(args)
    requests = []
    for row in rows[: args.num_prompts]:
        prompt, output_len = row["prompt"], _custom_output_len(args, row)
        if not as_it_is:
            try:
                prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            except ValueError as error:
                raise ConfigError(f"{error}; --skip-chat-template sends prompts as they are") from None
        requests.append(SampleRequest(prompt, tokenizer.encode(prompt), output_len))
    return _oversample(args, requests)


def _custom_image(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    rows = _read_rows(args)
    if not args.disable_shuffle:
        rng.shuffle(rows)
    requests = []
    for row in rows[: args.num_prompts]:
        try:
            content = content_of(row, Path(args.dataset_path).parent, args.custom_ensure_client_side_data)
        except ValueError as error:
            raise ConfigError(f"--dataset-path {args.dataset_path}: {error}") from None
        text = text_of(content)
        requests.append(SampleRequest(text, tokenizer.encode(text), _custom_output_len(args, row), content=content))
    return _oversample(args, requests)


def _custom_output_len(args: argparse.Namespace, row: dict[str, Any]) -> int:
    given = args.output_len or args.custom_output_len
    output_len = row.get("output_tokens") if given == -1 else given
    if not isinstance(output_len, int) or output_len < 1:
        raise ConfigError(
            f"--custom-output-len -1 takes the lengths of --dataset-path {args.dataset_path}: each line needs "
            f"output_tokens of at least 1, got {output_len!r}"
        )
    return output_len


def _oversample(args: argparse.Namespace, found: list[SampleRequest]) -> list[SampleRequest]:
    """``found``, and some of them again where a file has too few."""
    if not found:
        raise ConfigError(f"--dataset-path {args.dataset_path} has nothing for --dataset-name {args.dataset_name}")
    if len(found) < args.num_prompts and not args.no_oversample:
        print(
            f"{args.dataset_path} has fewer requests ({len(found)}) than --num-prompts asks for ({args.num_prompts}): "
            "some are sent again (--no-oversample: none), and a prefix cache will know them",
            file=sys.stderr,
        )
        rng = random.Random(args.seed)
        return found + [rng.choice(found) for _ in range(args.num_prompts - len(found))]
    return found


def _multi_turn(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    """The first questions of conversations, from the file if there is one, else random; each leads to the next one."""
    most, output_len = args.multi_turn_num_turns, args.output_len or args.multi_turn_output_len
    if most < 1:
        raise ConfigError(f"--multi-turn-num-turns must be at least 1, got {most}")
    if not args.dataset_path:
        words = _Words(tokenizer, rng)
        prefix, length = words.ids(args.multi_turn_prefix_len), args.multi_turn_input_len
        return [
            _chain(
                [words.request((prefix if turn == 0 else []) + words.ids(length), output_len) for turn in range(most)]
            )
            for _ in range(args.num_prompts)
        ]
    conversations = [turns[: 2 * most : 2] for turns in _read_conversations(args) if turns]
    if not args.disable_shuffle:
        rng.shuffle(conversations)
    chains = [
        _chain([SampleRequest(question, tokenizer.encode(question), output_len) for question in questions])
        for questions in conversations[: args.num_prompts]
    ]
    return _oversample(args, chains)


def _chain(turns: list[SampleRequest]) -> SampleRequest:
    last: SampleRequest | None = None
    for turn in reversed(turns):
        last = replace(turn, follow_up=last)
    assert last is not None
    return last


def _read_conversations(args: argparse.Namespace) -> list[list[str]]:
    """Read the turns: ``conversations`` of ``value`` (ShareGPT) or ``messages`` of ``content`` (OpenAI)."""
    if not args.dataset_path:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path, a JSON file of conversations")
    try:
        found: list[dict[str, Any]] = json.loads(Path(args.dataset_path).read_text())
        turns = [one.get("conversations") or one.get("conversation") or one.get("messages") or [] for one in found]
        return [[turn["value"] if "value" in turn else turn["content"] for turn in one] for one in turns]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {args.dataset_path} cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"--dataset-path {args.dataset_path} must be a list of conversations, each with 'conversations' of 'value'"
        ) from None


def _read_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """JSON lines, each an object with ``prompt``, or with images and what `content_of` asks for."""
    if not args.dataset_path:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path, a file of JSON lines")
    try:
        lines = Path(args.dataset_path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset-path {args.dataset_path} cannot be read: {error}") from None
    return [_row(args, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _row(args: argparse.Namespace, number: int, line: bytes) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict) and (args.dataset_name == "custom_image" or isinstance(row.get("prompt"), str)):
        return row
    raise ConfigError(
        f'--dataset-path {args.dataset_path}, line {number}: each line must be an object such as {{"prompt": "Hi"}}'
    )


class _Words:
    """Random tokens whose text has that many tokens again: whole words, one token each."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._tokenizer, self._rng = tokenizer, rng
        self._ids = list(self._one_token_words())
        if not self._ids:
            raise ConfigError("the tokenizer has no token that is a word of its own: use --dataset-name sharegpt")

    def _one_token_words(self) -> Iterator[int]:
        special = self._tokenizer.all_special_ids
        candidates = [i for i in range(min(self._tokenizer.vocab_size, 8000)) if i not in special]
        for token_id in candidates:
            text = self._tokenizer.decode([token_id])
            if text[:1] == " " and text[1:].isascii() and text[1:].isalpha():
                yield token_id

    def ids(self, count: int) -> list[int]:
        return self._rng.choices(self._ids, k=count)

    def request(self, ids: list[int], output_len: int) -> SampleRequest:
        return SampleRequest(self._tokenizer.decode(ids), ids, output_len)
