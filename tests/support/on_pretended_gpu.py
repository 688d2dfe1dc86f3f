"""Engines on a GPU that is pretended (`support.pretended_gpu`); prints what was seen as JSON.

    python -m support.on_pretended_gpu CASE

A process of its own: Triton decides when it is imported whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from safetensors.torch import save_file
from support.overlapped import PARAMS, prompts_of
from support.pretended_gpu import HostWaitError, PretendedGpu

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.loader.safetensors_reader import SafetensorsFile

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 2, "num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Tensors = dict[str, torch.Tensor]
SAMPLING: list[dict[str, Any]] = [
    *PARAMS, {}, {"top_k": 5}, {"logprobs": 3}, {"logit_bias": {4: 1.0}}, {"min_p": 0.1, "frequency_penalty": 0.5},
    {"logprobs": 1, "temperature": 0}, {"allowed_token_ids": [4, 5, 6]}, {"prompt_logprobs": 20}, {"logprobs": 20},
    {"bad_words_token_ids": [[0, 1], [5]]},
]  # fmt: skip


def engine(config: dict[str, Any], tensors: Tensors | None = None, **arguments: Any) -> LLM:
    """Of a checkpoint with these tensors; None: dummy ones."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, Path(folder, "model.safetensors"))
        load_format = "auto" if tensors is not None else "dummy"
        return LLM(folder, load_format=load_format, skip_tokenizer_init=True, device="cuda", **arguments)


def zeros_of(config: dict[str, Any], write: Callable[[int, int], Tensors]) -> Tensors:
    """A Qwen3 checkpoint of nothing but 0, each linear weight [N, K] as ``write`` (N, K) stores it."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": head}
    found = {"embed_tokens.weight": torch.zeros(config["vocab_size"], hidden), "norm.weight": torch.zeros(hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (norms | {"self_attn.k_norm": head}).items():
            found[f"layers.{layer}.{name}.weight"] = torch.zeros(size)
        for name, size in sizes.items():
            found |= {f"layers.{layer}.{name}.{leaf}": tensor for leaf, tensor in write(*size).items()}
    return {f"model.{name}": t.bfloat16() if t.dtype == torch.float32 else t for name, t in found.items()}


def awq(rows: int, columns: int) -> Tensors:
    groups, words = columns // 128, rows // 8
    return {"qweight": torch.zeros(columns, words, dtype=torch.int32), "scales": torch.zeros(groups, rows).half(),
            "qzeros": torch.zeros(groups, words, dtype=torch.int32)}  # fmt: skip


TOKENS = count(10)  # each prompt has its own, or the prefix cache would leave one token of it to compute


def ask(llm: LLM, lengths: list[int], **params: Any) -> list[str]:
    """Prompts of these lengths; the errors they met with."""
    params = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.7} | params
    prompts = [{"prompt_token_ids": [next(TOKENS)] * length} for length in lengths]
    return errors(llm.generate(prompts, SamplingParams(**params), use_tqdm=False))


def errors(outputs: list[Any]) -> list[str]:
    return sorted({output.error for output in outputs if output.error})


def whole_model(gpu: PretendedGpu) -> dict[str, Any]:
    """Llama-3.1-8B as it is served: what its graphs launch, what its steps launch, what memory it takes at most."""
    llm = engine(LLAMA_8B, max_num_seqs=256)
    num_sizes = len(llm.engine.executor.worker.runner.device_runner.decode_graphs.sizes)  # type: ignore[attr-defined]
    ledger = llm.engine.executor.worker.ledger  # type: ignore[attr-defined]
    graphs = [Counter(launch.name for launch in graph.launches) for graph in gpu.graphs]
    gpu.strict = True
    found = ask(llm, [300] * 300, max_tokens=2, logprobs=20, top_p=0.9, presence_penalty=1.0)
    found += ask(llm, [9000] * 3, max_tokens=2, prompt_logprobs=20)
    peak = gpu.peak
    steps: list[dict[str, int]] = []
    plain = EngineCore.step

    def noted(core: EngineCore) -> Any:
        gpu.take_launches()
        done = plain(core)
        steps.append(Counter(launch.name for launch in gpu.take_launches()))
        return done

    EngineCore.step = noted  # type: ignore[method-assign]
    found += ask(llm, [32] * 128, max_tokens=80)
    steady = steps[10:-10]
    steps.clear()
    found += ask(llm, [40] * 7, max_tokens=1)
    EngineCore.step = plain  # type: ignore[method-assign]
    return {
        "errors": found, "layers": LLAMA_8B["num_hidden_layers"],
        "decodes": graphs[: 3 * num_sizes], "prompts": graphs[3 * num_sizes :],
        "steady": steady, "step of prompts": max(steps, key=len), "limit": ledger.total, "peak": peak,
    }  # fmt: skip


def fp8_in_blocks(rows: int, columns: int) -> Tensors:
    scales = torch.ones(rows // 128, columns // 128, dtype=torch.float16)
    return {"weight": torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), "weight_scale_inv": scales}


def plain(rows: int, columns: int) -> Tensors:
    return {"weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}


def stored_as(
    gpu: PretendedGpu,
    write: Callable[[int, int], Tensors],
    description: dict[str, Any] | None = None,
    starts: tuple[dict[str, Any], ...] = ({"max_num_seqs": 300, "enforce_eager": True}, {"max_num_seqs": 8}),
    **arguments: Any,
) -> dict[str, Any]:
    """A quantised checkpoint, captured and not: batches of many sizes, what was compiled for them, all kernels."""
    config = QWEN3 | {"num_key_value_heads": 8, "vocab_size": 4096}
    if description is not None:
        config["quantization_config"] = description
    found: list[str] = []
    new: list[str] = []
    for limits in starts:
        gpu.strict = False
        llm = engine(
            config, zeros_of(config, write), max_model_len=2048, num_gpu_blocks_override=2000, **limits, **arguments
        )
        known = set(gpu.kernels)
        gpu.strict = True
        for together in (1, 3, 7, 20, 50, 130, 300):
            found += ask(llm, [1 + together % 3] * together)
        for length in (40, 100, 300, 1500):
            found += ask(llm, [length])
        new += [f"{gpu.kernels[h].metadata.name} {gpu.kernels[h].src.constants}" for h in set(gpu.kernels) - known]
    kernels = sorted({kernel.metadata.name for kernel in gpu.kernels.values()})
    return {"errors": found, "compiled while serving": new, "kernels": kernels}


def experts(gpu: PretendedGpu, **arguments: Any) -> dict[str, Any]:
    """A mixture of experts with dummy weights, captured: batches of many sizes, and what was compiled for them."""
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    sizes = {"num_experts_per_tok": 2, "num_key_value_heads": 8, "vocab_size": 4096, "intermediate_size": 1024}
    llm = engine(
        QWEN3 | mixtral | sizes, max_num_seqs=32, max_model_len=2048, num_gpu_blocks_override=2000, **arguments
    )
    known = set(gpu.kernels)
    gpu.strict = True
    found: list[str] = []
    for together in (1, 3, 7, 20, 60):
        found += ask(llm, [1 + together % 3] * together)
    for length in (40, 100, 700, 1500):
        found += ask(llm, [length])
    new = [f"{gpu.kernels[h].metadata.name} {gpu.kernels[h].src.constants}" for h in set(gpu.kernels) - known]
    graphs = [Counter(launch.name for launch in graph.launches) for graph in gpu.graphs]
    return {"errors": found, "compiled while serving": new, "kernels": sorted(set().union(*graphs))}


def heads(kv_heads: int) -> dict[str, Any]:
    return QWEN3 | {"num_key_value_heads": kv_heads}


def every_kind(gpu: PretendedGpu, config: dict[str, Any], max_num_seqs: int, **arguments: Any) -> dict[str, Any]:
    """Requests of every kind, in batches of many shapes; the kernels that were not known when the engine was ready."""
    arguments |= {"max_num_seqs": max_num_seqs, "max_model_len": 4096}
    llm = engine(config, **arguments)
    crowd = min(300, 2 * max_num_seqs)  # more would only wait longer
    known = set(gpu.kernels)
    gpu.strict = True
    found: list[str] = []
    for params in SAMPLING:
        prompts = prompts_of(str(params), 3)
        found += errors(llm.generate(prompts * 2, SamplingParams(**params), use_tqdm=False))
    for length in range(1, 10):
        for together in sorted({1, 3, min(40, crowd), crowd}):
            found += ask(llm, [length] * together)
    rng = random.Random(config["num_key_value_heads"])
    for together in (2, 5, 30, 100, 300, 30, 5):
        lengths = [rng.choice([1, 2, 5, 8, 9, 33, 100, 700]) for _ in range(min(together, crowd))]
        found += ask(llm, lengths, max_tokens=rng.choice([1, 3, 9]), **rng.choice(SAMPLING[len(PARAMS) :]))
    found += ask(llm, [4000]) + ask(llm, [4000] * 2)
    vectors = llm.embed(prompts_of("embeddings", 5))
    new = [f"{gpu.kernels[h].metadata.name} {gpu.kernels[h].src.constants}" for h in set(gpu.kernels) - known]
    return {"errors": found, "compiled while serving": new, "embeddings": [len(vector) for vector in vectors]}


def weights_of_a_file(gpu: PretendedGpu) -> dict[str, Any]:
    """Tensors of several pieces, of the parameter's dtype and of another: every copy must be from pinned memory."""
    made = {f"{dtype}": torch.zeros(5, 1 << 20, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
    gpu.strict = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file(made, path)
        for source in SafetensorsFile(path).sources():
            source.load_into(torch.nn.Parameter(torch.empty(source.shape, dtype=torch.bfloat16, device="cuda")))
    return {"launches": Counter(launch.name for launch in gpu.take_launches())}


def what_is_noticed(gpu: PretendedGpu) -> dict[str, Any]:
    """Whether the checks see what they are for: each of these must be refused."""
    there, here = torch.ones(4, device="cuda"), torch.arange(4)
    pinned = here.pin_memory()
    graph = torch.cuda.CUDAGraph()

    def captured(work: Callable[[], object]) -> Callable[[], object]:
        def capture() -> None:
            graph.capture_begin()
            try:
                work()
            finally:
                graph.capture_end()

        return capture

    wrong: dict[str, Callable[[], object]] = {
        "a value read back": lambda: there.sum().item(),
        "a branch": lambda: bool(there[0] > 0),
        "a list": lambda: there.tolist(),
        "an unknown size": lambda: there.nonzero(),
        "a copy to the host": lambda: there.cpu(),
        "a copy from memory that is not pinned": lambda: here.to("cuda", non_blocking=True),
        "a copy that is waited for": lambda: pinned.to("cuda"),
        "a host's index": lambda: there[here],
        "a captured copy": captured(lambda: pinned.to("cuda", non_blocking=True)),
    }
    right: dict[str, Callable[[], object]] = {
        "a pinned copy": lambda: pinned.to("cuda", non_blocking=True),
        "a pinned copy back": lambda: pinned.copy_(there, non_blocking=True),
        "captured work": captured(lambda: there * 2),
    }
    gpu.strict = True
    return {"refused": [name for name in wrong if refused(wrong[name])], "wrong": list(wrong),
            "refused wrongly": [name for name in right if refused(right[name])]}  # fmt: skip


def refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except (HostWaitError, AssertionError, torch._subclasses.fake_tensor.DynamicOutputShapeException):
        return True
    return False


CASES: dict[str, Callable[[PretendedGpu], dict[str, Any]]] = {
    "whole model": whole_model,
    "one group": lambda gpu: every_kind(gpu, heads(2), max_num_seqs=256),
    "many lanes": lambda gpu: every_kind(gpu, heads(4), max_num_seqs=600, enforce_eager=True),
    "few rows": lambda gpu: every_kind(gpu, heads(8), max_num_seqs=7, dtype="float16"),
    "exact": lambda gpu: every_kind(gpu, heads(16), max_num_seqs=48, dtype="float32"),
    "fp8 cache": lambda gpu: every_kind(gpu, heads(8), max_num_seqs=48, dtype="bfloat16", kv_cache_dtype="fp8"),
    "awq": lambda gpu: stored_as(gpu, awq, AWQ),
    "fp8 in blocks": lambda gpu: stored_as(
        gpu, fp8_in_blocks, BLOCKS, starts=({"max_num_seqs": 300, "enforce_eager": True},)
    ),
    "fp8 while loading": lambda gpu: stored_as(gpu, plain, starts=({"max_num_seqs": 8},), quantization="fp8"),
    "experts": experts,
    "experts in fp8": lambda gpu: experts(gpu, quantization="fp8"),
    "weights of a file": weights_of_a_file,
    "what is noticed": what_is_noticed,
}

if __name__ == "__main__":
    with PretendedGpu().pretend() as gpu:
        print(json.dumps(CASES[sys.argv[1]](gpu)))
