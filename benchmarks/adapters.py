"""What LoRA adapters cost on a CPU: a server that could have some and has none in a step, and users of several.

    python -m benchmarks adapters [--rounds 10] [--users 8] [--adapters 4] [--rank 16] [--tokens 48] [--vllm]

On the embedded model, in one process, rounds alternate between an engine without --enable-lora, one with it whose
requests are all for the model itself, and one whose requests are spread over the adapters (random ones, for every
linear layer). Printed: the medians of each round's ratio, of CPU time where the work is the same, else of decoded
tokens a second; and how long an adapter's first token takes when its files are still to be read. --vllm: the last
ratio of both engines, too, on a made Llama of 4 layers in bfloat16, as benchmarks/tensor_parallel.py makes it. Other
programs of the machine move these figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Runs in each engine's own interpreter: both have this API. Prints the ratio of adapters' rate to the model's own.
RUN = """
import json, random, statistics, sys, time
engine, model, folder = sys.argv[1:4]
users, count, rank, tokens, rounds = map(int, sys.argv[4:])
if __name__ == "__main__":
    if engine == "vllm":
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
    else:
        from octavo import LLM, LoRARequest, SamplingParams
    llm = LLM(model, max_model_len=512, max_num_seqs=users, skip_tokenizer_init=True, enable_prefix_caching=False,
              enable_lora=True, max_loras=count, max_lora_rank=rank)
    draw = random.Random(1)
    prompts = [{"prompt_token_ids": [draw.randrange(3, 20000) for _ in range(32)]} for _ in range(users)]
    requests = [LoRARequest(f"a{i % count}", i % count + 1, f"{folder}/a{i % count}") for i in range(users)]
    def rate(adapters):
        def seconds(tokens):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            begun = time.perf_counter()
            llm.generate(prompts, params, lora_request=requests if adapters else None, use_tqdm=False)
            return time.perf_counter() - begun
        first = seconds(1)
        return users * (tokens - 1) / max(seconds(tokens) - first, 1e-9)
    rate(True), rate(False)
    ratios = [rate(True) / rate(False) for _ in range(rounds)]
    print("RESULT", json.dumps(statistics.median(ratios)))
"""


def write_adapters(folder: Path, count: int, rank: int, hf: dict[str, Any]) -> None:
    """Random ones for every linear layer of a Llama of config.json's sizes."""
    from support.adapters import write_adapter

    hidden, inner, heads = hf["hidden_size"], hf["intermediate_size"], hf["num_attention_heads"]
    size = hf.get("head_dim") or hidden // heads
    queries, keys = heads * size, (hf.get("num_key_value_heads") or heads) * size
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(hf["num_hidden_layers"])
    modules = {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}
    for number in range(count):
        settings = {"r": rank, "lora_alpha": 0.01, "target_modules": list({name.split(".")[1] for name in shapes})}
        write_adapter(folder / f"a{number}", modules, number, **settings)


def measure_embedded(args: argparse.Namespace) -> None:
    """Prints the two ratios on the embedded model."""
    from octavo import LLM, LoRARequest, SamplingParams

    sizes = {"max_num_seqs": args.users, "max_model_len": 512, "enable_prefix_caching": False}
    plain = LLM(**sizes)
    ready = LLM(**sizes, enable_lora=True, max_loras=args.adapters, max_lora_rank=args.rank)
    prompts = [f"Story number {number}: once upon a time" for number in range(args.users)]
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), args.adapters + 1, args.rank, plain.config.model.hf_config)
        asked = [LoRARequest(f"a{i % args.adapters}", 1, f"{folder}/a{i % args.adapters}") for i in range(args.users)]

        def run(llm: Any, tokens: int, adapters: bool) -> tuple[float, float]:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            begun, used = time.perf_counter(), time.process_time()
            llm.generate(prompts, params, lora_request=asked if adapters else None, use_tqdm=False)
            return time.perf_counter() - begun, time.process_time() - used

        def decoding(llm: Any, adapters: bool) -> tuple[float, float]:
            first, whole = run(llm, 1, adapters), run(llm, args.tokens, adapters)
            return whole[0] - first[0], whole[1] - first[1]

        decoding(ready, True)
        idle, rates = [], []
        for number in range(args.rounds):
            order = [(plain, False), (ready, False), (ready, True)]
            found = {}
            for which in random.Random(number).sample(range(3), 3):
                found[which] = decoding(*order[which])
            idle.append(found[1][1] / found[0][1])
            rates.append(found[0][0] / found[2][0])
        cold = [first_token(ready, f"{folder}/a{i % (args.adapters + 1)}") for i in range(4 * (args.adapters + 1))]
    steps = [llm.engine.executor.worker.runner.device_runner.recorded_steps._step for llm in (plain, ready)]
    same = len(steps[0]._words) == len(steps[1]._words)
    print(
        f"no adapter in a step: {statistics.median(idle):.3f}x the CPU time of an engine without --enable-lora; "
        f"recorded steps are {'of the same' if same else 'NOT of the same'} operations"
    )
    print(
        f"{args.users} users over {args.adapters} adapters of rank {args.rank}: {statistics.median(rates):.2f}x the "
        "base's decoded tokens a second"
    )
    print(
        f"first token of an adapter that is read from its files: {statistics.median(cold):.3f} s, at most "
        f"{max(cold):.3f} s"
    )


def first_token(llm: Any, path: str) -> float:
    """Seconds until the first token of a request, alone, for the adapter at ``path``, which is the one that has not
    been asked for for longest: memory holds one less than there are."""
    from octavo import LoRARequest, SamplingParams

    params, begun = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), time.perf_counter()
    llm.generate("Once upon a time", params, lora_request=LoRARequest("cold", 1, path), use_tqdm=False)
    return time.perf_counter() - begun


def measure_both(args: argparse.Namespace) -> None:
    """Prints each engine's ratio on the made Llama."""
    from benchmarks.peers.engines import peers_folder, vllm_binary, vllm_environment
    from benchmarks.tensor_parallel import SHAPE, make_checkpoint

    model, root = make_checkpoint(Path.home() / ".cache" / "octavo" / "benchmarks", 4, SHAPE), peers_folder()
    engines = {
        "octavo": (sys.executable, {}),
        "vllm": (str(vllm_binary(root).parent / "python"), vllm_environment(root, 2)),
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        write_adapters(Path(folder), args.adapters, args.rank, json.loads((model / "config.json").read_text()))
        script.write(RUN)
        script.flush()
        for name, (python, env) in engines.items():
            numbers = (args.users, args.adapters, args.rank, args.tokens, 3)
            command = [python, script.name, name, str(model), folder, *map(str, numbers)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
            result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
            print(f"{name} on a Llama of 4 layers: {result or done.stderr.strip().splitlines()[-1:]}", flush=True)


def main() -> int:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--vllm", action="store_true", help="vLLM's CPU build too")
    args = parser.parse_args()
    measure_embedded(args)
    if args.vllm:
        measure_both(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
