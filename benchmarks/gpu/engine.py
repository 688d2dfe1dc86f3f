"""The whole engine on a GPU, with random weights: step time, throughput, prefill, start, beside Hugging Face.

`python benchmarks/gpu/engine.py [decode|throughput|prefill|small|start ...]`; all of them by default. Needs torch,
triton, transformers (for the baseline) and the engine's own packages. Every figure is also given as a fraction of what
the device's measured copy bandwidth or matrix rate would allow. TRITON_INTERPRET=1 tries it with a tiny model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
from measure import DRY

if DRY:
    os.environ["OCTAVO_KERNEL_BACKEND"] = "triton"

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
QWEN3_600M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 4096, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500, "torch_dtype": "float32"}  # fmt: skip

results: dict[str, Any] = {}


def model_folder(config: dict[str, Any]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="octavo-bench-"))
    (folder / "config.json").write_text(json.dumps(config | TINY if DRY else config))
    return folder


def engine(config: dict[str, Any], **options: Any) -> Any:
    from octavo import LLM

    start = time.perf_counter()
    llm = LLM(str(model_folder(config)), load_format="dummy", skip_tokenizer_init=True, **options)
    results.setdefault("start_s", {})[f"{config['model_type']}"] = time.perf_counter() - start
    return llm


def release(llm: Any) -> None:
    """Give the device's memory back."""
    llm.engine = None
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


def generate(llm: Any, count: int, prompt: int | tuple[int, int], out: int | tuple[int, int], seed: int = 0) -> float:
    """Seconds that ``count`` requests take; lengths are numbers or ranges. Prints nothing."""
    from octavo import SamplingParams

    rng = random.Random(seed)

    def draw(length: int | tuple[int, int]) -> int:
        return length if isinstance(length, int) else rng.randint(*length)

    vocab = llm.config.model.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(2, vocab) for _ in range(draw(prompt))]} for _ in range(count)]
    params = [SamplingParams(temperature=0.6, max_tokens=draw(out), ignore_eos=True, seed=i) for i in range(count)]
    generate.tokens = sum(p.max_tokens for p in params)  # type: ignore[attr-defined]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    if not DRY:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def say(name: str, figure: float, unit: str, goal: str, **more: Any) -> None:
    results[name] = {"figure": figure, "unit": unit, "goal": goal, **more}
    extra = "  ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in more.items()
    )
    print(f"{name:44s} {figure:10.2f} {unit:8s} goal {goal:32s} {extra}", flush=True)


def decode(copy: float, rate: float) -> None:
    """One sequence of the 8B model: milliseconds a step, against reading the weights once."""
    llm = engine(LLAMA_8B, max_model_len=2048, max_num_seqs=8)
    few, many = (4, 12) if DRY else (64, 512)
    generate(llm, 1, 32, few)
    step = (generate(llm, 1, 32, many) - generate(llm, 1, 32, few)) / (many - few)
    weights = llm.engine.executor.worker.ledger.weights
    floor = weights / copy
    say("8B one sequence", step * 1e3, "ms/step", "5.6 (H100), 3.9 (H200)", of_floor=floor / step, floor_ms=floor * 1e3)
    release(llm)
    hf = hugging_face(LLAMA_8B, 4 if DRY else 48)
    if hf is not None:
        results["8B one sequence"]["hugging_face_ms"] = hf * 1e3
        print(f"    Hugging Face generate {hf * 1e3:.2f} ms/step: {hf / step:.1f} times as long", flush=True)


def hugging_face(config: dict[str, Any], tokens: int) -> float | None:
    """Seconds a token of transformers' generate with the same shapes, or None where it cannot run."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        hf_config = AutoConfig.from_pretrained(model_folder(config))
        with torch.device(measure.DEVICE):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32 if DRY else torch.bfloat16).eval()
        ids = torch.randint(2, 400, (1, 32), device=measure.DEVICE)

        def run(count: int) -> float:
            start = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                           do_sample=False, pad_token_id=0)  # fmt: skip
            return time.perf_counter() - start

        run(2)
        return (run(tokens) - run(2)) / (tokens - 2)
    except Exception as error:  # the baseline is a courtesy: our figures count without it
        print(f"    Hugging Face generate did not run: {error}", flush=True)
        return None


def throughput(copy: float, rate: float) -> None:
    """128 sequences of 32 tokens in, 2,048 out, of the 8B model."""
    count, out = (4, 8) if DRY else (128, 2048)
    llm = engine(LLAMA_8B, max_model_len=2176, max_num_seqs=count)
    generate(llm, count, 32, 4 if DRY else 32)
    seconds = generate(llm, count, 32, out)
    say(f"8B {count} x (32, {out})", count * out / seconds, "tok/s", ">= 9,000 (H100), 12,900 (H200)")
    release(llm)


def prefill(copy: float, rate: float) -> None:
    """32 prompts of 4,096 tokens, 32 tokens out each."""
    count, prompt = (2, 40) if DRY else (32, 4096)
    llm = engine(
        LLAMA_8B, max_model_len=4224, max_num_seqs=32, enable_prefix_caching=False, max_num_batched_tokens=8192
    )
    generate(llm, 2, prompt, 4)
    seconds = generate(llm, count, prompt, 4 if DRY else 32, seed=1)
    flops = 2 * llm.engine.executor.worker.ledger.weights / 2 * count * prompt
    say(f"8B prefill {count} x ({prompt}, 32)", count * prompt / seconds, "tok/s", ">= 36,000 (H100)",
        of_matrix_rate=flops / seconds / rate)  # fmt: skip
    release(llm)


def small(copy: float, rate: float) -> None:
    """nano-vllm's shape: Qwen3-0.6B, 256 sequences, 100 to 1,024 tokens in and out."""
    count, lengths = (4, (3, 9)) if DRY else (256, (100, 1024))
    llm = engine(QWEN3_600M, max_model_len=4096, max_num_seqs=count)
    generate(llm, 2, 8, 4)
    seconds = generate(llm, count, lengths, lengths)
    tokens = generate.tokens  # type: ignore[attr-defined]
    say("Qwen3-0.6B 256 sequences", tokens / seconds, "tok/s", ">= 20,000 (H100), 25,000 (H200)")
    release(llm)


def start(copy: float, rate: float) -> None:
    """From nothing to ready, weights made on the device; the second time with Triton's cache warm."""
    for attempt in ("first", "again"):
        begin = time.perf_counter()
        llm = engine(LLAMA_8B, max_model_len=2048)
        say(f"8B start, {attempt}", time.perf_counter() - begin, "s", "<= 12")
        release(llm)


SECTIONS: dict[str, Callable[[float, float], None]] = {
    "start": start, "decode": decode, "throughput": throughput, "prefill": prefill, "small": small,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all by default")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    copy, rate = measure.limits()
    results["device"] = {"name": measure.device_name(), "copy_tb_s": copy / 1e12, "tflop_s": rate / 1e12}
    for name in args.sections or SECTIONS:
        try:
            SECTIONS[name](copy, rate)
        except Exception as error:  # the others' figures are wanted all the same
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            results[name] = {"error": str(error)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
