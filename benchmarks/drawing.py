"""What drawing costs: tokens a second of every kind of sampling, as a share of greedy's.

    python -m benchmarks drawing                                # the embedded model, about 6 minutes on two cores
    python -m benchmarks drawing --vocabulary 151936            # random weights in the shape of Qwen3 0.6B
    python -m benchmarks drawing --users 1 --kinds "top-k;min-p" --rounds 9
    python -m benchmarks drawing --peers                        # then every server that `make peers` has installed

One engine in this process answers all requests. In every round each kind comes between two runs of greedy, and its
share is its tokens a second over the mean of these two: a machine that turns slower slows both. Shares are medians of
the rounds. A kind that is refused has no share; the others are measured all the same. The exit status is 1 where one
misses its goal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.random_models import QWEN3_0_6B, write_checkpoint
from octavo import LLM, SamplingParams
from octavo.fetch.sources import resolve_model
from octavo.interface.structured_output import StructuredOutputsParams

if TYPE_CHECKING:
    from benchmarks.peers.drawn import PeerShare

PROMPT_TOKENS, OUTPUT_TOKENS = 16, 96
# Random weights give logits whose standard deviation is 0.64: nearly every token would be in a nucleus, as no trained
# model has it. Times 6.5, 151,936 such logits have an entropy of about 3 nats, as the embedded model's on text.
LAST_NORM = 6.5
SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 50}
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "temperature, top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "top-k, top-p, min-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "seeded": {"temperature": 1.0, "seed": 7},
    "frequency, presence penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "repetition penalty": {"repetition_penalty": 1.1},
    "bias": {"logit_bias": dict.fromkeys(range(1000, 1100), 1.0)},
    "bad words, min tokens": {"bad_words_token_ids": [[17], [18, 19], [20, 21, 22]], "min_tokens": 90},
    "log-probabilities": {"logprobs": 5},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "all of them": {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.2, "logprobs": 5, "seed": 3},
}
GOAL, GOALS = 0.95, {"log-probabilities": 0.9, "schema": 0.9, "all of them": 0.9}


@dataclass
class Share:
    """One kind with so many users."""

    kind: str
    users: int
    greedy: float  # tokens a second, the median
    tokens_a_second: float
    share: float  # the median of the rounds'
    lowest: float
    highest: float
    problem: str = ""  # why it was refused

    @property
    def is_met(self) -> bool:
        return not self.problem and self.share >= GOALS.get(self.kind, GOAL)

    def __str__(self) -> str:
        verdict = "met" if self.is_met else "MISSED"
        if self.problem:
            return f"{self.kind:<32}{self.users:>5}   REFUSED: {self.problem}"
        return (
            f"{self.kind:<32}{self.users:>5}{self.greedy:>9.0f}{self.tokens_a_second:>9.0f}{self.share:>8.3f}"
            f"   ({self.lowest:.3f} - {self.highest:.3f})  >= {GOALS.get(self.kind, GOAL):g} {verdict}"
        )


def params_of(kind: str) -> SamplingParams:
    told: dict[str, Any] = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return SamplingParams(**(told | KINDS.get(kind, {})))


class RefusedError(Exception):
    """An answer ended with an error."""


def run(llm: LLM, kind: str, users: int) -> float:
    """Tokens a second of one answer to each user."""
    prompts = [{"prompt_token_ids": [5 + user, *range(100, 100 + PROMPT_TOKENS - 1)]} for user in range(users)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params_of(kind), use_tqdm=False)
    seconds = time.perf_counter() - started
    if problem := next((o.error for o in outputs if o.error), None):
        raise RefusedError(problem)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds


def shares_of(llm: LLM, kinds: list[str], users: int, rounds: int) -> list[Share]:
    """Every kind between two runs of greedy, in each round."""
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    shares: dict[str, list[float]] = {kind: [] for kind in kinds}
    all_greedy, refused = [], dict[str, str]()
    for number in range(-1, rounds):  # the first warms: grammars are compiled, memory is there
        before = run(llm, "greedy", users)
        all_greedy.append(before)
        for kind in (kind for kind in kinds if kind not in refused):
            try:
                rate = run(llm, kind, users)
            except RefusedError as error:
                refused[kind] = str(error)
                continue
            after = run(llm, "greedy", users)
            if number < 0:
                continue
            rates[kind].append(rate)
            shares[kind].append(2 * rate / (before + after))
            all_greedy.append(after)
            before = after
    greedy = statistics.median(all_greedy)
    return [
        Share(kind, users, greedy, 0, 0, 0, 0, refused[kind])
        if kind in refused
        else Share(kind, users, greedy, statistics.median(rates[kind]), statistics.median(of), min(of), max(of))
        for kind, of in shares.items()
    ]


def with_vocabulary(folder: Path, vocabulary: int, layers: int, last_norm: float) -> dict[str, Any]:
    """Arguments of an engine for a checkpoint written to ``folder``: Qwen3 0.6B's shape with so many tokens and layers,
    random weights, which are loaded as 8 bits."""
    shape = QWEN3_0_6B | {"vocab_size": vocabulary, "num_hidden_layers": layers}
    write_checkpoint(shape, Path(resolve_model(None, progress=False).directory), folder, last_norm)
    return {"model": str(folder), "quantization": "int8"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", default="1,8,20", help="numbers of users (default: %(default)s)")
    parser.add_argument("--kinds", help="some of: " + "; ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, help="random weights with a head of so many tokens, Qwen3's: 151936")
    layers = QWEN3_0_6B["num_hidden_layers"]
    parser.add_argument("--layers", type=int, default=layers, help="of it (default: %(default)s)")
    flat = "of it; 1: flat logits, the worst case (default: %(default)s)"
    parser.add_argument("--last-norm", type=float, default=LAST_NORM, help=flat)
    parser.add_argument("--peers", action="store_true", help="servers over HTTP, too: ours and those installed")
    parser.add_argument("--output-json", type=Path, help="write the figures there")
    args = parser.parse_args()
    levels = [int(n) for n in args.users.split(",")]
    kinds = [kind for kind in KINDS if args.kinds is None or kind in args.kinds.split(";")]
    print("kind                            users   greedy     drawn  share   (lowest - highest)  goal", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as folder:  # grammars read its tokenizer when they are first asked for
        told: dict[str, Any] = {}
        if args.vocabulary is not None:
            told = with_vocabulary(Path(folder), args.vocabulary, args.layers, args.last_norm)
        llm = LLM(max_model_len=512, max_num_seqs=max(levels), **told)
        for users in levels:
            for share in shares_of(llm, kinds, users, args.rounds):
                found.append(share)
                print(share, flush=True)
    peers: list[PeerShare] = []
    if args.peers:
        from benchmarks.peers.drawn import shares_of_peers

        del llm
        print(
            "\nserver                  kind                            users  tok/s  share of its own greedy",
            flush=True,
        )
        for peer in shares_of_peers({kind: KINDS[kind] for kind in kinds}, SCHEMA, levels, args.rounds, OUTPUT_TOKENS):
            peers.append(peer)
            print(peer, flush=True)
    if args.output_json:
        args.output_json.write_text(json.dumps([asdict(share) for share in (*found, *peers)], indent=1) + "\n")
    return int(not all(share.is_met for share in found))


if __name__ == "__main__":
    sys.exit(main())
