"""What quantisation costs in quality: against float32 on the same weights, position by position, on real text.

    python -m benchmarks quality [--positions 2000] [--only w4a8,w8a8,per-channel,...] [--page]

The text is Python's own documentation. W4A8 is what a CPU runs by default on the embedded GGUF file; its reference is
that file's own values in float32. W8A8 is `--quantization int8` on a safetensors copy of those values, whose weights
are rounded to 8 bits as well, per channel with one scale for each channel. The others are those values as quantised
checkpoints, read in the default way; their reference is what each file says, in float32. The real Gemma 3 270M
(`gemma3`, Q4_K_M) is also held against llama.cpp's best tokens of the same file, where `make peers` has put llama.cpp.
Figures go to results/quality.json, where those of what does not run again are kept, with ``--page`` into
docs/measurements.md too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pydoc_data.topics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.engine.args import EngineArgs
from octavo.interface.engine_config import EngineConfig, ModelConfig
from octavo.interface.kv_cache_layout import make_layout
from octavo.layers.attention import ForwardContext
from octavo.loader.load_model import load_model
from octavo.models.base import CausalLM
from octavo.text.tokenizer import Tokenizer
from octavo.worker.kv_cache import allocate_kv_cache, quantized_kv_dtype, spec_in_dtype
from octavo.worker.sequence_states import SequenceStates
from octavo_kernels import AttentionMetadata

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "measurements.md"
CPU = torch.device("cpu")
LENGTH, BLOCK = 256, 16  # tokens of text in one piece
MAX_KL, MIN_AGREEMENT = 0.02, 0.97
MAX_FURTHER = 0.01  # llama.cpp rounds, too: its best tokens may be so much less often ours than those of float32


def texts(tokenizer: Tokenizer, positions: int) -> list[list[int]]:
    """Pieces of up to LENGTH tokens from different topics, ``positions`` tokens together."""
    pieces: list[list[int]] = []
    for topic in sorted(pydoc_data.topics.topics):
        left = positions - sum(map(len, pieces))
        if left <= 0:
            break
        text = pydoc_data.topics.topics[topic]
        if len(text) > 6 * LENGTH:
            pieces.append(tokenizer.encode(text[: 8 * LENGTH])[: min(LENGTH, left)])
    return pieces


def logits_of(model: CausalLM, tokens: list[int], kv_dtype: str) -> Tensor:
    """float32 [len(tokens), vocabulary], through a paged cache of ``kv_dtype``, as the engine has it."""
    padded = -(-len(tokens) // 8) * 8
    pages = -(-len(tokens) // BLOCK)
    specs = [spec_in_dtype(spec, kv_dtype, CPU) for spec in model.kv_cache_specs()]
    layout = make_layout(specs, len(tokens), BLOCK, 0, grouped=False, state=model.state_spec())
    memory = allocate_kv_cache(layout, pages + 1 + layout.state_blocks, CPU, 1)
    slots = torch.full((padded,), -1)
    slots[: len(tokens)] = torch.arange(BLOCK, BLOCK + len(tokens))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, len(tokens)], dtype=torch.int32),
        seq_lens=torch.tensor([len(tokens)], dtype=torch.int32),
        block_table=torch.arange(1, pages + 1, dtype=torch.int32)[None],
        slot_mapping=slots,
        max_query_len=len(tokens),
        max_seq_len=len(tokens),
        num_actual_tokens=len(tokens),
    )
    ids = torch.tensor(tokens + [0] * (padded - len(tokens)))
    context = ForwardContext([metadata], memory.layers)
    if layout.state is not None:
        states, row = SequenceStates(1, layout.state_blocks), np.zeros(1, dtype=np.int64)
        states.add(0, list(range(pages + 1, pages + 1 + layout.state_blocks)), 0)
        of_step = states.metadata(row, row, metadata.query_start_loc)
        context = ForwardContext([metadata], memory.layers, None, memory.states, of_step)
    hidden = model(ids, torch.arange(padded), context)
    return model.compute_logits(hidden)[: len(tokens)].float()


@torch.inference_mode()
def compare(model: CausalLM, reference: CausalLM, pieces: list[list[int]], kv_dtype: str) -> dict[str, float]:
    """Mean and largest KL divergence in nats, share of equal best tokens, and the loss of each in nats a token."""
    kls, equal, losses = [], [], []
    for tokens in pieces:
        theirs = logits_of(reference, tokens, "float32").log_softmax(-1)
        ours = logits_of(model, tokens, kv_dtype).log_softmax(-1)
        kls.append((theirs.exp() * (theirs - ours)).sum(-1))
        equal.append(ours.argmax(-1) == theirs.argmax(-1))
        following = torch.tensor(tokens[1:])[:, None]
        losses.append(torch.stack([-rows[:-1].gather(1, following).squeeze(1) for rows in (ours, theirs)]))
        print(".", end="", flush=True)
    kl, loss = torch.cat(kls), torch.cat(losses, 1).mean(1)
    return {
        "positions": float(kl.numel()),
        "kl": kl.mean().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "top1": torch.cat(equal).float().mean().item(),
        "loss": loss[0].item(),
        "loss_float32": loss[1].item(),
    }


def agreement_with_llama_cpp(
    path: Path, model: CausalLM, reference: CausalLM, pieces: list[list[int]], kv_dtype: str
) -> dict[str, float]:
    """How often llama.cpp's best next token of the same file is ours, and that of float32; {}: it is not installed."""
    from benchmarks.peers.engines import Engine, llama_binary, peers_folder
    from benchmarks.peers.server import Server

    binary = llama_binary(peers_folder())
    if not binary.exists():
        return {}
    command = (str(binary), "-m", str(path), "-np", "1", "-c", str(2 * LENGTH), "-t", "2", "--poll", "0", "--no-webui")
    equal: list[tuple[bool, bool]] = []
    with Server(Engine("llama.cpp", "", (*command, "--port", "{port}"))) as server:
        for tokens in pieces:
            with torch.inference_mode():
                ours = logits_of(model, tokens, kv_dtype).argmax(-1).tolist()
                exact = logits_of(reference, tokens, "float32").argmax(-1).tolist()
            for end, (best, true) in enumerate(
                zip(ours, exact, strict=True), 1
            ):  # what it has of a prompt it keeps for the next one
                asked = {"prompt": tokens[:end], "n_predict": 1, "temperature": 0, "return_tokens": True}
                body = json.dumps(asked | {"cache_prompt": True}).encode()
                url = f"http://127.0.0.1:{server.port}/completion"
                request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    (theirs,) = json.load(answer)["tokens"]
                equal.append((theirs == best, theirs == true))
            print(":", end="", flush=True)
    return {
        name: sum(pair[at] for pair in equal) / len(equal) for at, name in enumerate(("llama_cpp", "llama_cpp_float32"))
    }


def engine_config(model: str | None = None) -> EngineConfig:
    return EngineArgs(model=model, dtype="float32", quantization="none").create_engine_config(progress=False)


def write_checkpoint(config: ModelConfig, folder: Path) -> None:
    """The model's values as safetensors, with the files that describe it."""
    import safetensors.torch

    from octavo.loader.checkpoint import iterate_weights

    for file in Path(config.files.directory).iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: source.load(torch.float32) for name, source in iterate_weights(config.files)}
    safetensors.torch.save_file(tensors, str(folder / "model.safetensors"))


def write_quantised(config: ModelConfig, recipe: str, folder: Path) -> Path:
    """The model's values quantised as the tests do it."""
    from support.quantized_files import quantized_smollm2

    (folder / "plain").mkdir()
    write_checkpoint(config, folder / "plain")
    return quantized_smollm2(folder / recipe, recipe, folder / "plain")


TITLES = {
    "w4a8": "W4A8: the GGUF file, the default",
    "w8a8": "W8A8: `--quantization int8_per_group` on safetensors",
    "per-channel": "W8A8: `--quantization int8_per_channel` on safetensors",
    "checkpoint-w8a8": "W8A8 of compressed-tensors, a scale for each row",
    "nvfp4": "NVFP4 of ModelOpt",
    "nf4": "NF4 of bitsandbytes, blocks of 64, scales of scales",
    "gemma3": "Gemma 3 270M, Q4_K_M: the GGUF file, the default",
}


def page(figures: dict[str, Any]) -> str:
    lines = [
        "| | positions | mean KL, nats | KL p99 | same best token | as llama.cpp's | loss, nats a token | in float32 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, f in figures["results"].items():
        shared = f"{f['llama_cpp']:.2%}" if "llama_cpp" in f else "–"
        lines.append(
            f"| {name} | {f['positions']:,.0f} | {f['kl']:.4f} | {f['kl_p99']:.4f} | {f['top1']:.2%} | {shared} | "
            f"{f['loss']:.4f} | {f['loss_float32']:.4f} |"
        )
    notes = [f"Goals: mean KL at most {MAX_KL} nats, the same best token for {MIN_AGREEMENT:.0%}."]
    for name, f in figures["results"].items():
        if "llama_cpp_float32" in f:
            notes += [
                "",
                f"llama.cpp agrees with float32 on {f['llama_cpp_float32']:.2%} of the best tokens of "
                f"{name.partition(':')[0]}, so an exact computation agrees with llama.cpp on as many. Goal: ours on at "
                f"most {100 * MAX_FURTHER:.1f} percentage points fewer.",
            ]
    return "\n".join([*lines, "", *notes])


def meets_goals(result: dict[str, float]) -> bool:
    """Of one row of the table."""
    as_llama_cpp = result.get("llama_cpp", 1.0) >= result.get("llama_cpp_float32", 1.0) - MAX_FURTHER
    return result["kl"] <= MAX_KL and result["top1"] >= MIN_AGREEMENT and as_llama_cpp


def gemma3(positions: int, kv_dtype: str | None) -> dict[str, float]:
    """As `compare` and `agreement_with_llama_cpp`."""
    from support.gemma import GEMMA3_270M

    config = engine_config(GEMMA3_270M)
    kv_dtype = kv_dtype or quantized_kv_dtype(config, CPU)
    pieces = texts(Tokenizer.from_files(config.model.files), positions)
    model = load_model(dataclasses.replace(config.model, quantization="int8"))
    reference = load_model(config.model)
    result = compare(model, reference, pieces, kv_dtype)
    result |= agreement_with_llama_cpp(Path(config.model.files.weights[0]), model, reference, pieces, kv_dtype)
    print(f" {result}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--positions", type=int, default=2000, help="(default: 2000)")
    parser.add_argument("--only", default=",".join(TITLES), help="(default: %(default)s)")
    parser.add_argument("--kv-cache-dtype", help="(default: what the engine takes here)")
    parser.add_argument("--page", action="store_true", help="write the table into docs/measurements.md")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "quality.json")
    args = parser.parse_args()
    config = engine_config().model
    kv_dtype = args.kv_cache_dtype or quantized_kv_dtype(engine_config(), CPU)
    reference = load_model(config)
    pieces = texts(Tokenizer.from_files(config.files), args.positions)
    kept = json.loads(args.output.read_text())["results"] if args.output.exists() else {}
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "text": "pydoc topics"}
    figures |= {"kv_cache": kv_dtype, "results": {title: kept[title] for title in TITLES.values() if title in kept}}
    for key in args.only.split(","):
        print(TITLES[key], end=" ", flush=True)
        if key == "gemma3":
            figures["results"][TITLES[key]] = gemma3(args.positions, args.kv_cache_dtype)
            continue
        with tempfile.TemporaryDirectory() as name:
            folder, which, of_values = Path(name), config, reference
            quantization = "int8"
            if key in ("w8a8", "per-channel"):
                write_checkpoint(config, folder)
                which = engine_config(name).model
                quantization = "int8_per_group" if key == "w8a8" else "int8_per_channel"
            elif key != "w4a8":
                which = engine_config(str(write_quantised(config, key.removeprefix("checkpoint-"), folder))).model
                of_values = load_model(which)
            model = load_model(
                dataclasses.replace(which, quantization=quantization if of_values is reference else None)
            )
        result = compare(model, of_values, pieces, kv_dtype)
        figures["results"][TITLES[key]] = result
        print(f" KL {result['kl']:.5f} nats, same best token {result['top1']:.2%}", flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(page(figures))
    if args.page:
        from benchmarks.sections import replace_section

        replace_section(PAGE, "quality", page(figures))
    return 0 if all(map(meets_goals, figures["results"].values())) else 1


if __name__ == "__main__":
    sys.exit(main())
