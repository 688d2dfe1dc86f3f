"""A checkpoint's layers for multi-token prediction guess as the description says, and change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.draft_heads import check_head
from support.family_cases import FAMILY_CASES
from support.overlapped import prompts_of, tiny
from support.quantized_files import fp8, quantize_checkpoint
from support.speculation import all_of
from support.tiny_models import make_model
from torch import Tensor
from transformers import PreTrainedModel

from octavo import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError


class Oracle(torch.nn.Module):
    """The layers behind the last one, in plain torch with transformers' decoder layers in it.

    What a layer has read of a token stays as it was, though it may have read a guess there that was wrong."""

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        super().__init__()
        layers, self.main, self.count = list(model.model.layers), model.model, count
        self.main.layers, self.own = torch.nn.ModuleList(layers[:-count]), layers[-count:]
        vocab, size = model.lm_head.weight.shape
        self.eps = model.config.rms_norm_eps
        draw = torch.Generator().manual_seed(5)
        table = torch.randn(vocab, size, generator=draw) * 0.4
        self.tensors: list[dict[str, Tensor]] = []
        for _ in range(count):
            found = {
                name: torch.randn(*shape, generator=draw) * 0.4
                for name, shape in {"eh_proj": (size, 2 * size), "shared_head.head": (vocab, size)}.items()
            }
            found |= {n: torch.rand(size, generator=draw) + 0.5 for n in ("enorm", "hnorm", "shared_head.norm")}
            self.tensors.append(found | {"embed_tokens": table})
        self.known, self.read = list[int](), [torch.zeros(0, size)] * count

    def norm(self, x: Tensor, layer: int, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.tensors[layer][name]

    def brought_together(self, tokens: list[int], before: Tensor, layer: int) -> Tensor:
        """What the layer reads of ``tokens`` with the states before them."""
        embedded = self.norm(self.tensors[layer]["embed_tokens"][tokens], layer, "enorm")
        return torch.cat([embedded, self.norm(before, layer, "hnorm")], -1) @ self.tensors[layer]["eh_proj"].T

    def after(self, x: Tensor, layer: int) -> Tensor:
        """What the layer makes of that."""
        count = len(x)
        mask, places = torch.full((count, count), float("-inf")).triu(1)[None, None], torch.arange(count)[None]
        turned = self.main.rotary_emb(x[None], places)
        out = self.own[layer](x[None], attention_mask=mask, position_ids=places, position_embeddings=turned)
        return (out[0] if isinstance(out, tuple) else out)[0]

    @torch.inference_mode()
    def guesses(self, tokens: list[int], given: list[int]) -> list[Tensor]:
        """Logits [V] of the guesses after ``tokens``, where those before each are ``given``; to be called step by
        step."""
        goes_on = len(tokens) > len(self.known) > 0 and tokens[: len(self.known)] == self.known
        start, end = (len(self.known) - 1 if goes_on else 0), len(tokens) - 1
        self.known = tokens
        state = self.main(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        text, found = tokens + given, list[Tensor]()
        for number in range(len(given)):
            layer = min(number, self.count - 1)
            if number < self.count:
                new = self.brought_together(text[number + 1 :][:end], state, layer)
                x = self.read[layer] = torch.cat([self.read[layer][:start], new[start:]])
            else:
                x = torch.cat([x, self.brought_together(text[end + number : end + number + 1], state[-1:], layer)])
            state = self.after(x, layer)
            last = self.norm(state[-1], layer, "shared_head.norm")
            found.append(self.tensors[layer]["shared_head.head"] @ last)
        return found


def checkpoint(family: str, folder: Path, count: int = 1) -> Oracle:
    """Write one with so many such layers."""
    kind, settings = FAMILY_CASES[family]
    model = make_model(kind, settings | {"num_hidden_layers": 2 + count})
    model.save_pretrained(folder)
    oracle, tensors = Oracle(model, count), load_file(folder / "model.safetensors")
    for layer, own in enumerate(oracle.tensors, 2):
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor.clone() for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": count}
    config.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return oracle


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize(("family", "count"), [("deepseek-v3", 1), ("glm4-moe", 1), ("glm4-moe", 2)])
def test_layers_guess_as_described_and_change_nothing(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens: a layer guesses one, the last one the others."""
    oracle = checkpoint(family, tmp_path, count)
    check_head(family, tmp_path, {"method": "mtp"}, oracle.guesses, monkeypatch, quantization="none")


def test_each_layer_guesses_a_token_by_default(tmp_path: Path) -> None:
    checkpoint("glm4-moe", tmp_path, 2)
    for asked, guessed, layers in ((None, 2, 2), (1, 1, 1), (3, 3, 2)):
        config = {"method": "mtp", "num_speculative_tokens": asked}
        args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, speculative_config=config)
        speculative = args.create_engine_config().speculative
        assert speculative.draft is not None
        assert (speculative.num_speculative_tokens, speculative.draft.num_layers) == (guessed, layers)


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
        assert isinstance(scheduler, Scheduler) and scheduler.drafts is not None
        scheduler.drafts._lengths = None
        outputs = all_of(llm.generate(prompts, params, use_tqdm=False))
        counted = llm.totals.spec_decode
        seen.append((outputs, counted.num_draft_tokens, counted.num_accepted_tokens))
    assert seen[0] == seen[1] and seen[0][1] > 20
    if joined:  # as it is served by default, in codes of 8 bits
        packed, plain = (tiny(folder, speculative_config={"method": method}) for method in ("mtp", "none"))
        expected = all_of(plain.generate(prompts, params, use_tqdm=False))
        assert all_of(packed.generate(prompts, params, use_tqdm=False)) == expected


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    kind, settings = FAMILY_CASES["deepseek-v3"]
    make_model(kind, settings).save_pretrained(tmp_path)
    of_method: dict[str, Any] = {"speculative_config": {"method": "mtp"}, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="is a LlamaForCausalLM; give another method"):
        EngineArgs(model=str(tiny_checkpoints["llama"]), **of_method).create_engine_config()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"config.json says that it has none \(num_nextn_predict_layers\)"):
        EngineArgs(model=str(tmp_path), **of_method).create_engine_config()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 65}))
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers of .* from 1 to 64, got 65"):
        EngineArgs(model=str(tmp_path), **of_method).create_engine_config()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.raises(ModelError, match=r"num_nextn_predict_layers .* no tensors of them.*another method than mtp"):
        tiny(tmp_path, quantization="none", speculative_config={"method": "mtp"})
