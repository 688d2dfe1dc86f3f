"""Ranks that each hold some of a layer's experts whole give what one that holds all gives."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulated_tp import EmulatedTP
from support.family_cases import FAMILY_CASES
from support.paged import load, logits_of, model_config
from support.quantized_files import awq, compressed, fp8, gptq, mxfp4, quantize_checkpoint
from support.tiny_models import make_model
from torch import Tensor

from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError
from octavo.interface.ranks import deal
from octavo.layers.parallel import Replicas, TensorParallel
from octavo.layers.quantization.base import ExpertsBase
from octavo.loader import load_model as loading
from octavo_kernels.cpu import SharedMemory, create_shared_memory

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [7]]
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
SPARSE = [name for name, (_, settings) in FAMILY_CASES.items() if any(settings.get(count) for count in COUNTS)]
FIRST = {FAMILY_CASES[name][0]: name for name in reversed(SPARSE)}  # of each family
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
FORMATS: dict[str, Any] = {
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq(), GPTQ),
    "W4A16": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "W8A8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8 in blocks": (
        fp8("block", (64, 64), "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
    ),
    "mxfp4": (mxfp4(), {"quant_method": "mxfp4"}),
}


def expert_bytes(model: Any) -> int:
    return sum(count for kind, count in model.weight_bytes_by_kind().items() if kind.endswith(" experts"))


def check(path: Path, quantization: str | None, limit: float) -> None:
    """All ranks have the same logits, nearly those of one, and each expert is on one of them."""
    whole = load(path, "float32", None, quantization)
    emulated = EmulatedTP(2, lambda tp: load(path, "float32", tp, quantization), expert_parallel=True)
    found = emulated.run(lambda model: logits_of(model, TOKENS))
    for ours, theirs, alone in zip(found[0], found[-1], logits_of(whole, TOKENS), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours - alone).abs().max() <= limit * max(1.0, alone.abs().max().item())
    assert sum(map(expert_bytes, emulated.ranks)) == expert_bytes(whole)
    assert max(map(expert_bytes, emulated.ranks)) < expert_bytes(whole)


@pytest.mark.parametrize(
    "case", [case if case in FIRST.values() else pytest.param(case, marks=pytest.mark.long) for case in SPARSE]
)
def test_two_ranks_with_whole_experts_give_the_logits_of_one(case: str, tmp_path: Path) -> None:
    """Of every family with experts: shared ones, groups, biases, weights of inputs; OLMoE's five are 3 and 2."""
    config_class, settings = FAMILY_CASES[case]
    if settings.get("mamba_n_groups") == 1:  # one group of heads is not divided among ranks
        settings = settings | {"mamba_n_groups": 2, "mamba_n_heads": 4}
    make_model(config_class, settings).save_pretrained(tmp_path)
    check(tmp_path, "none", 1e-4)


@pytest.mark.parametrize(
    "case", [case if case in FIRST.values() else pytest.param(case, marks=pytest.mark.long) for case in SPARSE]
)
def test_engines_that_share_experts_give_the_logits_of_one(case: str, tmp_path: Path) -> None:
    """Each of sequences of its own, and one of them alone while the other has none; each expert is at one of them."""
    make_model(*FAMILY_CASES[case]).save_pretrained(tmp_path)
    whole, descriptor = load(tmp_path), create_shared_memory(2, 60.0, has_cores=False)
    memories = [SharedMemory(descriptor, rank, 2) for rank in range(2)]
    os.close(descriptor)
    replicas = [Replicas(rank, 2, memory) for rank, memory in enumerate(memories)]
    models = [load(tmp_path, tp=TensorParallel(expert_parallel=True, replicas=one)) for one in replicas]
    assert sum(map(expert_bytes, models)) == expert_bytes(whole) > max(map(expert_bytes, models))
    found: dict[tuple[int, int], list[Tensor]] = {}

    def work(rank: int) -> None:
        for turn, texts in enumerate(((TOKENS, TOKENS[1:]), (TOKENS[1:], []), ([], TOKENS))):
            replicas[rank].set_rows([sum(map(len, text)) for text in texts])
            if texts[rank]:
                found[turn, rank] = logits_of(models[rank], texts[rank])
            else:
                models[rank].serve_others()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = logits_of(whole, TOKENS)
    expected = {(0, 0): [first, second], (0, 1): [second], (1, 0): [second], (2, 1): [first, second]}
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        for ours, theirs in zip(found[key], logits, strict=True):
            assert (ours - theirs).abs().max() <= 1e-4 * max(1.0, theirs.abs().max().item())


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize("name", [*FORMATS, "int8"])
def test_ranks_hold_whole_experts_in_the_checkpoints_codes(name: str, tmp_path: Path) -> None:
    """In the very codes of one rank. Only the order of sums differs, and what it rounds otherwise."""
    settings = FAMILY_CASES["qwen3-moe"][1] | {
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "num_experts": 4,
    }
    make_model("Qwen3MoeConfig", settings).save_pretrained(tmp_path / "plain")
    if name == "int8":
        return check(tmp_path / "plain", "int8", 2e-2)
    folder = quantize_checkpoint(tmp_path / "plain", tmp_path / "m", *FORMATS[name])
    check(folder, "none", 1e-4)
    return check(folder, None, 2e-2)


def test_experts_that_cannot_be_cut_can_be_dealt_whole(tmp_path: Path) -> None:
    """81 columns of an expert."""
    make_model("MixtralConfig", FAMILY_CASES["mixtral"][1] | {"intermediate_size": 81}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"inner size \(81\).* 2 ranks"):
        load(tmp_path, tp=TensorParallel(0, 2))
    check(tmp_path, "none", 1e-4)


def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other tensor is missed: an expert that no rank has is refused as before."""
    make_model(*FAMILY_CASES["olmoe"]).save_pretrained(tmp_path)
    read: list[str] = []
    fill = loading.fill
    monkeypatch.setattr(loading, "fill", lambda taken: (read.extend(source.name for _, source in taken), fill(taken)))
    config = model_config(tmp_path)
    for rank, own in enumerate(([0, 1, 2], [3, 4])):
        read.clear()
        model = loading.load_model(config, tp=TensorParallel(rank, 2, expert_parallel=True))
        assert all(list(module.numbers) == own for module in model.modules() if isinstance(module, ExpertsBase))
        numbers = {int(name.split(".experts.")[1].split(".")[0].split("[")[0]) for name in read if ".experts." in name}
        assert numbers == set(own)
    fewer = replace(config, hf_config=config.hf_config | {"num_experts": 4})
    for experts in (True, False):
        with pytest.raises(ModelError, match=r"experts.4|num_experts is 4"):
            loading.load_model(fewer, tp=TensorParallel(1, 2, expert_parallel=experts))


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (5, 2), (7, 3), (3, 3)])
def test_every_expert_is_dealt_once(experts: int, ranks: int) -> None:
    """In order, and nearly as many to each; the first rank, which is planned for, has no fewer than another."""
    dealt = [deal(experts, rank, ranks) for rank in range(ranks)]
    assert [number for own in dealt for number in own] == list(range(experts))
    assert len(dealt[0]) == -(-experts // ranks) and min(map(len, dealt)) >= experts // ranks


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        ("llama", {}, r"enable_expert_parallel: .* has no experts; leave it out"),
        ("few", {"tensor_parallel_size": 4}, r"3 experts cannot be dealt to 4 ranks; give at most 3"),
    ],
)
def test_experts_that_cannot_be_dealt_are_refused(
    case: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    few = ("MixtralConfig", FAMILY_CASES["mixtral"][1] | {"num_local_experts": 3})
    llama = ("LlamaConfig", FAMILY_CASES["mixtral"][1])
    make_model(*({"few": few, "llama": llama}.get(case) or FAMILY_CASES[case])).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said) as error:
        EngineArgs(model=str(tmp_path), enable_expert_parallel=True, **options).create_engine_config(progress=False)
    assert "\n" not in str(error.value)


def test_rows_without_an_expert_here_add_nothing(tmp_path: Path) -> None:
    """A rank's part of a sum is zero in a row whose experts others have."""
    make_model(*FAMILY_CASES["mixtral"]).save_pretrained(tmp_path)
    model = load(tmp_path, tp=TensorParallel(1, 2, expert_parallel=True))
    layer = next(module for module in model.modules() if isinstance(module, ExpertsBase))
    x = torch.randn(6, 48)
    ids = torch.tensor([[-2, -1], [0, 1], [-1, 0], [2, 5], [1, -2], [-2, 7]], dtype=torch.int32)
    weights = torch.rand(6, 2)
    part: Tensor = layer.method.apply(layer, x, ids, weights, None, None)
    assert part.dtype == torch.float32 and (part.abs().amax(1) > 0).tolist() == [False, True, True, False, True, False]
    for row in range(6):
        one = slice(row, row + 1)
        assert torch.equal(layer.method.apply(layer, x[one], ids[one], weights[one], None, None), part[one])
