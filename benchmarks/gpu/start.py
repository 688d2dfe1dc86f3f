"""From nothing to ready, in a process of its own: imports, CUDA's context, weights, kernels and graphs are all counted.

`python -m benchmarks gpu/start FOLDER {auto,dummy}` starts the engine on the model in FOLDER and says so with a line of
JSON, then answers one request and says that. benchmarks/gpu/engine.py calls it with a cold and a warm Triton cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import measure
from benchmarks.gpu.measure import DRY

MAX_MODEL_LEN = 64 if DRY else 2048


def start_engine(folder: Path, load_format: str, triton_cache: Path) -> dict[str, Any]:
    """Start an engine in a new process. Seconds until it is ready and until its first answer, kernels by then."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(triton_cache)}
    begin = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.start", str(folder.resolve()), load_format],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    said: dict[str, Any] = {}
    for line in child.stdout:
        if line.startswith("{"):
            news = json.loads(line)
            said |= news | {f"{news['event']}_s": time.perf_counter() - begin}
    if child.wait() or "answered_s" not in said:
        raise RuntimeError(f"the engine's process ended with code {child.returncode} after {said or 'nothing'}")
    return said


def weights_for(config: dict[str, Any], folder: Path) -> str:
    """Write random weights beside config.json if the disk has room for them. Returns the load format to use."""
    size = 2 * (2 * config["vocab_size"] * config["hidden_size"] + config["num_hidden_layers"] * _per_layer(config))
    if shutil.disk_usage(folder).free < 1.5 * size:
        return "dummy"
    from safetensors.torch import save_file

    shards: list[dict[str, tuple[int, ...]]] = [_outer_shapes(config)]
    for first in range(0, config["num_hidden_layers"], 4):
        layers = range(first, min(first + 4, config["num_hidden_layers"]))
        shards.append({name: shape for layer in layers for name, shape in _layer_shapes(config, layer).items()})
    dtype = getattr(torch, config["torch_dtype"])
    for i, shapes in enumerate(shards):
        tensors = {n: torch.randn(*s, device=measure.DEVICE).mul_(0.02).to(dtype).cpu() for n, s in shapes.items()}
        save_file(tensors, folder / f"model-{i:05}.safetensors")
    return "auto"


def _outer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    table = config["vocab_size"], config["hidden_size"]
    return {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": table[1:]}


def _layer_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    queries, keys = heads * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def _per_layer(config: dict[str, Any]) -> int:
    return sum(torch.Size(shape).numel() for shape in _layer_shapes(config, 0).values())


def main() -> None:
    folder, load_format = sys.argv[1], sys.argv[2]
    counts = measure.watch_compiles()
    from octavo import LLM, SamplingParams

    def say(event: str) -> None:
        print(json.dumps({"event": event, "compiled": counts.compiled, "loaded": counts.loaded}), flush=True)

    llm = LLM(folder, load_format=load_format, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
    say("ready")
    prompt = {"prompt_token_ids": list(range(2, 34))}
    llm.generate([prompt], SamplingParams(temperature=0.6, max_tokens=2, ignore_eos=True, seed=1), use_tqdm=False)
    say("answered")


if __name__ == "__main__":
    main()
