"""What ranks cost on CPUs: two of one thread, that share each layer or have half of the layers each, against one of
two, and against vLLM's CPU build with two; with --experts, also two that each have some experts whole.

    python -m benchmarks tensor_parallel [--experts] [--layers 16] [--rounds 3] [--users 20] [--tokens 64] [--vllm]

A checkpoint of the shape of Llama 3.2 1B in bfloat16 with random weights is made in --folder, once; with --experts one
of a Qwen3-MoE with 32 experts, of which 4 take a token. Rounds alternate between engines; each starts one, answers one
request that is not counted, then --users at once: prompts of 64 tokens, --tokens each, greedy. Printed: tokens a
second, the time to be ready, and the ratios of the medians. `make peers` installs vLLM. Other programs of the machine
move these figures.
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
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = SHAPE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Runs in each engine's own interpreter: both have this API.
RUN = """
import json, sys, time
engine, model, ranks, stages, dealt, users, tokens, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
import random
if __name__ == "__main__":
    started = time.perf_counter()
    if engine == "vllm":
        from vllm import LLM, SamplingParams
    else:
        from octavo import LLM, SamplingParams
    llm = LLM(model, tensor_parallel_size=ranks, pipeline_parallel_size=stages, max_model_len=512,
              max_num_seqs=users, skip_tokenizer_init=True, enable_prefix_caching=False,
              enable_expert_parallel=bool(dealt))
    ready = time.perf_counter() - started
    draw = random.Random(seed)
    prompts = [{"prompt_token_ids": [draw.randrange(3, 32000) for _ in range(64)]} for _ in range(users)]
    def answer(some, count):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        done = llm.generate(some, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done), time.perf_counter() - begun
    answer(prompts[:1], 4)
    first = answer(prompts, 1)[1]
    count, seconds = answer(prompts, tokens)
    print("RESULT", json.dumps({"ready": ready, "rate": (count - users) / max(seconds - first, 1e-9),
                                "whole": count / seconds}))
"""


def make_checkpoint(folder: Path, layers: int, shape: dict[str, Any]) -> Path:
    """The checkpoint, made unless it is there."""
    import torch
    from safetensors.torch import save_file

    experts = shape.get("num_experts", 0)
    path = folder / (f"qwen3-moe-{experts}-{layers}" if experts else f"llama-1b-{layers}")
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    hidden, inner, kv = shape["hidden_size"], shape["intermediate_size"], shape["num_key_value_heads"] * 64
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, columns**-0.5, generator=generator)

    tensors = {"model.embed_tokens.weight": weight(shape["vocab_size"], hidden)}
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
    }
    mlps = [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]
    inner = shape.get("moe_intermediate_size", inner)
    for mlp in mlps:
        shapes |= {f"{mlp}.gate_proj": (inner, hidden), f"{mlp}.up_proj": (inner, hidden)}
        shapes[f"{mlp}.down_proj"] = hidden, inner
    if experts:
        shapes["mlp.gate"] = experts, hidden
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{name}.weight": weight(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for norm in ("q_norm", "k_norm") if experts else ():
            tensors[f"{at}self_attn.{norm}.weight"] = torch.ones(64, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": layers}))
    return path


def run_once(python: str, env: dict[str, str], *args: object) -> dict[str, float]:
    """One engine, from its start to its end. Raises SystemExit where it fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:  # vLLM's workers import what started them
        script.write(RUN)
        script.flush()
        done = subprocess.run(
            [python, script.name, *map(str, args)], capture_output=True, text=True, env=os.environ | env
        )
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if result is None:
        raise SystemExit(f"{args[0]} with {args[2]} x {args[3]} ranks failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(result.removeprefix("RESULT "))
    return found


def main() -> int:
    """Prints a line a round, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of the model (default: 16, its own)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "octavo" / "benchmarks")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts, and -ep beside -tp 2")
    parser.add_argument("--vllm", action="store_true", help="vLLM's CPU build too")
    args = parser.parse_args()
    model = make_checkpoint(args.folder, args.layers, EXPERTS if args.experts else SHAPE)
    engines: dict[str, tuple[str, dict[str, str], str, int, int, int]] = {
        "octavo -tp 1": (sys.executable, {}, "octavo", 1, 1, 0),
        "octavo -tp 2": (sys.executable, {}, "octavo", 2, 1, 0),
        "octavo -pp 2": (sys.executable, {}, "octavo", 1, 2, 0),
    }
    if args.experts:
        engines["octavo -tp 2 -ep"] = (sys.executable, {}, "octavo", 2, 1, 1)
    if args.vllm:
        from benchmarks.peers.engines import peers_folder, vllm_binary, vllm_environment

        root = peers_folder()
        env = vllm_environment(root, 2) | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        engines["vLLM -tp 2"] = (str(vllm_binary(root).parent / "python"), env, "vllm", 2, 1, 0)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(args.rounds):
        names = random.Random(number).sample(list(engines), len(engines))
        for name in names:
            python, env, engine, *layout = engines[name]
            result = run_once(python, env, engine, model, *layout, args.users, args.tokens, number)
            found[name].append(result)
            print(
                f"{name:16} {result['rate']:7.1f} tokens/s decoding, {result['whole']:7.1f} with prompts, "
                f"ready in {result['ready']:.2f} s",
                flush=True,
            )
    rates = {name: statistics.median(result["rate"] for result in results) for name, results in found.items()}
    ready = {name: statistics.median(result["ready"] for result in results) for name, results in found.items()}
    print(
        f"two ranks of one thread: {rates['octavo -tp 2'] / rates['octavo -tp 1']:.2f}x one of two; "
        f"ready {ready['octavo -tp 2'] - ready['octavo -tp 1']:+.2f} s"
    )
    print(
        f"two stages of one thread: {rates['octavo -pp 2'] / rates['octavo -tp 1']:.2f}x; "
        f"ready {ready['octavo -pp 2'] - ready['octavo -tp 1']:+.2f} s"
    )
    if args.experts:
        print(f"whole experts: {rates['octavo -tp 2 -ep'] / rates['octavo -tp 2']:.2f}x parts of each")
    if args.vllm:
        print(f"octavo -tp 2: {rates['octavo -tp 2'] / rates['vLLM -tp 2']:.2f}x vLLM -tp 2")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
