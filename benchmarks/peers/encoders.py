"""`make bench ARGS=--encoders`: all-MiniLM-L6-v2 beside what else could run it, in sentences a second.

    python -m benchmarks peers/encoders [--rounds 5] [--batches 4] [--engines Octavo,fastembed]

Batches of 32 texts of 128 tokens, vectors out, each engine in a process of its own and on the same cores; engines
take turns, the best round of each counts. Octavo in float32, bfloat16 and int8; torch with transformers in float32;
fastembed (onnxruntime) with weights of 8 bits. fastembed's models come from a hub, so it gets a copy of the very same
weights, exported by torch and quantised by onnxruntime's own tool: `make peers ARGS=encoders` makes it. Figures go to
benchmarks/results/encoders.json, under the kind of processor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.cpus import cpu_kind, load_results, save_results
from benchmarks.peers.engines import peers_folder

MODEL = "all-minilm-l6-v2"
BATCH, TOKENS = 32, 128
HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "encoders.json"
ENGINES = ("Octavo float32", "Octavo bfloat16", "Octavo int8", "transformers float32", "fastembed int8")
Embed = Callable[[list[str]], Any]


def make_texts(count: int) -> list[str]:
    """Texts of TOKENS tokens each, of words that are one token."""
    line = "the city of light has a long river and many old houses where people read books by night"
    words = line.split(" ")
    return [" ".join(words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(TOKENS - 2)) for i in range(count)]


def octavo_engine(variant: str) -> Embed:
    from octavo import LLM

    how = {"quantization": "int8"} if variant == "int8" else {"dtype": variant, "quantization": "none"}
    llm = LLM(MODEL, **how)
    return lambda texts: llm.embed(texts, use_tqdm=False)


def transformers_engine(variant: str) -> Embed:
    import torch
    import transformers

    from octavo.fetch.sources import resolve_model

    path = resolve_model(MODEL, progress=False).path
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=getattr(torch, variant)).eval()

    def embed(texts: list[str]) -> Any:
        with torch.inference_mode():
            batch = tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
            mask = batch["attention_mask"][..., None]
            pooled = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(pooled).tolist()

    return embed


def fastembed_engine(variant: str) -> Embed:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    name, folder = "local/minilm-int8", peers_folder() / "encoders" / "minilm-int8"
    source, file = ModelSource(hf="local/minilm-int8"), "model_int8.onnx"
    TextEmbedding.add_custom_model(
        name, pooling=PoolingType.MEAN, normalization=True, sources=source, dim=384, model_file=file
    )
    model = TextEmbedding(name, specific_model_path=str(folder))
    return lambda texts: list(model.embed(texts, batch_size=BATCH))


MAKERS = {"Octavo": octavo_engine, "transformers": transformers_engine, "fastembed": fastembed_engine}


def measure(engine: str, batches: int) -> None:
    """In a process of its own: one JSON line with sentences a second, and the first vector's first numbers."""
    kind, _, variant = engine.partition(" ")
    embed, texts = MAKERS[kind](variant), make_texts(BATCH * batches)
    first = [float(x) for x in list(embed(texts[:BATCH])[0])[:4]]  # warms up
    started = time.perf_counter()
    for at in range(0, len(texts), BATCH):
        embed(texts[at : at + BATCH])
    print(json.dumps({"sentences_s": len(texts) / (time.perf_counter() - started), "first": first}))


def export_onnx(folder: Path) -> None:
    """The model as fastembed reads it, with weights of 8 bits; in the peers' environment."""
    import shutil

    import torch
    import transformers
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from octavo.fetch.sources import resolve_model

    path = resolve_model(MODEL, progress=False).path
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(path / name, folder / name)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    sample = torch.ones(2, 16, dtype=torch.int64)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    plain = folder / "model.onnx"
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    torch.onnx.export(
        model,
        (sample, sample, sample * 0),
        str(plain),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_shapes=tuple({0: batch, 1: length} for _ in names),
        dynamo=True,
        external_data=False,
    )
    quantize_dynamic(plain, folder / "model_int8.onnx", weight_type=QuantType.QInt8)
    plain.unlink()


def python_of(engine: str) -> Path:
    """fastembed has an environment of its own."""
    own = peers_folder() / "encoders" / "bin" / "python"
    return own if engine.startswith("fastembed") else Path(sys.executable)


def main(words: list[str]) -> int:
    """Run all engines in turns, and write what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine (default: 5)")
    parser.add_argument("--batches", type=int, default=4, help="batches in a round (default: 4)")
    parser.add_argument("--engines", help="names to run, comma separated (default: all)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--export", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.export:
        export_onnx(args.export)
        return 0
    if args.measure:
        measure(args.measure, args.batches)
        return 0
    asked = [word.strip().lower() for word in args.engines.split(",")] if args.engines else [""]
    chosen = [name for name in ENGINES if any(name.lower().startswith(word) for word in asked)]
    chosen = [name for name in chosen if python_of(name).exists()]
    best: dict[str, float] = {}
    for number in range(args.rounds):
        for name in chosen:
            command = [
                python_of(name),
                "-m",
                "benchmarks.peers.encoders",
                "--measure",
                name,
                "--batches",
                str(args.batches),
            ]
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=HERE.parents[1])
            if done.returncode:
                print(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            best[name] = max(best.get(name, 0.0), found["sentences_s"])
            print(f"round {number + 1}  {name:22} {found['sentences_s']:8.1f} sentences/s", flush=True)
    if not best:
        return 1
    for name, rate in best.items():
        ratios = [f"{rate / best[other]:.2f}x {other}" for other in ENGINES[3:] if other in best and other != name]
        print(f"{name:22} {rate:8.1f} sentences/s  {', '.join(ratios)}")
    results = load_results(RESULTS)
    figures = {name: round(rate, 1) for name, rate in best.items()}
    results["cpus"].setdefault(cpu_kind(), {}).update(figures, date=datetime.now(UTC).strftime("%Y-%m-%d"))
    save_results(RESULTS, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
