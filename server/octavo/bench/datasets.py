"""Prompts to measure with: random ones, conversations from a ShareGPT file, prompts that share prefixes."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer

DATASETS = ("random", "sharegpt", "prefix_repetition")


@dataclass(frozen=True)
class SampleRequest:
    """``prompt`` has ``prompt_len`` tokens; ``output_len`` are asked for."""

    prompt: str
    prompt_token_ids: list[int]
    output_len: int

    @property
    def prompt_len(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids)


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `load_dataset` reads."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="Kind of prompts (default: random)")
    group.add_argument("--dataset-path", help="JSON file of the sharegpt dataset (default: none)")
    group.add_argument("--num-prompts", type=int, default=1000, help="Number of requests (default: 1000)")
    group.add_argument("--seed", type=int, default=0, help="Random seed of prompts and arrivals (default: 0)")
    group.add_argument(
        "--random-input-len", "--input-len", type=int, default=1024, help="Tokens per random prompt (default: 1024)"
    )
    group.add_argument(
        "--random-output-len",
        "--output-len",
        type=int,
        default=128,
        help="Tokens per answer to a random prompt (default: 128)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="Random lengths are within this fraction of the given ones (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="Tokens of a prefix that all random prompts share (default: 0)"
    )
    group.add_argument(
        "--sharegpt-output-len", type=int, help="Tokens per answer to a sharegpt prompt (default: as in the dataset)"
    )
    group.add_argument(
        "--prefix-repetition-prefix-len", type=int, default=256, help="Tokens per shared prefix (default: 256)"
    )
    group.add_argument(
        "--prefix-repetition-suffix-len",
        type=int,
        default=256,
        help="Tokens per prompt after its prefix (default: 256)",
    )
    group.add_argument(
        "--prefix-repetition-num-prefixes", type=int, default=10, help="Number of shared prefixes (default: 10)"
    )
    group.add_argument("--prefix-repetition-output-len", type=int, default=128, help="Tokens per answer (default: 128)")


def load_dataset(args: argparse.Namespace, tokenizer: Tokenizer) -> list[SampleRequest]:
    """``args.num_prompts`` requests, the same for the same seed. Raises ConfigError when the arguments clash."""
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    rng = random.Random(args.seed)
    if args.dataset_name == "sharegpt":
        return _sharegpt(args, tokenizer, rng)
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, tokenizer, rng)
    return _random(args, tokenizer, rng)


def _random(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {args.random_range_ratio}")

    def around(length: int) -> int:
        return rng.randint(
            max(1, round(length * (1 - args.random_range_ratio))), round(length * (1 + args.random_range_ratio))
        )

    words = _Words(tokenizer, rng)
    prefix = words.ids(args.random_prefix_len)
    return [
        words.request(prefix + words.ids(around(args.random_input_len)), around(args.random_output_len))
        for _ in range(args.num_prompts)
    ]


def _prefix_repetition(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    words = _Words(tokenizer, rng)
    prefixes = [words.ids(args.prefix_repetition_prefix_len) for _ in range(args.prefix_repetition_num_prefixes)]
    requests = [
        words.request(
            prefixes[i % len(prefixes)] + words.ids(args.prefix_repetition_suffix_len),
            args.prefix_repetition_output_len,
        )
        for i in range(args.num_prompts)
    ]
    rng.shuffle(requests)
    return requests


def _sharegpt(args: argparse.Namespace, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    if not args.dataset_path:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path, a JSON file of conversations")
    try:
        conversations: list[dict[str, Any]] = json.loads(Path(args.dataset_path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {args.dataset_path} cannot be read: {error}") from None
    rng.shuffle(conversations)
    requests = []
    for conversation in conversations:
        turns = conversation.get("conversations") or conversation.get("conversation") or []
        if len(turns) < 2:
            continue
        prompt, answer = turns[0]["value"], turns[1]["value"]
        ids = tokenizer.encode(prompt)
        output_len = args.sharegpt_output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        # As vLLM prunes it, so that figures compare.
        if len(ids) < 4 or output_len < 4 or len(ids) > 1024 or len(ids) + output_len > 2048:
            continue
        requests.append(SampleRequest(prompt, ids, output_len))
        if len(requests) == args.num_prompts:
            return requests
    raise ConfigError(
        f"--dataset-path {args.dataset_path} has {len(requests)} usable conversations, --num-prompts asks for "
        f"{args.num_prompts}; lower it"
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
