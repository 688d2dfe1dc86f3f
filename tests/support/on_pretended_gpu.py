"""Engines on a GPU that is pretended (`support.pretended_gpu`); prints what was seen of each case as a line of JSON.

    python -m support.on_pretended_gpu CASE ...    # or a case a line on standard input

A process of its own: Triton decides when it is imported whether kernels are compiled or interpreted. Each case is a
fork of it: importing takes as long as many a case, and no case may find what another has compiled.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from safetensors.torch import save_file
from support.adapters import write_adapters
from support.overlapped import PARAMS, prompts_of
from support.pretended_configs import AWQ, BLOCKS, DEEPSEEK, IMAGE_READERS, LLAMA_8B, MIXTRAL, QWEN3
from support.pretended_engines import TOKENS, Tensors, ask, engine, errors, images, noted_steps
from support.pretended_gpu import PretendedGpu, what_is_noticed
from support.pretended_ranks import as_ranks
from support.pretended_tensors import awq, fp8_in_blocks, plain, zeros_of
from support.quantized_files import RECIPES, gpt_oss_as_released, quantize_checkpoint, write_checkpoint
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, LoRARequest, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.spec_decode.drafts import Drafts
from octavo.core.spec_decode.worker_drafts import WorkerDrafts
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.loader.load_model import load_model
from octavo.loader.safetensors_reader import SafetensorsFile
from octavo.memory.dry_run import make_plan
from octavo.memory.ledger import MemoryLedger
from octavo.plan.measure import measure
from octavo.plan.model import planned_model
from octavo.worker.pooler import StepRows
from octavo.worker.worker import Worker
from octavo_kernels import gpu_parts

LOOKUP = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SAMPLING: list[dict[str, Any]] = [
    *PARAMS,
    {},
    {"top_k": 5},
    {"logprobs": 3},
    {"logit_bias": {4: 1.0}},
    {"min_p": 0.1, "frequency_penalty": 0.5},
    {"logprobs": 1, "temperature": 0},
    {"allowed_token_ids": [4, 5, 6]},
    {"prompt_logprobs": 20},
    {"logprobs": 20},
    {"bad_words_token_ids": [[0, 1], [5]]},
]


def whole_model(gpu: PretendedGpu) -> dict[str, Any]:
    """Llama-3.1-8B of fewer layers as it is served: what its graphs and steps launch, what memory it takes at most."""
    layers = 12
    llm = engine(LLAMA_8B | {"num_hidden_layers": layers}, max_num_seqs=256)
    num_sizes = len(llm.engine.executor.worker.runner.device_runner.decode_graphs.plain.sizes)  # type: ignore[attr-defined]
    ledger = llm.engine.executor.worker.ledger  # type: ignore[attr-defined]
    graphs = [Counter(launch.name for launch in graph.launches) for graph in gpu.graphs]
    gpu.strict = True
    found = ask(llm, [300] * 300, max_tokens=2, logprobs=20, top_p=0.9, presence_penalty=1.0)
    found += ask(llm, [9000] * 3, max_tokens=2, prompt_logprobs=20)
    peak = gpu.peak
    with noted_steps(gpu) as steps:
        found += ask(llm, [32] * 128, max_tokens=80)
    steady = steps[10:-10]
    with noted_steps(gpu) as steps:
        found += ask(llm, [40] * 7, max_tokens=1)
    return {
        "errors": found,
        "layers": layers,
        "decodes": graphs[: 3 * num_sizes],
        "prompts": graphs[3 * num_sizes :],
        "steady": steady,
        "step of prompts": max(steps, key=len),
        "limit": ledger.total,
        "peak": peak,
    }


def plans(gpu: PretendedGpu) -> dict[str, Any]:
    """What some engines reserve, as they measure it at start and as it is planned for."""
    found = []
    plain = Worker._plan_memory

    def noted(worker: Worker, config: EngineConfig, *more: Any) -> MemoryLedger:
        ledger = plain(worker, config, *more)
        device = replace(worker._device_memory(), in_use=int(dict(ledger.parts)["others, context"]))
        plan = make_plan(replace(config, device="cuda"), device, measure)
        assert plan.ledger is not None
        found.append([[dict(x.parts), x.num_blocks, x.weights] for x in (ledger, plan.ledger)])
        raise ConfigError("that is all")

    Worker._plan_memory = noted  # type: ignore[method-assign]
    layers = {"num_hidden_layers": 2}
    for config, options in (
        (LLAMA_8B | layers, {"max_num_seqs": 256}),
        (LLAMA_8B | layers, {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 8192}),
        (QWEN3, {"max_num_seqs": 64}),
        (QWEN3 | {"num_key_value_heads": 4}, {"max_num_seqs": 128, "enforce_eager": True, "kv_cache_dtype": "fp8"}),
        (MIXTRAL, {"max_num_seqs": 64}),
        (DEEPSEEK, {"max_num_seqs": 64}),
        (DEEPSEEK, {"max_num_seqs": 8, "max_num_batched_tokens": 2048}),
        (QWEN3, {"max_num_seqs": 64, "speculative_config": LOOKUP}),
        (LLAMA_8B | layers, {"max_num_seqs": 64, "enable_lora": True, "max_loras": 4, "max_lora_rank": 64}),
        *((config, {"max_num_seqs": 64, "image_settings": about}) for config, about in IMAGE_READERS.values()),
    ):
        with suppress(ConfigError):
            engine(config, **options)
    return {"found": found}


def plans_of_codes(gpu: PretendedGpu) -> dict[str, Any]:
    """What checkpoints take once they are loaded, and as planned by their headers and by config.json alone."""
    found: dict[str, Any] = {}
    settings = FAMILIES["llama"][1] | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        plain, whole, alone = (Path(folder, name) for name in ("plain", "whole", "alone"))
        make_model("Qwen3MoeConfig", settings).save_pretrained(plain)
        # Orders of columns cannot be compared without values.
        for recipe in (*(name for name in RECIPES if name != "gptq-act-order"), "int8", "fp8 online", "gpt-oss", None):
            shutil.rmtree(whole, ignore_errors=True)
            shutil.rmtree(alone, ignore_errors=True)
            quantization = None
            if recipe == "gpt-oss":
                write_checkpoint(whole, *gpt_oss_as_released())
            elif recipe in RECIPES:
                quantize_checkpoint(plain, whole, *RECIPES[recipe]())
            else:
                shutil.copytree(plain, whole)
                quantization = recipe and recipe.partition(" ")[0]
            alone.mkdir()
            shutil.copy(whole / "config.json", alone)
            configs = []
            for path in (whole, alone):
                args = EngineArgs(model=str(path), max_model_len=100, dtype="bfloat16", quantization=quantization)
                with planned_model(args) as model:
                    configs.append(replace(model.config, device="cuda"))
            loaded = load_model(configs[0].model, device="cuda").num_weight_bytes()
            found[str(recipe)] = [loaded, *(measure(config, 1).weights for config in configs)]
    return found


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
    """A mixture of experts with dummy weights, captured."""
    return served_in_sizes(gpu, MIXTRAL, max_num_seqs=32, **arguments)


def gpt_oss(gpu: PretendedGpu) -> dict[str, Any]:
    """gpt-oss of few layers as it is released, experts in MXFP4, captured: sinks, windows, clamped gates."""
    config, tensors = gpt_oss_as_released()
    return served_in_sizes(gpu, config, tensors=tensors, max_num_seqs=32)


def served_in_sizes(gpu: PretendedGpu, config: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Batches of many sizes, what was compiled for them, and the kernels of all graphs."""
    llm = engine(config, max_model_len=2048, num_gpu_blocks_override=2000, **arguments)
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


def gemma(gpu: PretendedGpu, architecture: str, **sizes: Any) -> dict[str, Any]:
    """Gemma 3n or 4 of few layers, the last ones of which share keys and values, captured."""
    config = QWEN3 | {
        "architectures": [architecture],
        "model_type": "gemma",
        "num_key_value_heads": 2,
        "num_attention_heads": 8,
        "head_dim": 256,
        "vocab_size": 4096,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size_per_layer_input": 4096,
        "hidden_size_per_layer_input": 256,
    }
    del config["rope_theta"]
    return served_in_sizes(gpu, config | sizes, max_num_seqs=32)


def latents(gpu: PretendedGpu) -> dict[str, Any]:
    """DeepSeek V3 of few layers, captured: batches of many sizes, and what was compiled for them."""
    return served_in_sizes(gpu, DEEPSEEK, max_num_seqs=32)


class Repeats:
    """Guesses that the last token comes again."""

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        pass

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        return token_ids[-1:] * most

    def forget(self, req_id: str) -> None:
        pass


# What guesses in the worker: its config.json, or that of the model that it is a part of.
SMALL = QWEN3 | {"vocab_size": 4096}
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": SMALL | {"num_hidden_layers": 1},
    "eagle": SMALL | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1},
    "eagle3": SMALL
    | {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    },
    "medusa": {"num_heads": 7},
    "mtp": DEEPSEEK | {"num_nextn_predict_layers": 2},
}


def drafts(gpu: PretendedGpu, lengths: Sequence[int] = (0, 1, 4, 7), method: str = "ngram") -> dict[str, Any]:
    """Guesses of such lengths, in batches of many sizes, beside prompts, and with sampling that is not captured: what
    was compiled for them, what steps of nothing but guesses launch beside graphs, and what they leave in memory."""
    by_worker = method in DRAFTERS
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(DRAFTERS.get(method)))
        asked = {"method": method, "num_speculative_tokens": 7} | ({} if method == "mtp" else {"model": folder})
        llm = engine(
            DRAFTERS["mtp"] if method == "mtp" else SMALL,
            max_model_len=2048,
            num_gpu_blocks_override=2000,
            max_num_seqs=48,
            speculative_config=asked if by_worker else LOOKUP,
        )
    known, scheduler = set(gpu.kernels), llm.engine.scheduler
    assert isinstance(scheduler, Scheduler)
    gpu.strict = True
    found: list[str] = []
    steps: dict[int, list[dict[str, int]]] = {}
    kept: list[int] = []
    for k in lengths:
        drafts = Drafts(WorkerDrafts() if by_worker else Repeats(), k, 4096, overlap=True) if k else None
        scheduler.use_drafts(drafts)
        found += ask(llm, [20], max_tokens=30)  # histories and pinned memory have grown
        before = gpu.allocated
        with noted_steps(gpu) as steps[k]:
            found += ask(llm, [30] * 5, max_tokens=40)
        found += ask(llm, [1, 9, 300, 5, 40], max_tokens=20, top_p=0.9, logprobs=2)
        found += ask(llm, [7] * 20, max_tokens=5) + ask(llm, [7] * 60, max_tokens=5, logit_bias={3: 1.0})
        kept.append(gpu.allocated - before)
    new = [f"{gpu.kernels[h].metadata.name} {gpu.kernels[h].src.constants}" for h in set(gpu.kernels) - known]
    steady = [steps[k][8:-8] for k in lengths]
    return {"errors": found, "compiled while serving": new, "steps": steady, "kept": kept}


LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 3,
    "max_cpu_loras": 4,
    "max_lora_rank": 12,
    "max_num_seqs": 24,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 2000,
}


def ask_adapters(llm: LLM, lengths: list[int], some: list[LoRARequest | None], **params: Any) -> list[str]:
    """As `ask`, of ``some`` adapters in turn."""
    asked = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "temperature": 0.7} | params)
    prompts = [{"prompt_token_ids": [next(TOKENS) % 4000] * length} for length in lengths]
    of_each = [some[i % len(some)] for i in range(len(prompts))]
    return errors(llm.generate(prompts, asked, lora_request=of_each, use_tqdm=False))


def adapters(gpu: PretendedGpu, tensors: Tensors | None = None, **arguments: Any) -> dict[str, Any]:
    """Requests of four adapters and of none, which take turns in three slots: their graphs, what was compiled for them,
    what is read into slots and how, and what steps of none and of some launch."""
    config = SMALL | {"num_key_value_heads": 8} | arguments.pop("config", {})
    llm = engine(config, tensors, **LORA | arguments)
    graphs = [Counter(launch.name for launch in graph.launches) for graph in gpu.graphs]
    known = set(gpu.kernels)
    with tempfile.TemporaryDirectory() as folder:
        loras = write_adapters(folder, config["vocab_size"])
        gpu.strict = True
        found: list[str] = []
        for together in (1, 3, 30):
            found += ask_adapters(llm, [1 + together % 3] * together, loras)
        found += ask_adapters(llm, [7] * 30, loras, logprobs=2, presence_penalty=1.0)
        found += ask_adapters(llm, [600, 30], loras[1:]) + ask_adapters(llm, [3] * 2, loras, prompt_logprobs=3)
        steps: dict[str, list[dict[str, int]]] = {}
        for kind, some in (("none", [None]), ("some", loras[:4])):
            found += ask_adapters(llm, [30] * 4, some)  # histories and pinned memory have grown, slots are full
            with noted_steps(gpu) as steps[kind]:
                found += ask_adapters(llm, [30] * 4, some, max_tokens=40)
    new = [f"{gpu.kernels[h].metadata.name} {gpu.kernels[h].src.constants}" for h in set(gpu.kernels) - known]
    return {
        "errors": found,
        "compiled while serving": new,
        "graphs": graphs,
        "steps": {kind: seen[8:-8] for kind, seen in steps.items()},
    }


def ranks_of_adapters(gpu: PretendedGpu) -> dict[str, Any]:
    """A rank of two, with adapters."""
    config = SMALL | {"num_key_value_heads": 8}
    with tempfile.TemporaryDirectory() as folder:
        loras = write_adapters(folder, config["vocab_size"])
        return as_ranks(
            gpu,
            lambda count: engine(config, tensor_parallel_size=count, max_num_batched_tokens=48, **LORA),
            lambda llm: ask_adapters(llm, [7] * 8, loras) + ask_adapters(llm, [40, 2], loras[3:], logprobs=2),
        )


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
    for length in (1, 2, 5, 8, 9):
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


def parts_off(gpu: PretendedGpu) -> dict[str, Any]:
    """The same requests with each word of OCTAVO_GPU_OFF: what shows that its part is on, and what is compiled."""
    found: dict[str, Any] = {}
    for word in ("", "pdl", "small-linear", "prompt-graphs", "captured-sampler", "exchange"):
        os.environ[gpu_parts.ENV] = word
        gpu_parts.parts_off.cache_clear()
        gpu.graphs.clear()
        gpu.kernels.clear()
        gpu.strict = False
        llm = engine(heads(8), max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, num_gpu_blocks_override=99)
        gpu.strict = True
        gpu.take_launches()
        wrong = ask(llm, [5], max_tokens=8)
        replays = sum(launch.name == "replay" for launch in gpu.take_launches())
        found[word] = {
            "errors": wrong,
            "pdl": any(kernel.metadata.launch_pdl for kernel in gpu.kernels.values()),
            "small-linear": any(kernel.metadata.name == "small_linear_kernel" for kernel in gpu.kernels.values()),
            "graphs": len(gpu.graphs),
            "replays": replays,
        }
    return found


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


def pooling(gpu: PretendedGpu) -> dict[str, Any]:
    """Texts of three lengths, pooled in every way, all of them and some: the shapes of the vectors."""
    lengths = torch.tensor([3, 1, 7])
    rows = StepRows(torch.ones(16, 8, device="cuda"), lengths.cumsum(0) - lengths, lengths)
    gpu.strict = True
    found = {}
    for kind, left_out in itertools.product(("cls", "last", "mean", "max", "weightedmean", "mean_sqrt_len"), (0, 2)):
        how: Any = SimpleNamespace(pooling=kind, left_out=left_out)
        found[f"{kind} {left_out}"] = [list(rows.pooled(texts, how).shape) for texts in ([0, 1, 2], [0, 2])]
    return {"shapes": found}


def ranks(gpu: PretendedGpu, config: dict[str, Any], size: int = 2, **arguments: Any) -> dict[str, Any]:
    """A rank of several: requests of many kinds, in batches of some sizes."""

    def make(count: int) -> LLM:
        return engine(config, max_model_len=2048, num_gpu_blocks_override=2000, tensor_parallel_size=count, **arguments)

    def use(llm: LLM) -> list[str]:
        found = ask(llm, [900])
        for together, params in zip((1, 3, 7, 20, 3, 2, 5, 1, 2, 3), SAMPLING[len(PARAMS) :], strict=True):
            prompts = [{"prompt_token_ids": [together] * (1 + 40 * (i % 3))} for i in range(together)]
            params = {"max_tokens": 6, "ignore_eos": True} | params
            found += errors(llm.generate(prompts, SamplingParams(**params), use_tqdm=False))
        return found

    return as_ranks(gpu, make, use, size)


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
    "gpt-oss": gpt_oss,
    "latents": latents,
    "drafts": drafts,
    **{f"images of {name}": lambda gpu, name=name: images(gpu, name) for name in IMAGE_READERS},
    "adapters": lambda gpu: adapters(gpu, max_num_batched_tokens=48),
    "adapters that guess": lambda gpu: adapters(gpu, max_num_batched_tokens=48, speculative_config=LOOKUP),
    "adapters of codes": lambda gpu: adapters(
        gpu, zeros_of(SMALL | {"num_key_value_heads": 8}, awq), config={"quantization_config": AWQ}, enforce_eager=True
    ),
    "adapters of fp8": lambda gpu: adapters(gpu, max_num_batched_tokens=48, quantization="fp8"),
    "ranks of adapters": ranks_of_adapters,
    **{f"drafts of {method}": lambda gpu, method=method: drafts(gpu, range(0, 8, 3), method) for method in DRAFTERS},
    "gemma 3n": lambda gpu: gemma(gpu, "Gemma3nForCausalLM", activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0]),
    "gemma 4": lambda gpu: gemma(gpu, "Gemma4ForCausalLM", global_head_dim=512),
    "experts in fp8": lambda gpu: experts(gpu, quantization="fp8"),
    "ranks": lambda gpu: ranks(gpu, QWEN3 | {"num_key_value_heads": 8}, max_num_seqs=16),
    "ranks that guess": lambda gpu: ranks(gpu, heads(1), 4, max_num_seqs=8, speculative_config=LOOKUP),
    "ranks of experts": lambda gpu: ranks(gpu, MIXTRAL, max_num_seqs=8, quantization="fp8"),
    "ranks of latents": lambda gpu: ranks(gpu, DEEPSEEK, max_num_seqs=8),
    "ranks of float16": lambda gpu: ranks(gpu, heads(8) | {"vocab_size": 4097}, max_num_seqs=8, dtype="float16"),
    "weights of a file": weights_of_a_file,
    "pooling": pooling,
    "parts off": parts_off,
    "plans": plans,
    "plans of codes": plans_of_codes,
    "what is noticed": what_is_noticed,
}

SECONDS = 600  # what a case may take

if __name__ == "__main__":
    for case in sys.argv[1:] or map(str.strip, sys.stdin):
        with tempfile.TemporaryFile("w+") as seen, tempfile.TemporaryFile("w+", errors="replace") as log:
            if (fork := os.fork()) == 0:
                signal.alarm(SECONDS)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                try:
                    with PretendedGpu().pretend() as gpu:
                        json.dump(CASES[case](gpu), seen)
                    seen.flush()
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            seen.seek(0)
            log.seek(0)
            print(json.dumps({"status": status, "log": log.read()} if status else json.load(seen)), flush=True)
