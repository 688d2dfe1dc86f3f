"""Two ranks that each hold half of the weights give what one that holds all gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.family_cases import FAMILY_CASES, FIRST_CASES
from support.internlm import save_internlm2, save_internlm3
from support.paged import load, logits_of
from support.tiny_models import make_model

from octavo.errors import ConfigError
from octavo.layers.parallel import TensorParallel

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80], [320, 0, 5]]
# Halves of these sizes need no padding in the kernels' own order.
SMALL: dict[str, Any] = {
    "vocab_size": 321, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("LlamaConfig", SMALL | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "one-kv-head": ("Qwen3Config", SMALL | {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "experts": (
        "Qwen2MoeConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "sinks": (
        "GptOssConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
        },
    ),
    "latents": (
        "DeepseekV3Config",
        SMALL
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "qk_nope_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "opt": ("OPTConfig", SMALL | {"ffn_dim": 192, "do_layer_norm_before": False, "word_embed_proj_dim": 64}),
}
# Beside those the first case of each architecture, with sizes of which two ranks hold half each.
WIDE = SMALL | {
    "n_embd": 128, "ffn_dim": 192, "shared_intermediate_size": 192, "n_inner": 192, "head_dim": 32, "n_head": 4,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
ONE_DEVICE = {"Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"}
FAMILIES = {
    name: (FAMILY_CASES[case][0], FAMILY_CASES[case][1] | {k: v for k, v in WIDE.items() if k in FAMILY_CASES[case][1]})
    for name, case in FIRST_CASES.items()
}
INTERNLM = {"InternLM2ForCausalLM": save_internlm2, "InternLM3ForCausalLM": save_internlm3}
RANK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import save_file
from support.paged import load, logits_of
from octavo.layers.parallel import TensorParallel
rank, root, tokens = int(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
for case in sys.argv[4:]:
    model = load(root / case, tp=TensorParallel(rank, 2))
    logits = logits_of(model, tokens)
    size = sum(n for kind, n in model.weight_bytes_by_kind().items() if kind != "tables")
    save_file({str(i): t for i, t in enumerate(logits)} | {"size": torch.tensor(size)}, root / f"{case}-{rank}.out")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    cases = [*CASES, *INTERNLM, *(name for name in FAMILIES if name not in ONE_DEVICE)]
    for case, (config_class, settings) in (CASES | FAMILIES).items():
        make_model(config_class, settings).save_pretrained(tmp_path / case)
    for name, save in INTERNLM.items():
        save(tmp_path / name, SMALL | {"num_key_value_heads": 2})
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path), repr(TOKENS), *cases], env=env)
        for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for case in cases:
        model = load(tmp_path / case)
        whole = sum(n for kind, n in model.weight_bytes_by_kind().items() if kind != "tables")
        expected = logits_of(model, TOKENS)
        for rank in (0, 1):
            out = load_file(tmp_path / f"{case}-{rank}.out")
            assert out.pop("size") < 0.65 * whole, f"each rank of {case} holds about half"
            for i, logits in enumerate(expected):
                off = (out[str(i)] - logits).abs()
                assert (off <= 1e-4 + 1e-5 * logits.abs()).all(), f"rank {rank} of {case}: {off.max()}"


@pytest.mark.parametrize("name", sorted(ONE_DEVICE))
def test_what_cannot_be_split_is_refused(name: str, tmp_path: Path) -> None:
    make_model(*FAMILIES[name]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="use one device"):
        load(tmp_path, tp=TensorParallel(0, 2))


@pytest.mark.parametrize("size", [3, 8])
def test_a_size_that_does_not_divide_the_heads_is_refused(size: int, tmp_path: Path) -> None:
    make_model(*CASES["biases"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"num_attention_heads \(4\).* {size} ranks"):
        load(tmp_path, tp=TensorParallel(0, size))
