"""`make bench ARGS=--agreement`: do others say the same of a quantised checkpoint, and where not: format or rounding?

    python -m benchmarks peers/agreement [--only awq,gptq] [--engines vllm] [--positions 2000] [--report]

The yardstick is the file's own values, computed in float32. Every server gives the 20 most likely tokens at each
position of the same texts, and 32 greedy tokens after 20 prompts, half of them questions with the chat template. A
format that is read wrongly shows as a divergence far above that of vLLM's bfloat16 on plain weights, the last rows;
where greedy texts part, the gap is how much likelier the yardstick's token was than the other one by its own numbers.
Figures go to benchmarks/results/agreement.json, an engine at a time, and docs/measurements.md. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import quality
from benchmarks.peers.engines import Engine, peers_folder, serve_octavo, vllm_binary, vllm_environment
from benchmarks.peers.files import commit, cpu_kind
from benchmarks.peers.model_files import ModelFile, model_files
from benchmarks.peers.server import Server, ServerError
from benchmarks.sections import replace_section
from octavo.fetch.sources import resolve_model
from octavo.system.limits import cpu_count
from octavo.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parents[1] / "results" / "agreement.json"
PAGE = Path(__file__).parents[2] / "docs" / "measurements.md"
FILES = ("awq", "gptq", "w8a8", "smollm2-bf16")
TOP = 20  # tokens that a server tells of each position; the others count as one
OUTPUT = 32
NAME = "agreement"
QUESTIONS = (
    "What is the capital of Italy?",
    "Name three fruits.",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a haiku about the sea.",
    "What is 12 times 12?",
    "Who wrote Romeo and Juliet?",
    "Explain what a computer is to a child.",
    "Give me a tip for sleeping well.",
    "Translate 'good morning' to French.",
)


def engines_of(file: ModelFile, root: Path) -> dict[str, Engine]:
    """By label, ours first: it computes the yardstick's own tokens."""
    found = {
        "Octavo exact": serve_octavo(str(file.path), "--dtype", "float32", "--quantization", "none"),
        "Octavo": serve_octavo(str(file.path)),
    }
    engines = {
        label: Engine(label, "", (*command, "--served-model-name", NAME), model=NAME)
        for label, command in found.items()
    }
    for dtype in ("bfloat16", "float32", "float16"):
        command = (
            str(vllm_binary(root)),
            "serve",
            str(file.path),
            "--served-model-name",
            NAME,
            "--dtype",
            dtype,
            "--max-model-len",
            "2048",
            "--disable-uvicorn-access-log",
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
        )
        needs = (vllm_binary(root),)
        engines[f"vLLM {dtype}"] = Engine(
            f"vLLM {dtype}", "", command, vllm_environment(root, cpu_count()), NAME, needs
        )
    return engines


def ask(port: int, **body: Any) -> dict[str, Any]:
    """The one choice of a completion. Raises ServerError with what the server says instead."""
    content = json.dumps({"model": NAME, "temperature": 0, **body}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", content, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        raise ServerError(f"HTTP {error.code}: {error.read()[:300]!r}") from None


def divergence(expected: torch.Tensor, told: dict[str, dict[str, Any]]) -> tuple[float, bool]:
    """Of one position: how far what a server has ``told`` is from the log-probabilities ``expected`` [vocabulary], in
    nats over its tokens and all the others as one, and whether the likeliest token is the same."""
    best = min(told, key=lambda token: told[token]["rank"])
    ids = torch.tensor([int(token) for token in told])
    q = torch.tensor([told[token]["logprob"] for token in told], dtype=torch.float64).exp()
    p = expected[ids].double().exp()
    p, q = (torch.cat([x, (1 - x.sum()).clamp(min=1e-9)[None]]) for x in (p, q))
    return (p * (p / q).log()).sum().item(), int(best) == int(expected.argmax())


@torch.inference_mode()
def yardstick(file: ModelFile, pieces: list[list[int]]) -> list[torch.Tensor]:
    """The log-probabilities after each token of the pieces by the file's own values in float32."""
    model = quality.load_model(quality.engine_config(str(file.path)).model)
    return [quality.logits_of(model, tokens, "float32").log_softmax(-1) for tokens in pieces]


def gap(own: dict[str, Any], tokens: list[int]) -> float:
    """How much likelier, in nats, the yardstick found its token where other ``tokens`` part from its own text."""
    at = next(i for i, (one, other) in enumerate(zip(own["token_ids"], tokens, strict=True)) if one != other)
    likely = own["logprobs"]["top_logprobs"][at]
    return likely[f"token_id:{own['token_ids'][at]}"] - likely.get(f"token_id:{tokens[at]}", min(likely.values()))


def measure(
    server: Server, pieces: list[list[int]], expected: list[torch.Tensor], prompts: list[list[int]], **more: Any
) -> tuple[float, float, list[dict[str, Any]]]:
    """Mean divergence, share of equal best tokens, and the greedy answers, of which ``more`` is asked."""
    found: list[tuple[float, bool]] = []
    for tokens, rows in zip(pieces, expected, strict=True):
        told = ask(server.port, prompt=tokens, max_tokens=1, prompt_logprobs=TOP)["prompt_logprobs"]
        found += [divergence(row, position) for row, position in zip(rows[:-1], told[1:], strict=True)]
    greedy = {"max_tokens": OUTPUT, "ignore_eos": True, "return_token_ids": True, **more}
    answers = [ask(server.port, prompt=prompt, **greedy) for prompt in prompts]
    return statistics.fmean(kl for kl, _ in found), statistics.fmean(same for _, same in found), answers


def run(file: ModelFile, root: Path, positions: int, wanted: list[str]) -> Iterator[dict[str, Any]]:
    """Every engine's figures; those of one that does not read the file, or not in that dtype, are its words."""
    tokenizer = Tokenizer.from_files(resolve_model(None, progress=False))
    pieces = quality.texts(tokenizer, positions)
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [tokenizer.encode(text) for text in chats]
    prose = quality.texts(tokenizer, 2 * quality.LENGTH * len(chats))[-len(chats) :]
    prompts += [piece[: 24 + 4 * i] for i, piece in enumerate(prose)]
    expected = yardstick(file, pieces)
    own: list[dict[str, Any]] = []
    for label, engine in engines_of(file, root).items():
        if own and not any(label.lower().startswith(name) for name in wanted):
            continue
        print(f"{time.strftime('%H:%M:%S')}  {file.name}: {label}", flush=True)
        cell: dict[str, Any] = {"file": file.name, "title": file.title, "engine": label}
        try:
            if problem := engine.missing():
                raise ServerError(problem)
            with Server(engine, timeout=900) as server:
                more = {} if own else {"logprobs": TOP, "return_tokens_as_token_ids": True}
                kl, top1, answers = measure(server, pieces, expected, prompts, **more)
        except (ServerError, OSError) as error:
            print(f"          {error}", flush=True)
            yield cell | {"error": str(error)}
            if not own:
                return  # nothing to hold the others against
            continue
        own = own or answers
        pairs = list(zip(own, (answer["token_ids"] for answer in answers), strict=True))
        same = [one["token_ids"] == tokens for one, tokens in pairs]
        gaps = [gap(one, tokens) for one, tokens in pairs if one["token_ids"] != tokens]
        half = len(QUESTIONS)
        cell |= {
            "kl": kl,
            "top1": top1,
            "positions": sum(map(len, pieces)) - len(pieces),
            "same_questions": sum(same[:half]),
            "same_prose": sum(same[half:]),
            "gap": statistics.median(gaps) if gaps else 0.0,
            "largest_gap": max(gaps, default=0.0),
        }
        print(f"          {cell}", flush=True)
        yield cell


def table(results: dict[str, Any]) -> str:
    """Of docs/measurements.md."""
    lines = [
        "| file | engine | positions | mean KL, nats | same best | same text: questions | prose | gap where parting |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    cells = [cell for cell in results["cells"].values() if "kl" in cell]
    for c in sorted(cells, key=lambda c: FILES.index(c["file"]) if c["file"] in FILES else len(FILES)):
        apart = f"{c['gap']:.2f}, at most {c['largest_gap']:.2f}" if c["largest_gap"] else ""
        texts = f"{c['same_questions']} of 10 | {c['same_prose']} of 10"
        row = f"| {c['title']} | {c['engine']} | {c['positions']:,}"
        lines.append(f"{row} | {c['kl']:.1e} | {c['top1']:.1%} | {texts} | {apart} |")
    about = f"{results['cpu']}; {results['date']}, {results['commit']}"
    return "\n".join([*lines, "", about + "; `make bench ARGS=--agreement`."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(FILES), help="files, comma separated (default: %(default)s)")
    parser.add_argument("--engines", default="octavo,vllm", help="octavo, vllm bfloat16, ... (default: all)")
    parser.add_argument("--positions", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the table")
    parser.add_argument("--output", type=Path, default=RESULTS, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are in sessions of their own: end them first
    root, wanted = peers_folder(), args.only.split(",")
    known = {file.name: file for file in model_files(root) if not file.is_gguf}
    if unknown := set(wanted) - set(known):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = json.loads(args.output.read_text()) if args.output.exists() else {"cells": {}}
    for name in [] if args.report else wanted:
        known[name].ensure()
        for cell in run(known[name], root, args.positions, args.engines.lower().split(",")):
            results |= {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "cpu": cpu_kind()}
            results["cells"][f"{name}/{cell['engine']}"] = cell
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    print(text)
    if args.output == RESULTS:
        replace_section(PAGE, "agreement", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
