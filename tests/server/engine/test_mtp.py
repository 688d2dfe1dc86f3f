"""A checkpoint's layer for multi-token prediction guesses as the description says, and changes no token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_cases import FAMILY_CASES
from support.overlapped import PARAMS, overlapped, prompts_of, tiny
from support.quantized_files import fp8, quantize_checkpoint
from support.speculation import all_of
from support.tiny_models import make_model
from torch import Tensor
from transformers import PreTrainedModel

from octavo import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError
from octavo.plan.measure import measure
from octavo.worker.memory import this_machine
from octavo.worker.memory_plan import make_plan
from octavo.worker.model_runner import ModelRunner

FAMILIES = {"deepseek-v3": "model.layers.2.", "glm4-moe": "model.layers.2."}


class Oracle(torch.nn.Module):
    """The layer behind the last one, in plain torch with transformers' decoder layer in it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        *layers, last = model.model.layers
        self.layer, self.main = last, model.model
        self.main.layers = torch.nn.ModuleList(layers)
        vocab, size = model.lm_head.weight.shape
        self.eps = model.config.rms_norm_eps
        draw = torch.Generator().manual_seed(5)
        self.tensors = {
            name: torch.randn(*shape, generator=draw) * 0.4
            for name, shape in {
                "eh_proj": (size, 2 * size), "shared_head.head": (vocab, size), "embed_tokens": (vocab, size),
            }.items()
        }  # fmt: skip
        self.tensors |= {n: torch.rand(size, generator=draw) + 0.5 for n in ("enorm", "hnorm", "shared_head.norm")}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.tensors[name]

    @torch.inference_mode()
    def guesses(self, tokens: list[int], k: int) -> list[int]:
        """The most probable tokens after ``tokens``, guess after guess."""
        before = self.main(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        tokens, found = list(tokens), list[int]()
        for _ in range(k):
            embedded = self.norm(self.tensors["embed_tokens"][tokens[1:]], "enorm")
            x = torch.cat([embedded, self.norm(before, "hnorm")], -1) @ self.tensors["eh_proj"].T
            count = len(x)
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            places = torch.arange(count)[None]
            turned = self.main.rotary_emb(x[None], places)
            out = self.layer(x[None], attention_mask=mask, position_ids=places, position_embeddings=turned)
            state = (out[0] if isinstance(out, tuple) else out)[0]
            logits = self.norm(state[-1], "shared_head.norm") @ self.tensors["shared_head.head"].T
            found.append(int(logits.argmax()))
            tokens.append(found[-1])
            before = torch.cat([before, state[-1:]])
        return found


def checkpoint(family: str, folder: Path) -> Oracle:
    """Write one with such a layer."""
    kind, settings = FAMILY_CASES[family]
    model = make_model(kind, settings | {"num_hidden_layers": 3})
    model.save_pretrained(folder)
    oracle, tensors = Oracle(model), load_file(folder / "model.safetensors")
    tensors |= {f"{FAMILIES[family]}{name}.weight": tensor for name, tensor in oracle.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    config.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return oracle


@pytest.mark.parametrize("family", FAMILIES)
def test_it_guesses_as_described_and_changes_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, k = checkpoint(family, tmp_path), 3
    config = {"method": "mtp", "num_speculative_tokens": k}
    changes: dict[str, Any] = {"quantization": "none", "max_num_batched_tokens": 48, "max_num_seqs": 32}
    llm, plain = tiny(tmp_path, speculative_config=config, **changes), tiny(tmp_path, **changes)
    scheduler, runner = llm.engine.scheduler, llm.engine.executor.worker.runner
    assert isinstance(scheduler, Scheduler) and scheduler._drafts is not None and isinstance(runner, ModelRunner)
    scheduler._drafts._lengths = None  # it guesses wherever there is room
    prompts = prompts_of(family, len(PARAMS))
    params = [SamplingParams(**values) for values in PARAMS]
    made, propose = list[tuple[list[int], list[int]]](), runner.drafter.propose

    def watched(*args: Any) -> dict[str, list[int]]:
        drafts = propose(*args)
        for req_id, guessed in drafts.items():
            row = runner.requests.batch.row_of[req_id]
            known = runner.requests.batch.num_computed[row] + 1
            made.append((runner.requests.batch.token_ids[row, :known].tolist(), guessed))
        return drafts

    monkeypatch.setattr(runner.drafter, "propose", watched)
    expected = all_of(plain.generate(prompts, params, use_tqdm=False))
    assert all_of(llm.generate(prompts, params, use_tqdm=False)) == expected
    llm.engine.check_integrity()
    worker, config = llm.engine.executor.worker, replace(llm.config, device="cpu")
    plan = make_plan(config, this_machine(), measure)
    assert plan.ledger is not None and plan.ledger.shares() == worker.ledger.shares() and worker.ledger.drafter > 0
    assert llm.reset_prefix_cache()  # the state before a cached prefix's end was made with what followed there
    made.clear()
    greedy = [SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)]
    long = [{"prompt_token_ids": (prompts[1]["prompt_token_ids"] + list(range(60, 150)))[:100]}]  # chunks
    expected = all_of(plain.generate(long, greedy, use_tqdm=False))
    for _ in range(2):  # then with a cached prefix
        assert all_of(llm.generate(long, greedy, use_tqdm=False)) == expected
    assert len(made) >= 8
    for tokens, guessed in made:
        assert guessed == oracle.guesses(tokens, len(guessed))
    assert any(len(guessed) == k for _, guessed in made)


@pytest.mark.parametrize("joined", [False, True], ids=["eh_proj plain", "all"])
def test_a_layer_in_fp8_blocks_guesses_as_its_values_do(joined: bool, tmp_path: Path) -> None:
    """As DeepSeek V3 is released, with ``eh_proj`` in its own type, and wholly quantized."""
    checkpoint("deepseek-v3", tmp_path / "plain")
    write = fp8("block", (16, 16), "weight_scale_inv")
    description = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    writers: dict[str, Any] = {"_proj": write} if joined else {"eh_proj": None, "_proj": write}
    folder = quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", writers, description)
    prompts, params = prompts_of("fp8", 3), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    seen = []
    for path in (folder, folder / "values"):
        llm = tiny(path, quantization="none", speculative_config={"method": "mtp", "num_speculative_tokens": 2})
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, Scheduler) and scheduler._drafts is not None
        scheduler._drafts._lengths = None
        outputs = all_of(llm.generate(prompts, params, use_tqdm=False))
        counted = llm.totals.spec_decode
        seen.append((outputs, counted.num_draft_tokens, counted.num_accepted_tokens))
    assert seen[0] == seen[1] and seen[0][1] > 20
    if joined:  # as it is served by default, in codes of 8 bits
        packed, plain = (tiny(folder, speculative_config={"method": method}) for method in ("mtp", "none"))
        expected = all_of(plain.generate(prompts, params, use_tqdm=False))
        assert all_of(packed.generate(prompts, params, use_tqdm=False)) == expected


def test_what_has_no_such_layer_is_refused(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    kind, settings = FAMILY_CASES["deepseek-v3"]
    make_model(kind, settings).save_pretrained(tmp_path)
    of_method: dict[str, Any] = {"speculative_config": {"method": "mtp"}, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="is a LlamaForCausalLM; give another method"):
        EngineArgs(model=str(tiny_checkpoints["llama"]), **of_method).create_engine_config()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"config.json says that it has none \(num_nextn_predict_layers\)"):
        EngineArgs(model=str(tmp_path), **of_method).create_engine_config()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.raises(ModelError, match=r"the checkpoint lacks"):
        tiny(tmp_path, quantization="none", speculative_config={"method": "mtp"})


def test_gpus_refuse_it(tmp_path: Path) -> None:
    """The runner of GPUs, here on a CPU."""
    checkpoint(next(iter(FAMILIES)), tmp_path)
    llm = tiny(tmp_path, quantization="none", speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    with pytest.raises(ConfigError, match="method mtp works on CPUs only, for now; give ngram, suffix or draft_model"):
        overlapped(llm)
