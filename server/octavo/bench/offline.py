"""``octavo bench throughput`` and ``latency``: the engine without a server."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from octavo.bench.datasets import SampleRequest, add_dataset_arguments, add_numbers, load_dataset
from octavo.bench.hugging_face import WARM_UP_TOKENS, generate, load, named, precision
from octavo.bench.image_datasets import IMAGE_DATASETS
from octavo.bench.progress import progress_bar
from octavo.bench.report import percentile
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.flags.engine_flags import add_engine_flags
from octavo.flags.vllm_flags import add_vllm_flags

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def _make_llm(args: argparse.Namespace) -> Any:
    from octavo import LLM

    return LLM(**{name: getattr(args, name) for name in EngineArgs.field_names() if hasattr(args, name)})


def _save(path: str | None, figures: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
        print("saved", path)


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo bench throughput`."""
    add_engine_flags(parser.add_argument_group("engine"), skip=("seed",))
    add_dataset_arguments(parser)
    parser.add_argument("--output-json", metavar="FILE", help="Write the figures to this file (default: none)")
    parser.add_argument(
        "--baseline",
        choices=("hf",),
        help="Compare with generate() of transformers, one prompt at a time and in static batches (default: off)",
    )
    add_numbers(parser, ("--hf-max-batch-size", 20, "Prompts per batch of the baseline"))
    parser.add_argument(
        "--hf-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="Data type of the baseline (default: auto, as --dtype)",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar (default: off)")
    add_vllm_flags(parser)


def run_throughput(args: argparse.Namespace) -> int:
    """Generate all prompts at once; prints requests and tokens per second."""
    from octavo import SamplingParams

    if args.dataset_name == "multi_turn":
        raise ConfigError(
            "--dataset-name multi_turn: questions follow answers; measure a server with `octavo bench serve`"
        )
    if args.dataset_name in IMAGE_DATASETS:
        raise ConfigError(
            f"--dataset-name {args.dataset_name}: images go in messages; measure a server with `octavo bench serve "
            "--backend openai-chat`"
        )
    llm = _make_llm(args)
    samples = load_dataset(args, llm.tokenizer)
    prompts = [{"prompt_token_ids": sample.prompt_token_ids} for sample in samples]
    params = [
        SamplingParams(temperature=0, max_tokens=s.output_len, ignore_eos=True, detokenize=False) for s in samples
    ]
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS), use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm)
    elapsed = time.perf_counter() - started
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures: dict[str, Any] = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_prompt + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.2f} total tokens/s, {figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}")
    print(f"Total num output tokens:  {num_output}")
    if args.baseline:
        figures |= _compare(llm, samples, figures["output_tokens_per_second"], args)
    _save(args.output_json, figures)
    return 0


def _compare(llm: Any, samples: list[SampleRequest], ours: float, args: argparse.Namespace) -> dict[str, Any]:
    """Octavo's rate beside that of Hugging Face generate, in output tokens a second, printed and as figures."""
    own, most = precision(llm.config), llm.config.scheduler.max_num_seqs
    print(f"Octavo:                   {ours:.2f} output tokens/s ({named(own)}, continuous batches of up to {most})")
    dtype = str(llm.config.model.dtype) if args.hf_dtype == "auto" else args.hf_dtype
    reference, theirs = load(llm.config, dtype), dict.fromkeys(own, dtype)
    # One at a time takes a batch's size times as long: some prompts of every length say the same.
    some = sorted(samples, key=lambda sample: sample.prompt_len)[:: max(1, len(samples) // 8)]
    generate(reference, [some[0].prompt_token_ids], WARM_UP_TOKENS)
    baselines = []
    for size, chosen in {1: some, args.hf_max_batch_size: samples}.items():
        rate = _generate(reference, chosen, size, not args.disable_tqdm)
        way = "one at a time" if size == 1 else f"static batches of {size}"
        print(f"Hugging Face generate:    {rate:.2f} output tokens/s ({named(theirs)}, {way}, {len(chosen)} prompts)")
        print(f"Octavo / Hugging Face:    {ours / rate:.2f}x ({way})")
        figures = {"batch_size": size, "num_prompts": len(chosen), "output_tokens_per_second": rate}
        baselines.append(theirs | figures | {"ratio": ours / rate})
    return {"octavo": own | {"max_num_seqs": most}, "baselines": baselines}


def _generate(model: Any, samples: list[SampleRequest], batch_size: int, show_progress: bool) -> float:
    """Output tokens a second of transformers' `generate` in left-padded batches of prompts of like length."""
    samples = sorted(samples, key=lambda sample: sample.prompt_len)
    num_output, seconds = 0, 0.0
    with progress_bar("Hugging Face", len(samples), show_progress) as advance:
        for at in range(0, len(samples), batch_size):
            batch = samples[at : at + batch_size]
            prompts = [sample.prompt_token_ids for sample in batch]
            seconds += generate(model, prompts, max(sample.output_len for sample in batch)).elapsed
            num_output += sum(sample.output_len for sample in batch)
            for _ in batch:
                advance()
    return num_output / seconds


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo bench latency`."""
    add_engine_flags(parser.add_argument_group("engine"), skip=("seed",))
    add_numbers(
        parser,
        ("--input-len", 32, "Tokens per prompt"),
        ("--output-len", 128, "Tokens per answer"),
        ("--batch-size", 8, "Prompts per batch"),
        ("--num-iters-warmup", 10, "Batches before the measurement"),
        ("--num-iters", 30, "Batches to measure"),
    )
    parser.add_argument("--output-json", metavar="FILE", help="Write the figures to this file (default: none)")
    parser.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar (default: off)")
    add_vllm_flags(parser)


def run_latency(args: argparse.Namespace) -> int:
    """Generate one batch after the other; prints percentiles of a batch's time."""
    import random

    from octavo import SamplingParams

    args.enable_prefix_caching = False  # or all but the first iteration would find their prompts
    llm = _make_llm(args)
    rng = random.Random(0)
    top = min(llm.config.model.vocab_size, 10_000)
    prompts = [
        {"prompt_token_ids": [rng.randrange(top) for _ in range(args.input_len)]} for _ in range(args.batch_size)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    times = []
    with progress_bar("Iterations", args.num_iters_warmup + args.num_iters, not args.disable_tqdm) as advance:
        for i in range(args.num_iters_warmup + args.num_iters):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if i >= args.num_iters_warmup:
                times.append(time.perf_counter() - started)
            advance()
    average = sum(times) / len(times)
    print(f"Avg latency: {average} seconds")
    for p in LATENCY_PERCENTILES:
        print(f"{p}% percentile latency: {percentile(times, p)} seconds")
    percentiles = {str(p): percentile(times, p) for p in LATENCY_PERCENTILES}
    _save(args.output_json, {"avg_latency": average, "latencies": times, "percentiles": percentiles})
    return 0
