"""Mixtures of experts: what a dense model gives when its MLP is dealt to experts, formats of weights, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from support.emulated_tp import EmulatedTP
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of, model_config
from support.quantized_files import DYNAMIC_INT8, awq, compressed, gptq, quantize_checkpoint
from support.tiny_models import make_model

from octavo.errors import ConfigError, ModelError
from octavo.fetch.sources import resolve_model
from octavo.gguf.header import GGUFFile
from octavo.gguf.names import hf_name
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import ExpertsBase
from octavo.layers.quantization.checkpoint import CheckpointConfig
from octavo.layers.quantization.unquantized import UnquantizedConfig
from octavo.layers.weights import experts_apart
from octavo.loader.load_model import load_model
from octavo.loader.safetensors_reader import SafetensorsFile
from octavo.text.tokenizer import Tokenizer
from octavo_kernels import GroupWeight, ScaledWeight

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 60)], [7]]
LICENSE = Path(__file__).parents[3] / "LICENSE"
NUMBERS = (
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "rope.dimension_count",
)


def deal(source: GGUFFile, target: Path, experts: int) -> None:
    """The model with each MLP cut into experts, which all take part with equal weights: the very same codes, but for
    the scales of ups, which are multiplied by the number of experts, a power of two."""
    writer = GGUFWriter(target, "llama")
    metadata = source.metadata
    for key in NUMBERS:
        writer.add_uint32(f"llama.{key}", metadata[f"llama.{key}"])
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        writer.add_float32(f"llama.{key}", metadata[f"llama.{key}"])
    writer.add_feed_forward_length(metadata["llama.feed_forward_length"] // experts)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(experts)
    for info in source.tensors.values():
        raw, kind = source.raw(info), GGMLQuantizationType[info.qtype]
        name = info.name
        if ".ffn_" in name and "norm" not in name:
            part = name.split(".")[2]
            rows = raw.reshape(info.shape[0], -1)
            if part == "ffn_down":  # whole blocks of columns to each
                dealt = np.stack(np.split(rows, experts, axis=1))
            else:
                dealt = np.stack(np.split(rows, experts, axis=0))
            if part == "ffn_up":
                blocks = dealt.reshape(-1, info.block_bytes).copy()
                scales = blocks[:, :4].copy().view(np.float16)  # of Q4_1: scale and minimum
                blocks[:, :4] = (scales * np.float16(experts)).view(np.uint8)
                dealt = blocks.reshape(dealt.shape)
            writer.add_tensor(
                f"{name.removesuffix('.weight')}_exps.weight", np.ascontiguousarray(dealt), raw_dtype=kind
            )
        else:
            writer.add_tensor(name, raw if len(info.shape) > 1 else raw.view(np.float32).ravel(), raw_dtype=kind)
    for layer in range(metadata["llama.block_count"]):
        router = np.zeros((experts, metadata["llama.embedding_length"]), np.float32)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("experts", [pytest.param(2, marks=pytest.mark.long), 8])
def test_smollm2_dealt_to_experts_is_smollm2(experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real weights on real text: whatever is sorted, grouped or packed wrongly shows."""
    files = resolve_model(None, progress=False)
    deal(GGUFFile(files.weights[0]), tmp_path / "experts.gguf", experts)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    tokens = Tokenizer.from_files(files).encode(LICENSE.read_text()[:1200])[:200]
    exact, dealt = load(None), load(tmp_path / "experts.gguf")
    (expected,), (ours,) = (logits_of(model, [tokens], chunk=64) for model in (exact, dealt))
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    packed = load_model(replace(model_config(tmp_path / "experts.gguf"), quantization=None))
    (rounded,) = logits_of(packed, [tokens], chunk=64)
    assert {kind for kind in packed.weight_bytes_by_kind() if "experts" in kind} == {"int4 experts"}
    off = kl([rounded], [expected])
    if experts == 8:  # 3, 3 and 2 of them on three ranks
        ranks = EmulatedTP(3, lambda tp: load(tmp_path / "experts.gguf", "float32", tp, None), expert_parallel=True)
        (dealt,) = ranks.run(lambda model: logits_of(model, [tokens]))[2]
        assert kl([dealt], [expected]) < 5e-3, "no further from the exact weights' than one device may be"
        held = [model.weight_bytes_by_kind()["int4 experts"] for model in (*ranks.ranks, packed)]
        assert held == [held[3] * 3 // 8, held[3] * 3 // 8, held[3] // 4, held[3]]
    assert off < 5e-3 and (rounded.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


# ---- formats


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = FAMILY_CASES["qwen2-moe"][1] | {"hidden_size": 64, "moe_intermediate_size": 64}
    folder = tmp_path_factory.mktemp("moe")
    make_model(
        "Qwen2MoeConfig", settings | {"shared_expert_intermediate_size": 64, "intermediate_size": 64}
    ).save_pretrained(folder)
    return folder


def kl(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    p, q = torch.cat(theirs).log_softmax(-1), torch.cat(ours).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
W8A8 = compressed("int-quantized", num_bits=8, strategy="channel")
W8A8[1]["config_groups"]["group_0"]["input_activations"] = DYNAMIC_INT8
FORMATS: dict[str, Any] = {
    "awq": (awq(32), AWQ),
    "gptq": (gptq(), GPTQ),
    "W4A16": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "W8A8": W8A8,
    "W8A16 in whole rows": compressed("pack-quantized", num_bits=8, strategy="channel"),
    "FP8": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_checkpoints_of_experts(name: str, moe: Path, tmp_path: Path) -> None:
    folder = quantize_checkpoint(moe, tmp_path, *FORMATS[name])
    expected = logits_of(load(folder / "values"), TOKENS)
    assert kl(logits_of(load(folder), TOKENS), expected) == 0.0
    model = load_model(replace(model_config(folder), quantization=None))
    bits = "8" if "8" in name else "4"
    assert model.weight_bytes_by_kind().get(f"int{bits} experts")
    at_once = logits_of(model, TOKENS)
    assert kl(at_once, expected) < 5e-3
    for tokens, logits in zip(TOKENS, at_once, strict=True):
        assert torch.equal(logits_of(model, [tokens])[0], logits), "in any company"


@pytest.mark.parametrize("name", ["W8A8", "W8A16 in whole rows"])
def test_a_gpu_computes_on_the_experts_codes(
    name: str, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activations of 8 bits where the checkpoint asks for these, else with those of the model's dtype; here
    multiplied by plain torch."""
    folder = quantize_checkpoint(moe, tmp_path, *FORMATS[name])
    config = model_config(folder, "float16")
    with pytest.raises(ConfigError, match=r"float16 on a CPU; use --dtype bfloat16"):
        load_model(config)
    plain = load(folder / "values", "float16")
    expected = logits_of(plain, TOKENS)
    before = CheckpointConfig.__init__
    monkeypatch.setattr(CheckpointConfig, "__init__", lambda *args: before(*args[:5], UnquantizedConfig(), True))
    model = load_model(config)
    experts = [module.method.held for module in model.modules() if isinstance(module, ExpertsBase)]
    held = [weight.weight for layer in experts for weight in (layer.gate_up, layer.down)]
    assert len(held) == 2 * model.config.num_layers
    if name == "W8A8":
        assert all(isinstance(weight, ScaledWeight) and weight.values.dtype == torch.int8 for weight in held)
        off = kl(logits_of(model, TOKENS), expected)
        assert 1e-9 < off < 5e-3, "some of it is lost with the activations' bits, and little"
    else:
        assert all(isinstance(weight, GroupWeight) and weight.form == "int8" for weight in held)
        # oneDNN adds in another order where a CPU has float16 products of its own.
        with torch.backends.mkldnn.flags(enabled=False):
            theirs, ours = (torch.cat(logits_of(one, TOKENS)) for one in (plain, model))
        same = (ours - theirs).abs().amax(-1) <= 2e-3 * theirs.abs().max()
        assert same.float().mean() > 0.95, "but for a token whose choice of experts is one of float16's rounding"


def test_act_order_is_refused_by_name_where_there_is_no_kernel(moe: Path, tmp_path: Path) -> None:
    folder = quantize_checkpoint(moe, tmp_path, gptq(act_order=True), GPTQ | {"desc_act": True})
    with pytest.raises(ModelError, match=r"experts.*act order.*--quantization none"):
        load_model(replace(model_config(folder), quantization=None))
    assert kl(logits_of(load(folder), TOKENS), logits_of(load(folder / "values"), TOKENS)) == 0.0


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float16", "none"), ("float32", "int8")])
def test_shorter_weights_are_close_and_keep_their_bits_in_any_company(dtype: str, quantization: str, moe: Path) -> None:
    exact = logits_of(load(moe), TOKENS)
    model = load_model(replace(model_config(moe, dtype), quantization=quantization))
    ours = logits_of(model, TOKENS)
    assert kl(ours, exact) < 2e-2
    if dtype != "float16":  # which torch multiplies
        assert torch.equal(logits_of(model, TOKENS[:1])[0], ours[0])
        assert torch.equal(logits_of(model, TOKENS[:1], chunk=5)[0], ours[0])


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe", "granite-moe-shared"])
def test_tensors_of_all_experts_and_of_each_are_one_model(case: str, tmp_path: Path) -> None:
    """transformers 5 holds them stacked, and saves most of them one by one; GGUF is read stacked."""
    make_model(*FAMILY_CASES[case]).save_pretrained(tmp_path)
    expected = logits_of(load(tmp_path), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    stacked: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        head, _, rest = name.partition(".experts.")
        number, part, *leaf = rest.split(".")
        if leaf:
            stacked.setdefault(head, {}).setdefault(int(number), {})[names.get(part, part)] = tensors.pop(name)
    for head, experts in stacked.items():
        both = [torch.cat([experts[e]["gate_proj"], experts[e]["up_proj"]]) for e in sorted(experts)]
        tensors[f"{head}.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{head}.experts.down_proj"] = torch.stack([experts[e]["down_proj"] for e in sorted(experts)])
    save_file(tensors, tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(logits_of(load(tmp_path), TOKENS), expected, strict=True))


def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a layer may be larger than everything else."""
    values = torch.randn(4, 6, 8)
    save_file({"m.experts.gate_up_proj": values}, tmp_path / "x.safetensors")
    (source,) = SafetensorsFile(tmp_path / "x.safetensors").sources()
    read: list[int] = []
    import octavo.loader.safetensors_reader as reader

    plain = reader.read_into
    monkeypatch.setattr(reader, "read_into", lambda to, *rest: (read.append(len(to)), plain(to, *rest)))
    apart = dict(experts_apart(source.name, source))
    assert sorted(apart) == [f"m.experts.{e}.{part}_proj.weight" for e in range(4) for part in ("gate", "up")]
    assert torch.equal(apart["m.experts.2.up_proj.weight"].load(), values[2, 3:])
    assert torch.equal(
        next(iter(apart["m.experts.3.gate_proj.weight"].pieces(torch.float32, slice(1, 3)))), values[3, 1:3]
    )
    assert sum(read) == 3 * 8 * 4 + 2 * 8 * 4
    turned = dict(experts_apart(source.name, source, transposed=6, interleaved=True))
    assert torch.equal(turned["m.experts.1.up_proj.weight"].load(), values[1].T[1::2])


# ---- bad input


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


EXPERT = "model.layers.0.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, f"lacks tensor '{EXPERT}'"),
        (torch.zeros(48, 7), r"shape \[48, 7\].*\[48, 20\]"),
        (torch.full((48, 20), torch.nan), "NaN"),
    ],
)
def test_an_experts_tensor_that_cannot_be_is_named(tensor: torch.Tensor | None, said: str, tmp_path: Path) -> None:
    make_model(*FAMILY_CASES["qwen3-moe"]).save_pretrained(tmp_path)
    change(tmp_path, EXPERT, tensor)
    with pytest.raises(ModelError, match=said) as error:
        load(tmp_path)
    assert "experts.2.down_proj" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\).*experts \(6\)"),
        ({"num_experts": 0}, "num_experts"),
        ({"moe_intermediate_size": "many"}, "moe_intermediate_size"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_numbers_of_experts_that_cannot_be_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_model(*FAMILY_CASES["qwen3-moe"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in changes:
        config.pop({"num_experts": "num_local_experts"}.get(key, key), None)
    path.write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=said) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_experts_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_model("MixtralConfig", FAMILY_CASES["mixtral"][1] | {"intermediate_size": 81}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"inner size \(81\).* 2 ranks"):
        load(tmp_path, tp=TensorParallel(0, 2))


def test_mixtrals_first_gguf_files_name_each_expert() -> None:
    assert hf_name("blk.3.ffn_down.5.weight", "llama") == "model.layers.3.mlp.experts.5.down_proj.weight"
