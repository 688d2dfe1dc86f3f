"""Files of families other than Llama, laid out as llama.cpp's converter does: the logits of transformers.

That llama.cpp itself reads them so is in test_llama_cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import gguf_families
from support.emulated_tp import EmulatedTP
from support.gguf_families import LAYOUTS, write_family
from support.paged import load, logits_of

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.gguf.weights import gguf_weights
from octavo.loader import load_model

TOKENS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 60)], [7]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    reference = LAYOUTS[layout].model()
    write_family(tmp_path / "m.gguf", reference, LAYOUTS[layout])
    for tokens, ours in zip(TOKENS, logits_of(load(tmp_path / "m.gguf"), TOKENS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(
    ("layout", "key", "value", "said"),
    [
        ("mixtral", "expert_count", 5, "num_experts is 5, the checkpoint has 4"),
        ("mixtral", "expert_used_count", 7, "llama.expert_used_count (7) must be at most llama.expert_count (4)"),
        ("qwen3moe", "expert_count", 1 << 20, "qwen3moe.expert_count"),
        ("qwen3moe", "expert_feed_forward_length", 40, "'blk.0.ffn_gate_exps.weight[0]' has shape [20, 48]"),
        ("granite", "attention.head_count", 8, "'blk.0.attn_q.weight' has shape [48, 48]"),
        ("granite", "attention.head_count_kv", 4, "'blk.0.attn_k.weight' has shape [24, 48]"),
        ("granite", "embedding_length", 64, "'token_embd.weight' has shape [320, 48]"),
        ("granite", "block_count", 3, "num_hidden_layers is 3, the checkpoint has 2"),
        ("granite", "block_count", 1, "no place for 9 tensors"),
        ("glm4", "rope.dimension_count", 64, "glm4.rope.dimension_count"),
        ("deepseek3", "attention.kv_lora_rank", 32, "'blk.0.attn_kv_a_mqa.weight' has shape [32, 48]"),
        ("deepseek3", "expert_group_count", 3, "n_group (3)"),
        ("qwen35", "ssm.inner_size", 80, "qwen35.ssm.inner_size (80) must be qwen35.ssm.time_step_rank (4) heads"),
        ("qwen35", "ssm.group_count", 3, "qwen35.ssm.group_count (3) must divide qwen35.ssm.time_step_rank (4)"),
        ("qwen35", "ssm.conv_kernel", 99, "qwen35.ssm.conv_kernel"),
        ("qwen35", "ssm.conv_kernel", 3, "'blk.0.ssm_conv1d.weight' has shape [128, 4]"),
        ("qwen35-thrice", "attention.recurrent_layers", [True, True], "an entry for each of 4 layers"),
        ("lfm2", "attention.head_count_kv", [0, 2], "an entry for each of 4 layers"),
        ("lfm2", "attention.head_count_kv", [0, 1, 2, 0], "an entry for each of 4 layers"),
        ("granitehybrid", "ssm.group_count", 4, "granitehybrid.ssm.group_count (4) must divide granitehybrid.ssm.time"),
        ("granitehybrid", "ssm.state_size", 20, "granitehybrid.ssm.state_size must be a multiple of 8"),
        ("granitehybrid", "ssm.conv_kernel", 3, "'blk.0.ssm_conv1d.weight' has shape [160, 4]"),
        ("granitehybrid", "ssm.inner_size", 100, "ssm.inner_size (100) must be a multiple of"),
        ("falcon-h1", "ssm.inner_size", 100, "falcon-h1.ssm.inner_size (100) must be a multiple of"),
        ("nemotron_h", "feed_forward_length", [0, 80], "an entry for each of 6 layers"),
        ("lfm2", "shortconv.l_cache", 99, "lfm2.shortconv.l_cache"),
        ("lfm2", "shortconv.l_cache", 4, "'blk.0.shortconv.conv.weight' has shape [48, 3]"),
        ("lfm2moe", "leading_dense_block_count", -1, "lfm2moe.leading_dense_block_count"),
        ("qwen35moe", "expert_shared_feed_forward_length", 40, "'blk.0.ffn_gate_shexp.weight' has shape [36, 48]"),
    ],
)
def test_metadata_that_tensors_contradict_are_named_in_one_line_before_a_tensor_is_read(
    layout: str, key: str, value: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_model, "fill", lambda taken: pytest.fail("tensors are read"))
    file = replace(LAYOUTS[layout], metadata={**LAYOUTS[layout].metadata, key: value})
    write_family(tmp_path / "m.gguf", file.model(), file)
    with pytest.raises(ModelError) as caught:
        load(tmp_path / "m.gguf")
    line = str(caught.value)
    assert said in line and "\n" not in line and "config.json" not in line
    assert any(way_out in line for way_out in ("not of one model", "correct the file", "converted wrongly")), line


@pytest.mark.parametrize("layout", ["qwen35-thrice", "qwen35moe", "lfm2", "granitehybrid"])
def test_value_heads_in_the_files_order_are_dealt_to_ranks(layout: str, tmp_path: Path) -> None:
    write_family(tmp_path / "m.gguf", LAYOUTS[layout].model(), LAYOUTS[layout])
    expected = logits_of(load(tmp_path / "m.gguf"), TOKENS)
    for logits in EmulatedTP(2, lambda tp: load(tmp_path / "m.gguf", tp=tp)).run(
        lambda model: logits_of(model, TOKENS)
    ):
        for ours, whole in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-4)


def test_a_hybrids_steps_are_recorded(tmp_path: Path) -> None:
    """With experts, and with results that are brought into the file's order before they are multiplied."""
    reference = LAYOUTS["qwen35moe"].model()
    write_family(tmp_path / "m.gguf", reference, LAYOUTS["qwen35moe"])
    options: dict[str, Any] = {"dtype": "float32", "quantization": "none", "skip_tokenizer_init": True}
    llm = LLM(str(tmp_path / "m.gguf"), max_model_len=80, num_gpu_blocks_override=64, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": TOKENS[0]}], params, use_tqdm=False)
    answer = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([TOKENS[0] + answer])).logits[0, len(TOKENS[0]) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert len(answer) == 24 and (logits.max(dim=-1).values - chosen).max() < 1e-4
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    assert runner.device_runner.recorded_steps.can_record


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("expert_gating_func", 3, "expert_gating_func must be 1"),
        ("rope.dimension_count", 24, "rope.dimension_count"),
        ("attention.kv_lora_rank", 0, "attention.kv_lora_rank"),
        ("attention.value_length_mla", "12", "attention.value_length_mla"),
        ("attention.value_length_mla", 13, "of one model"),
    ],
)
def test_sizes_of_latents_that_cannot_be_are_refused(key: str, value: object, said: str, tmp_path: Path) -> None:
    layout = LAYOUTS["deepseek3"]
    write_family(tmp_path / "m.gguf", layout.model(), replace(layout, metadata=layout.metadata | {key: value}))
    with pytest.raises(ModelError) as error:
        load(tmp_path / "m.gguf")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_keys_and_values_of_latents_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gguf_families._parts

    def without_values(*arguments: Any) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, rows) for name, rows in plain(*arguments) if name != "attn_v_b")

    monkeypatch.setattr(gguf_families, "_parts", without_values)
    write_family(tmp_path / "m.gguf", LAYOUTS["deepseek3"].model(), LAYOUTS["deepseek3"])
    with pytest.raises(ModelError, match=r"kv_b_proj.*attn_k_b \[4, 24, 16\].*attn_v_b"):
        load(tmp_path / "m.gguf")


def test_a_part_of_a_latent_projection_is_that_part(tmp_path: Path) -> None:
    write_family(tmp_path / "m.gguf", LAYOUTS["deepseek3"].model(), LAYOUTS["deepseek3"])
    source = dict(gguf_weights(tmp_path / "m.gguf"))["model.layers.0.self_attn.kv_b_proj.weight"]
    whole = source.load()
    assert source.shape == (112, 24) == tuple(whole.shape)
    part = source[20:60]
    assert part.shape == (40, 24) and torch.equal(part.load(), whole[20:60])
    assert torch.equal(part[3:5].load(), whole[23:25]) and torch.equal(part[7].load(), whole[27])
    (piece,) = source.pieces(torch.float32, slice(4, 9))
    assert torch.equal(piece, whole[4:9])
