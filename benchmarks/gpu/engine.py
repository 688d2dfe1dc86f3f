"""The whole engine on a GPU, with random weights: step time, throughput, prefill, start, beside Hugging Face.

`python -m benchmarks gpu/engine [start|decode|throughput|prefill|small|adapters ...]`; all of them by default. As two
commands, about equally long: `start decode`, and `throughput prefill small adapters`. Needs torch, triton, transformers
(for the baseline) and the engine's own packages. Every figure is also given as a fraction of what the device's
measured copy bandwidth and matrix rate would allow, with the number of kernels that Triton compiled while the clock
ran: a figure with some is not one of a steady engine. TRITON_INTERPRET=1 tries it with a tiny model.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import measure
from benchmarks.gpu.measure import DRY
from benchmarks.gpu.start import MAX_MODEL_LEN, start_engine, weights_for

if DRY:
    os.environ["OCTAVO_KERNEL_BACKEND"] = "triton"

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN3_600M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "torch_dtype": "float32",
}

results: dict[str, Any] = {}
compiles = measure.Compiles()  # main() has it counted


@dataclass(frozen=True)
class Load:
    """Requests that all come at once: tokens in and out of each."""

    prompts: list[int]
    outs: list[int]

    @classmethod
    def draw(cls, count: int, prompt: int | tuple[int, int], out: int | tuple[int, int]) -> Load:
        """Lengths are numbers or ranges."""
        rng = random.Random(0)
        prompts, outs = (
            [length if isinstance(length, int) else rng.randint(*length) for _ in range(count)]
            for length in (prompt, out)
        )
        return cls(prompts, outs)

    def shortened(self, out: int) -> Load:
        """The same prompts and few tokens out: to warm up, so that nothing is compiled while the clock runs."""
        return replace(self, outs=[min(out, usual) for usual in self.outs])


@dataclass(frozen=True)
class Costs:
    """What a model costs at the least."""

    step_bytes: int  # that every decode step reads: all weights but the table of inputs, of which it reads a few rows
    key_bytes: int  # of a token's keys and values
    token_flops: int  # of a prompt's token, but for attention and head
    head_flops: int
    pair_flops: int  # of a query with one key, in all layers

    @classmethod
    def of(cls, llm: Any) -> Costs:
        ledger, model, hf = llm.engine.executor.worker.ledger, llm.config.model, llm.config.model.hf_config
        table = model.vocab_size * model.hidden_size
        size = getattr(torch, model.dtype).itemsize
        read = ledger.weights - (0 if hf["tie_word_embeddings"] else table * size)
        heads = hf["num_attention_heads"]
        return cls(
            step_bytes=read,
            key_bytes=sum(spec.bytes_per_token() for spec in ledger.layout.specs),
            token_flops=2 * (read // size - table),
            head_flops=2 * table,
            pair_flops=4 * hf["num_hidden_layers"] * heads * hf.get("head_dim", model.hidden_size // heads),
        )

    def prompt_flops(self, load: Load) -> int:
        """Only a prompt's last token needs the head."""
        pairs = sum(n * (n + 1) // 2 for n in load.prompts)
        return sum(load.prompts) * self.token_flops + len(load.prompts) * self.head_flops + pairs * self.pair_flops

    def decode_bytes(self, load: Load) -> int:
        """Every step reads the weights, and every sequence in it its keys and values so far."""
        keys = sum((out - 1) * n + out * (out - 1) // 2 for n, out in zip(load.prompts, load.outs, strict=True))
        return (max(load.outs) - 1) * self.step_bytes + keys * self.key_bytes

    def floor(self, load: Load, copy: float, rate: float) -> float:
        """Seconds: prompts at the matrix rate, then steps at the copy bandwidth."""
        return self.prompt_flops(load) / rate + self.decode_bytes(load) / copy


def model_folder(config: dict[str, Any]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="octavo-bench-"))
    (folder / "config.json").write_text(json.dumps(config | TINY if DRY else config))
    return folder


def free_memory() -> None:
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


@contextmanager
def engine(config: dict[str, Any], **options: Any) -> Iterator[Any]:
    """An engine with random weights; its memory is given back at the end, whatever that is."""
    from octavo import LLM

    folder = model_folder(config)
    free_memory()
    llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options)
    try:
        yield llm
    finally:
        llm.engine = None
        shutil.rmtree(folder)
        free_memory()


def generate(llm: Any, load: Load, seed: int, loras: list[Any] | None = None) -> float:
    """Seconds that the load takes. Other tokens for each seed, so that no prompt is in the prefix cache. ``loras``: the
    adapter of each request."""
    from octavo import SamplingParams

    rng = random.Random(seed)
    vocab = llm.config.model.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(2, vocab) for _ in range(length)]} for length in load.prompts]
    params = [
        SamplingParams(temperature=0.6, max_tokens=out, ignore_eos=True, seed=i) for i, out in enumerate(load.outs)
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    if not DRY:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed(llm: Any, load: Load) -> tuple[float, int]:
    """Seconds that a load takes when all is warm, and kernels that were compiled all the same."""
    generate(llm, load.shortened(4 if DRY else 32), seed=1)
    before = compiles.now()
    seconds = generate(llm, load, seed=2)
    return seconds, compiles.since(before).compiled


def say(name: str, figure: float, unit: str, goal: str, **more: Any) -> None:
    results[name] = {"figure": figure, "unit": unit, "goal": goal, **more}
    extra = "  ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in more.items()
    )
    print(f"{name:32s} {figure:10.2f} {unit:8s} goal {goal:31s} {extra}", flush=True)


def decode(copy: float, rate: float) -> None:
    """One sequence of the 8B model: milliseconds a step, against reading the weights and the keys once."""
    few, many = (Load([32], [out]) for out in ((4, 12) if DRY else (64, 512)))
    steps = many.outs[0] - few.outs[0]
    with engine(LLAMA_8B, max_model_len=2048, max_num_seqs=8) as llm:
        generate(llm, many, seed=0)
        before = compiles.now()
        times = [generate(llm, many, seed=2 * i + 1) - generate(llm, few, seed=2 * i + 2) for i in range(3)]
        step, costs = statistics.median(times) / steps, Costs.of(llm)
        floor = (costs.floor(many, copy, rate) - costs.floor(few, copy, rate)) / steps
        say(
            "8B one sequence",
            step * 1e3,
            "ms/step",
            "5.6 (H100), 3.9 (H200)",
            of_floor=floor / step,
            floor_ms=floor * 1e3,
            compiled=compiles.since(before).compiled,
        )
    hf = hugging_face(LLAMA_8B, 4 if DRY else 48)
    free_memory()
    if hf is not None:
        results["8B one sequence"]["hugging_face_ms"] = hf * 1e3
        print(f"    Hugging Face generate {hf * 1e3:.2f} ms/step: {hf / step:.1f} times as long", flush=True)


def hugging_face(config: dict[str, Any], tokens: int) -> float | None:
    """Seconds a token of transformers' generate with the same shapes, or None where it cannot run."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = model_folder(config)
        hf_config = AutoConfig.from_pretrained(folder)
        shutil.rmtree(folder)
        with torch.device(measure.DEVICE):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32 if DRY else torch.bfloat16).eval()
        ids = torch.randint(2, 400, (1, 32), device=measure.DEVICE)

        def run(count: int) -> float:
            start = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            if not DRY:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        run(2)
        return (run(tokens) - run(2)) / (tokens - 2)
    except Exception as error:  # the baseline is a courtesy: our figures count without it
        print(f"    Hugging Face generate did not run: {error}", flush=True)
        return None


def throughput(copy: float, rate: float) -> None:
    """128 sequences of 32 tokens in, 2,048 out, of the 8B model."""
    count, out = (4, 8) if DRY else (128, 2048)
    load = Load.draw(count, 32, out)
    with engine(LLAMA_8B, max_model_len=2176, max_num_seqs=count) as llm:
        seconds, compiled = timed(llm, load)
        say(
            f"8B {count} x (32, {out})",
            count * out / seconds,
            "tok/s",
            ">= 9,000 (H100), 12,900 (H200)",
            of_floor=Costs.of(llm).floor(load, copy, rate) / seconds,
            compiled=compiled,
        )


def prefill(copy: float, rate: float) -> None:
    """32 prompts of 4,096 tokens, 32 tokens out each."""
    count, prompt = (2, 40) if DRY else (32, 4096)
    load = Load.draw(count, prompt, 4 if DRY else 32)
    options = {"max_model_len": 4224, "enable_prefix_caching": False, "max_num_batched_tokens": 8192}
    with engine(LLAMA_8B, max_num_seqs=32, **options) as llm:
        seconds, compiled = timed(llm, load)
        costs = Costs.of(llm)
        say(
            f"8B prefill {count} x ({prompt}, 32)",
            count * prompt / seconds,
            "tok/s",
            ">= 36,000 (H100)",
            of_floor=costs.floor(load, copy, rate) / seconds,
            of_matrix_rate=costs.prompt_flops(load) / seconds / rate,
            compiled=compiled,
        )


def small(copy: float, rate: float) -> None:
    """nano-vllm's shape: Qwen3-0.6B, 256 sequences, 100 to 1,024 tokens in and out."""
    count, lengths = (4, (3, 9)) if DRY else (256, (100, 1024))
    load = Load.draw(count, lengths, lengths)
    with engine(QWEN3_600M, max_model_len=4096, max_num_seqs=count) as llm:
        seconds, compiled = timed(llm, load)
        say(
            "Qwen3-0.6B 256 sequences",
            sum(load.outs) / seconds,
            "tok/s",
            ">= 20,000 (H100), 25,000 (H200)",
            of_floor=Costs.of(llm).floor(load, copy, rate) / seconds,
            compiled=compiled,
        )


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> None:
    """Random matrices for all linear layers."""
    from safetensors.torch import save_file

    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    keys, queries = config["num_key_value_heads"] * size, heads * size
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(shape, generator=generator).mul_(0.01).bfloat16()
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{kind}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(described))


def adapters(copy: float, rate: float) -> None:
    """8 sequences of the 8B model: without adapters where there may be some, and over 1, 4 and 8 of rank 16; how long
    one takes that is read from files first."""
    from octavo import LoRARequest

    sizes, count = LLAMA_8B | (TINY if DRY else {}), 2 if DRY else 8
    few, many = (Load([32] * count, [out] * count) for out in ((2, 4) if DRY else (16, 256)))
    steps = many.outs[0] - few.outs[0]

    def step_of(llm: Any, loras: list[Any] | None) -> float:
        """Milliseconds."""
        generate(llm, few, 0, loras)
        seconds = [generate(llm, many, 2 * i + 1, loras) - generate(llm, few, 2 * i + 2, loras) for i in range(3)]
        return statistics.median(seconds) / steps * 1e3

    with engine(LLAMA_8B, max_model_len=2048, max_num_seqs=count) as llm:
        plain = step_of(llm, None)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        for i in range(count):
            write_adapter(Path(folder, f"{i}"), sizes, 16, i)
        loras = [LoRARequest(f"{i}", i + 1, str(Path(folder, f"{i}"))) for i in range(count)]
        with engine(LLAMA_8B, max_model_len=2048, max_num_seqs=count, enable_lora=True, max_loras=count) as llm:
            before, base = compiles.now(), step_of(llm, None)
            cold = generate(llm, Load([32], [1]), 1, loras[:1])
            say("8B 8 sequences, no adapter", base, "ms/step", "that without --enable-lora", without_ms=plain)
            for number in sorted({1, min(4, count), count}):
                step = step_of(llm, [loras[i % number] for i in range(count)])
                say(
                    f"8B 8 sequences over {number} adapters",
                    step,
                    "ms/step",
                    "none yet: not measured",
                    of_base=base / step,
                    compiled=compiles.since(before).compiled,
                )
            say("8B first token of a cold adapter", cold, "s", "<= 0.5")


def start(copy: float, rate: float) -> None:
    """A new process until it is ready: with nothing in Triton's cache, then with all that the first left there."""
    folder, cache = model_folder(LLAMA_8B), Path(tempfile.mkdtemp(prefix="octavo-triton-"))
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    try:
        begin = time.perf_counter()
        load_format = weights_for(LLAMA_8B | TINY if DRY else LLAMA_8B, folder)
        free_memory()
        weights = "made on the device: the disk is too small" if load_format == "dummy" else "files in the page cache"
        print(f"start: max_model_len {MAX_MODEL_LEN}, weights {weights} ({time.perf_counter() - begin:.0f} s)")
        for name, goal in (("cold", "none: it compiles"), ("warm", "<= 12, and none compiled")):
            found = start_engine(folder, load_format, cache)
            say(
                f"8B start, {name} Triton cache",
                found["ready_s"],
                "s",
                goal,
                compiled=found["compiled"],
                loaded=found["loaded"],
                answered_s=found["answered_s"],
                weights=load_format,
            )
        os.environ["TRITON_CACHE_DIR"] = str(cache)  # the other sections need not compile it all again
    finally:
        shutil.rmtree(folder)


SECTIONS: dict[str, Callable[[float, float], None]] = {
    "start": start,
    "decode": decode,
    "throughput": throughput,
    "prefill": prefill,
    "small": small,
    "adapters": adapters,
}


def main() -> None:
    global compiles
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all by default")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    copy, rate = measure.limits()
    compiles = measure.watch_compiles()
    results["device"] = {"name": measure.device_name(), "copy_tb_s": copy / 1e12, "tflop_s": rate / 1e12}
    failed = []
    for name in args.sections or SECTIONS:
        begin = time.perf_counter()
        try:
            SECTIONS[name](copy, rate)
        except Exception as error:  # the others' figures are wanted all the same
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            failed.append(name)
        free_memory()  # only now nothing holds what the failed section had: the error's frames did
        print(f"    {name}: {time.perf_counter() - begin:.0f} s in all", flush=True)
        measure.save(args.json, results)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
