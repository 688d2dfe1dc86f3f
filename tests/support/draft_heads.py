"""Random draft heads in the formats that they come in, and what they guess, in plain torch from the papers' words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.overlapped import PARAMS, overlapped, prompts_of, tiny
from support.speculation import alike, all_of
from torch import Tensor
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.memory.dry_run import make_plan
from octavo.memory.ledger import this_machine
from octavo.plan.measure import measure
from octavo.worker.gpu.runner import GPURunner
from octavo.worker.model_runner import ModelRunner
from octavo.worker.spec_decode.prediction_drafter import PredictionDrafter

HEADS, KV_HEADS, MIDDLE = 4, 2, 72


@dataclass
class Head:
    """A head for ``target``. ``taps``: the layers whose inputs an EAGLE-3 head reads (none: it is of EAGLE-1)."""

    target: PreTrainedModel
    taps: tuple[int, ...] = ()
    layers: int = 1
    draft_vocab: int = 0  # 0: the whole one
    own_embedding: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    flags: tuple[str, ...] = ()  # norm_before_residual, norm_before_fc, fc_norm, norm_output
    seed: int = 0
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        config, draw = self.target.config, torch.Generator().manual_seed(self.seed)
        self.size, self.vocab = config.hidden_size, config.vocab_size
        self.dim, self.eps, self.count = self.size // HEADS, 1e-6, len(self.taps)
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (self.size, self.size * (self.count or 2))}
        if self.fc_bias:
            shapes["fc.bias"] = (self.size,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.vocab, self.size)
        for layer in range(self.layers):
            width = self.size * (2 if self.taps and layer == 0 else 1)
            own = {
                "self_attn.q_proj": (HEADS * self.dim, width),
                "self_attn.k_proj": (KV_HEADS * self.dim, width),
                "self_attn.v_proj": (KV_HEADS * self.dim, width),
                "self_attn.o_proj": (self.size, HEADS * self.dim),
                "mlp.gate_proj": (MIDDLE, self.size),
                "mlp.up_proj": (MIDDLE, self.size),
                "mlp.down_proj": (self.size, MIDDLE),
                "post_attention_layernorm": (self.size,),
            }
            own |= {"input_layernorm": (self.size,)} if self.taps or layer else {}
            own |= {"hidden_norm": (self.size,)} if self.taps and not layer else {}
            own |= {f"self_attn.{one}_norm": (self.dim,) for one in "qk"} if self.qk_norm else {}
            shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        if self.taps:
            rows = self.draft_vocab or self.vocab
            shapes |= {"norm.weight": (self.size,), "lm_head.weight": (rows, self.size)}
            shapes |= {"input_norm.weight": (self.count * self.size,)} if "norm_before_fc" in self.flags else {}
            each = range(self.count if "fc_norm" in self.flags else 0)
            shapes |= {f"fc_norm.{i}.weight": (self.size,) for i in each}
        self.tensors = {
            name: torch.rand(shape, generator=draw) + 0.5
            if "norm" in name
            else torch.randn(shape, generator=draw) * shape[-1] ** -0.5
            for name, shape in shapes.items()
        }
        if self.draft_vocab:
            tokens = torch.randperm(self.vocab, generator=draw)[: self.draft_vocab].sort().values
            self.tensors["d2t"] = tokens - torch.arange(self.draft_vocab)
            self.tensors["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, tokens, True)

    @property
    def method(self) -> str:
        return "eagle3" if self.taps else "eagle"

    def save(self, folder: Path, form: str = "vllm") -> dict[str, Any]:
        """Returns the speculative_config that asks for it."""
        fields: dict[str, Any] = {
            "hidden_size": self.size,
            "vocab_size": self.vocab,
            "intermediate_size": MIDDLE,
            "rms_norm_eps": self.eps,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": self.layers,
            "max_position_embeddings": 64,
            "rope_theta": 10000.0,  # fewer than the target's
        }
        if self.qk_norm:
            fields["head_dim"] = self.dim
        own: dict[str, Any] = dict.fromkeys(self.flags, True)
        if self.taps:
            own |= {
                "draft_vocab_size": self.draft_vocab or self.vocab,
                "eagle_aux_hidden_state_layer_ids": [*self.taps],
            }
        plain = "Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"
        if form == "speculators":
            del fields["max_position_embeddings"]  # as if it were what transformers takes for granted
            fields["model_type"] = "qwen3" if self.qk_norm else "llama"
            config = {"speculators_model_type": self.method, "transformer_layer_config": fields, **own}
            config |= {"architectures": ["Eagle3DraftModel"], "speculators_config": {"algorithm": self.method}}
        else:
            name = f"Eagle{'3' * bool(self.taps)}{plain}" if form == "vllm" else plain
            config = {"architectures": [name], **fields, **own}
        names = {name: name for name in self.tensors}
        if form == "released" and self.taps and self.layers == 1:
            names = {name: name.replace("layers.0.", "midlayer.") for name in names}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {names[name]: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return {"method": self.method, "model": str(folder)}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _rotate(self, x: Tensor) -> Tensor:
        """Of [heads, T, dim]."""
        angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(0, self.dim, 2) / self.dim)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attention(self, x: Tensor, name: str) -> Tensor:
        count = len(x)
        q, k, v = (self._linear(x, f"{name}.{one}_proj").view(count, -1, self.dim) for one in "qkv")
        if self.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k, v = self._rotate(q.transpose(0, 1)), self._rotate(k.transpose(0, 1)), v.transpose(0, 1)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (k, v))
        scores = q @ k.transpose(1, 2) / self.dim**0.5 + torch.full((count, count), float("-inf")).triu(1)
        return self._linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{name}.o_proj")

    def _states(self, embedded: Tensor, before: Tensor) -> Tensor:
        """After all layers, from the tokens' embeddings and the states before them, [T, H] each."""
        x = before if self.taps else self._linear(torch.cat([embedded, before], -1), "fc")
        for layer in range(self.layers):
            name, residual = f"layers.{layer}", x
            if self.taps and layer == 0:
                normed = self._norm(x, f"{name}.hidden_norm")
                residual = normed if "norm_before_residual" in self.flags else x
                x = torch.cat([self._norm(embedded, f"{name}.input_layernorm"), normed], -1)
            elif layer:
                x = self._norm(x, f"{name}.input_layernorm")
            x = residual + self._attention(x, f"{name}.self_attn")
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate = F.silu(self._linear(normed, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self._norm(x, "norm") if "norm_output" in self.flags else x

    def _read(self, tokens: list[int]) -> Tensor:
        """The states that the target's step leaves."""
        outputs = list[Tensor]()
        hooks = [
            layer.register_forward_hook(lambda _, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
            for layer in self.target.model.layers
        ]
        out = self.target.model(torch.tensor([tokens]), output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        if not self.taps:
            return out.last_hidden_state[0]
        read = [(outputs[tap - 1] if tap else out.hidden_states[0])[0] for tap in self.taps]
        if "fc_norm" in self.flags:
            read = [self._norm(one, f"fc_norm.{i}") for i, one in enumerate(read)]
        joined = torch.cat(read, -1)
        return self._linear(self._norm(joined, "input_norm") if "norm_before_fc" in self.flags else joined, "fc")

    def logits(self, state: Tensor) -> Tensor:
        """Of the vocabulary, [V]."""
        if not self.taps:
            return self.target.lm_head(state)
        state = state if "norm_output" in self.flags else self._norm(state, "norm")
        own = self.tensors["lm_head.weight"] @ state
        if not self.draft_vocab:
            return own
        places = torch.arange(self.draft_vocab) + self.tensors["d2t"]
        return torch.full((self.vocab,), float("-inf")).index_put((places,), own)

    @torch.inference_mode()
    def guesses(self, tokens: list[int], given: list[int]) -> list[Tensor]:
        """Logits [V] of the guesses after ``tokens``, where those before each are ``given``."""
        before, tokens, found = self._read(tokens[:-1]), list(tokens), list[Tensor]()
        own = self.tensors.get("embed_tokens.weight")
        table = self.target.get_input_embeddings().weight if own is None else own
        for token in given:
            states = self._states(table[tokens[1:]], before)
            found.append(self.logits(states[-1]))
            tokens.append(token)
            before = torch.cat([before, states[-1:]])
        return found


@dataclass
class MedusaHeads:
    """Heads for ``target``: ``matrices`` is how many of them have one of their own (1: all the first one's)."""

    target: PreTrainedModel
    count: int = 3
    layers: int = 1
    matrices: int = 3
    bias: bool = False
    draft_vocab: int = 0  # 0: the whole one
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        config, draw = self.target.config, torch.Generator().manual_seed(3)
        size, rows = config.hidden_size, self.draft_vocab or config.vocab_size
        shapes: dict[str, tuple[int, ...]] = {f"lm_heads.{i}.weight": (rows, size) for i in range(self.matrices)}
        for name in (f"blocks.{i}.layers.{j}" for i in range(self.count) for j in range(self.layers)):
            shapes |= {f"{name}.weight": (size, size)} | ({f"{name}.bias": (size,)} if self.bias else {})
        self.tensors = {name: torch.randn(shape, generator=draw) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        if self.draft_vocab:
            self.tensors["token_map"] = torch.randperm(config.vocab_size, generator=draw)[: self.draft_vocab]

    def save(self, folder: Path, form: str = "vllm") -> dict[str, Any]:
        """Returns the speculative_config that asks for it."""
        names = {name: name for name in self.tensors}
        config: dict[str, Any] = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": self.count}
        config |= {"vocab_size": self.target.config.vocab_size, "hidden_size": self.target.config.hidden_size}
        if form == "released":
            config = {"medusa_num_heads": self.count, "medusa_num_layers": self.layers}
            for name, (_, head, _, *rest) in [(name, name.split(".")) for name in names]:
                names[name] = f"{head}.{rest[0]}.linear.{rest[1]}" if rest else f"{head}.{self.layers}.weight"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {names[name]: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "medusa_lm_head.safetensors", {"format": "pt"})
        return {"method": "medusa", "model": str(folder)}

    @torch.inference_mode()
    def guesses(self, tokens: list[int], given: list[int]) -> list[Tensor]:
        """Logits [V] of the guesses after ``tokens``."""
        last, found = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1], []
        for head in range(len(given)):
            state = last
            for layer in range(self.layers):
                name = f"blocks.{head}.layers.{layer}"
                state = state + F.silu(
                    F.linear(state, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
                )
            matrix = self.tensors[f"lm_heads.{min(head, self.matrices - 1)}.weight"] if self.matrices else None
            logits = self.target.lm_head(state) if matrix is None else matrix @ state
            if self.draft_vocab:
                whole = torch.full((self.target.config.vocab_size,), float("-inf"))
                logits = whole.index_put((self.tensors["token_map"],), logits)
            found.append(logits)
        return found


def with_head(target: Path, config: dict[str, Any], k: int, adapting: bool = False, **changes: Any) -> LLM:
    """``adapting``: guess only as much as pays; otherwise wherever there is room."""
    llm = tiny(target, speculative_config=config | {"num_speculative_tokens": k}, **changes)
    return llm if adapting else not_adapting(llm)


def not_adapting(llm: LLM) -> LLM:
    scheduler = llm.engine.scheduler
    assert isinstance(scheduler, Scheduler) and scheduler.drafts is not None
    scheduler.drafts._lengths = None
    return llm


def check_head(
    family: str,
    path: Path,
    config: dict[str, Any],
    oracle: Callable[[list[int], list[int]], list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    k: int = 3,
    **changes: Any,
) -> None:
    """That requests of every kind get what they get without, and that what is guessed is what ``oracle`` says (logits
    [V] of the guesses after some tokens, given those before each): in chunks of a prompt, with a cached prefix, on a
    CPU and on the runner of GPUs, here on a CPU, too."""
    llm, expected, answer = check_head_on_cpu(family, path, config, oracle, monkeypatch, k, **changes)
    prompts, params, long, greedy = _requests(family)
    on_device = not_adapting(overlapped(llm))
    assert alike(all_of(on_device.generate(prompts, params, use_tqdm=False)), expected)
    on_device.engine.check_integrity()
    assert on_device.reset_prefix_cache()
    seen = DeviceWatch(on_device, monkeypatch)
    for _ in range(2):
        seen.made.clear()
        assert alike(all_of(on_device.generate(long, greedy, use_tqdm=False)), answer)
        tokens = long[0]["prompt_token_ids"] + [token for _, samples in answer for token in samples[0][1]]
        made = [(known, guessed) for known, guessed in seen.made if known < len(tokens)]
        assert len(made) >= 4 and any(len(guessed) == k for _, guessed in made)
        for known, guessed in made:
            assert guessed == [int(one.argmax()) for one in oracle(tokens[: known + 1], guessed)]


def _requests(family: str) -> tuple[list[Any], list[SamplingParams], list[Any], SamplingParams]:
    """Of every kind, and one of several chunks."""
    prompts, params = prompts_of(family, len(PARAMS)), [SamplingParams(**values) for values in PARAMS]
    long = [{"prompt_token_ids": (prompts[1]["prompt_token_ids"] + list(range(60, 150)))[:100]}]
    return prompts, params, long, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def check_head_on_cpu(
    family: str,
    path: Path,
    config: dict[str, Any],
    oracle: Callable[[list[int], list[int]], list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    k: int = 3,
    **changes: Any,
) -> tuple[LLM, list[Any], list[Any]]:
    """`check_head` on a CPU alone. Returns the engine, and what it answered to `_requests`."""
    changes = {"max_num_batched_tokens": 48, "max_num_seqs": 32} | changes
    plain, llm = tiny(path, **changes), with_head(path, config, k, **changes)
    prompts, params, long, greedy = _requests(family)
    expected = all_of(plain.generate(prompts, params, use_tqdm=False))
    assert all_of(llm.generate(prompts, params, use_tqdm=False)) == expected
    llm.engine.check_integrity()
    ledger = llm.engine.executor.worker.ledger
    plan = make_plan(replace(llm.config, device="cpu"), this_machine(), measure)
    assert plan.ledger is not None and plan.ledger.shares() == ledger.shares() and ledger.drafter > 0
    assert llm.reset_prefix_cache()  # the state before a cached prefix's end was made with what followed there
    watch = Watch(llm, monkeypatch)
    answer = all_of(plain.generate(long, greedy, use_tqdm=False))
    for _ in range(2):  # then with a cached prefix
        assert all_of(llm.generate(long, greedy, use_tqdm=False)) == answer
    assert len(watch.made) >= 8 and any(len(guessed) == k for _, guessed, _ in watch.made)
    check_guesses(watch, oracle)
    return llm, expected, answer


class Watch:
    """Keeps what a drafter guesses: the tokens before, its guesses, their logits, which are computed for that."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = llm.engine.executor.worker.runner
        assert isinstance(runner, ModelRunner) and isinstance(runner.drafter, PredictionDrafter)
        self.made: list[tuple[list[int], list[int], list[Tensor]]] = []
        drafter, logits = runner.drafter, list[Tensor]()
        propose, run = drafter.propose, drafter.steps.run

        def watched_run(*args: Any) -> Any:
            state, found = run(*args)
            logits.append(found.values.clone())
            return state, found

        def watched(*args: Any) -> dict[str, list[int]]:
            logits.clear()
            drafts = propose(*args)
            batch = runner.requests.batch
            for at, (req_id, guessed) in enumerate(drafts.items()):
                row = batch.row_of[req_id]
                tokens = batch.token_ids[row, : batch.num_computed[row] + 1].tolist()
                # Rows keep their order, and sequences that ask for as much as others end with them.
                self.made.append((tokens, guessed, [one[at] for one in logits[: len(guessed)]]))
            return drafts

        monkeypatch.setattr(drafter, "propose", watched)
        monkeypatch.setattr(drafter.steps, "run", watched_run)
        monkeypatch.setattr(drafter, "_wants_logits", lambda *args: True)


class DeviceWatch:
    """Keeps what a drafter on the device guesses for a lone sequence: how many of its tokens were computed, guesses."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = llm.engine.executor.worker.runner
        assert isinstance(runner, ModelRunner) and isinstance(runner.device_runner, GPURunner)
        drafter, batch = runner.device_runner.drafter, runner.device_runner.batch
        assert drafter is not None
        self.made: list[tuple[int, list[int]]] = []
        guess = drafter.guess

        def watched(rows: np.ndarray, most: int, *more: Any) -> None:
            guess(rows, most, *more)
            self.made += [(int(batch.num_computed[row]), batch.drafts[row, :most].tolist()) for row in rows if most]

        monkeypatch.setattr(drafter, "guess", watched)


def check_guesses(watch: Watch, oracle: Callable[[list[int], list[int]], list[Tensor]]) -> None:
    """That guesses are right: ``oracle`` gives the logits [V] of those after some tokens, given those before each."""
    for tokens, guessed, logits in watch.made:
        for ours, theirs in zip(logits, oracle(tokens, guessed), strict=True):
            assert torch.equal(ours.isinf(), theirs.isinf())
            there = theirs[~theirs.isinf()]
            assert (ours[~ours.isinf()] - there).abs().max() <= 2e-5 * there.abs().max()
        assert guessed == [int(one.argmax()) for one in logits]
