"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them: ``blk.0.attn_q.weight.lora_a``
[R, K] and ``.lora_b`` [N, R], with the rows of B where the base model's file has those of its weight."""

from __future__ import annotations

import re
from collections.abc import Iterator

from octavo.errors import ModelError
from octavo.gguf.families import INTERLEAVED, layout_of
from octavo.gguf.header import GGUFFile, TensorInfo
from octavo.gguf.names import hf_name
from octavo.gguf.weights import GGUFWeight
from octavo.layers.weights import Transposed, WeightSource
from octavo.loader.matrices import Matrices

_FLOATS = ("F32", "F16", "BF16")


def gguf_matrices(file: GGUFFile, heads: int, kv_heads: int, max_rank: int) -> Iterator[Matrices]:
    """The file's pairs, unread, for a model with so many heads. Raises ModelError for what is not a LoRA adapter."""
    kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise ModelError(f"{file.path} is not a LoRA adapter: general.type and adapter.type are {kind}")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise ModelError(f"{file.path}: adapter.lora.alpha must be a number, got {alpha!r:.80}")
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in file.tensors.items():
        base, _, matrix = name.rpartition(".lora_")
        if not base or matrix not in ("a", "b") or len(info.shape) != 2 or info.qtype not in _FLOATS:
            raise ModelError(f"{file.path}: tensor {name[:200]!r} is not a matrix of LoRA in floats")
        pairs.setdefault(base, {})[matrix] = info
    for base, pair in pairs.items():
        weight = hf_name(base, layout_of(file))
        if weight is None or not weight.endswith(".weight"):
            raise ModelError(f"{file.path}: tensor {base[:200]!r} is not part of architecture {file.architecture!r}")
        if len(pair) != 2:
            raise ModelError(f"{file.path}: {base!r} has A or B alone")
        module, of_embedding = weight.removesuffix(".weight"), base == "token_embd.weight"
        turned = None
        if file.architecture in INTERLEAVED and (match := re.search(r"\.([qk])_proj$", module)):
            turned = heads if match[1] == "q" else kv_heads
        a: WeightSource = GGUFWeight(pair["a"].name, file, pair["a"], None)
        b = GGUFWeight(pair["b"].name, file, pair["b"], turned)
        rank = b.shape[1]
        if of_embedding and a.shape[1] == rank:  # stored by id
            a = Transposed(a)
        if a.shape[0] != rank or (turned and b.shape[0] % (2 * turned)):
            raise ModelError(
                f"{file.path}: A {list(a.shape)} and B {list(b.shape)} of {base!r} are not [rank, inputs] and "
                "[outputs, rank]"
            )
        if rank > max_rank:
            raise ModelError(f"{file.path}: rank {rank} is above max_lora_rank ({max_rank}); raise --max-lora-rank")
        yield Matrices(module, a, b, alpha / rank if alpha else 1.0, of_embedding)
