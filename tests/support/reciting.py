"""A checkpoint that recites: it says a script, token by token, where a prompt ends with the script's cue.

It is a plain `LlamaForCausalLM` of one layer, built and not trained, for any tokenizer and any chat template. Each
token has a random code of ±1. One attention head for each distance copies the code that stands so far back into a place
of its own: all heads have the same key, (1, 0) in every pair that RoPE turns, and the query of head j is turned back by
j. One unit of the MLP for each n-gram of the scripts fires on exactly these n codes and writes the code of the token
that follows. Where no unit fires, the answer ends. So it recites after any prompt, in every process layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from octavo.text.chat_template import ChatTemplateError
from octavo.text.tokenizer import Tokenizer

_CODE, _OUT, _HEAD = 24, 64, 64  # widths: of a token's code, of the code that is said, of an attention head
_THETA = 10_000.0
_FOCUS = 40.0  # a head's score at its distance is 32, beside it 30.9; times this, softmax sees one token
_APART = 6  # bits in which the codes of tokens of scripts differ at least
_MARGIN = _APART  # an n-gram of which one token differs is at least this far below where its unit fires
_LOUD = 4.0  # of what is said beside all else
_SILENCE = 0.05  # the end of the answer, where no unit fires
_MIN_CUE, _MAX_WINDOW, _SEEN = 4, 60, 64  # tokens
_ROLES = ("system", "user", "assistant", "tool", "tool_response", "system-reminder")
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True)
class Recital:
    """What a model recites. ``scripts``: by cue, what it says when a message of the user, or a tool's result, ends with
    it. ``template``: its chat template; ``end``: the token that ends an answer; ``switches``: variables of the template
    with which it is asked, one mapping a way; ``windowed``: its layer sees the last 64 tokens, no more, so that long
    prompts cost little."""

    scripts: Mapping[str, str]
    template: str
    end: str
    switches: Sequence[Mapping[str, Any]] = ({},)
    context: int = 32_768
    windowed: bool = False


def write_reciting_model(
    folder: Path, backend: Backend, recital: Recital, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Write the checkpoint into ``folder`` with its tokenizer. Returns its config. Raises ValueError for a cue that is
    too short, and for scripts that no window of 60 tokens tells apart."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": recital.end,
        "chat_template": recital.template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(backend, settings, {"default": recital.template})
    end = tokenizer.backend.token_to_id(recital.end)
    grams = _grams(list(_chains(tokenizer, recital, end)))
    window = -(-max(map(len, grams)) // 4) * 4
    size = tokenizer.backend.get_vocab_size()
    config = _config(size, window, len(grams), end, dtype) | {"max_position_embeddings": recital.context}
    if recital.windowed:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": _SEEN}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.to(dtype) for name, tensor in _weights(config, window, grams).items()},
        folder / "model.safetensors",
    )
    return config


def small_tokenizer(texts: Sequence[str], special: Sequence[str], marks: Sequence[str] = ()) -> Backend:
    """A byte-level one, made in milliseconds, with words of ``texts`` and of chat templates, the special tokens
    ``special``, and ``marks``, which are tokens too and text: those around thoughts and calls."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2_000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*texts, *_ROLES] * 2, trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return backend


@dataclass(frozen=True)
class _Chain:
    tail: list[int]  # with which every prompt of the cue ends
    behind: int  # of these, what stands behind a message
    said: list[int]


def _chains(tokenizer: Tokenizer, recital: Recital, end: int) -> Iterator[_Chain]:
    """One for each script and each place of its cue."""
    for cue, script in recital.scripts.items():
        said = [*tokenizer.encode(script, add_special_tokens=False), end]
        for role, variables in product(("user", "tool"), recital.switches):
            try:
                endings = [
                    _prompt(tokenizer, role, before + cue, variables) for before in ("", "Some words. ", "1\n", "é:")
                ]
                silent = [_prompt(tokenizer, role, word, variables) for word in ("a", "b")]
            except ChatTemplateError:
                if role == "user":
                    raise
                continue  # a template without tools
            tail = _common_end(endings)
            behind = len(_common_end(silent))
            if len(tail) < behind + _MIN_CUE:
                raise ValueError(f"the cue {cue!r} has fewer than {_MIN_CUE} tokens that are always the same")
            yield _Chain(tail, behind, said)


def _prompt(tokenizer: Tokenizer, role: str, content: str, variables: Mapping[str, Any]) -> list[int]:
    messages: list[dict[str, Any]] = [{"role": role, "content": content}]
    if role == "tool":
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        messages = [{"role": "user", "content": "?"}, call, {**messages[0], "tool_call_id": _CALL["id"]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
    return tokenizer.encode(text, add_special_tokens=False)


def _common_end(lists: Sequence[list[int]]) -> list[int]:
    count = 0
    while all(len(ids) > count for ids in lists) and len({ids[-1 - count] for ids in lists}) == 1:
        count += 1
    return lists[0][len(lists[0]) - count :]


def _grams(chains: Sequence[_Chain]) -> dict[tuple[int, ...], int]:
    """The token that follows each n-gram, where the largest n is as small as leaves no doubt and sees every cue. Those
    at the beginning of a script are shorter if the end of a prompt that is always the same is."""
    least = max(chain.behind for chain in chains) + _MIN_CUE
    for window in range(-(-least // 4) * 4, _MAX_WINDOW + 1, 4):
        if (found := _followers(chains, window)) is not None:
            return found
    raise ValueError(
        f"no window of {least} to {_MAX_WINDOW} tokens tells all places of the scripts apart; make cues that are "
        "alike, or scripts that repeat themselves, differ"
    )


def _followers(chains: Sequence[_Chain], window: int) -> dict[tuple[int, ...], int] | None:
    """None if what follows is in doubt: an n-gram, or the end of one, is another with another token behind it."""
    pairs = [
        (tuple([*chain.tail, *chain.said[:at]][-window:]), token)
        for chain in chains
        for at, token in enumerate(chain.said)
    ]
    for length in {len(gram) for gram, _ in pairs}:
        short = {gram: token for gram, token in pairs if len(gram) == length}
        if any(short.get(gram[-length:], token) != token for gram, token in pairs if len(gram) >= length):
            return None
    return dict(pairs)


def _config(size: int, window: int, units: int, end: int, dtype: torch.dtype) -> dict[str, Any]:
    width = _CODE * (1 + window) + 1 + _OUT
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": -(-size // 64) * 64,
        "hidden_size": -(-width // 128) * 128,
        "intermediate_size": -(-units // 64) * 64,
        "num_hidden_layers": 1,
        "num_attention_heads": window,
        "num_key_value_heads": 4,
        "head_dim": _HEAD,
        "rms_norm_eps": 1e-5,
        "rope_theta": _THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": end,
    }


def _weights(config: dict[str, Any], window: int, grams: Mapping[tuple[int, ...], int]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    size, width, units = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    codes = _codes(size, sorted({token for gram in grams for token in gram}), draw)
    says = _signs(size, _OUT, draw)
    one = _CODE * (1 + window)  # where the constant stands; before it the codes, behind it what is said
    out = slice(one + 1, one + 1 + _OUT)

    embed = torch.zeros(size, width)
    embed[:, :_CODE], embed[:, one], embed[:, out] = codes, 1.0, says[config["eos_token_id"]] * _SILENCE
    silence = _OUT * _SILENCE**2
    alone, full = (_CODE + 1 + silence) / width, (_CODE * (1 + window) + 1 + silence) / width

    key = torch.zeros(_HEAD, width)
    key[: _HEAD // 2, one] = 1.0
    value = torch.zeros(_HEAD, width)
    value[range(_CODE), range(_CODE)] = 1.0
    query, output = torch.zeros(window * _HEAD, width), torch.zeros(width, window * _HEAD)
    for distance in range(window):
        angles = distance / _THETA ** (torch.arange(0, _HEAD, 2) / _HEAD)
        turned = torch.cat([torch.cos(angles), -torch.sin(angles)])
        query[distance * _HEAD : (distance + 1) * _HEAD, one] = turned * _FOCUS * _HEAD**0.5
        places = torch.arange(_CODE)
        output[_CODE * (1 + distance) + places, distance * _HEAD + places] = 1.0

    gate, up, down = torch.zeros(units, width), torch.zeros(units, width), torch.zeros(width, units)
    fires = 2.0 * _MARGIN
    for unit, (gram, token) in enumerate(grams.items()):
        for distance, past in enumerate(reversed(gram)):
            gate[unit, _CODE * (1 + distance) : _CODE * (2 + distance)] = codes[past]
        gate[unit, one] = fires - _CODE * len(gram)
        up[unit, one] = 1.0
        down[out, unit] = says[token] * _LOUD / fires
    layer = {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key.repeat(config["num_key_value_heads"], 1),
        "self_attn.v_proj": value.repeat(config["num_key_value_heads"], 1),
        "self_attn.o_proj": output,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": down,
        "input_layernorm": torch.full((width,), alone**0.5),
        "post_attention_layernorm": torch.full((width,), full**0.5),
    }
    head = torch.zeros(size, width)
    head[:, out] = says
    return {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": torch.full((width,), full**0.5),
        "lm_head.weight": head,
    } | {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}


def _codes(size: int, used: Sequence[int], draw: torch.Generator) -> torch.Tensor:
    """A code for each token; those of ``used`` tokens differ in `_APART` bits at least."""
    codes = _signs(size, _CODE, draw)
    kept = torch.empty(0, _CODE)
    for token in used:
        while len(kept) and (kept @ codes[token]).max() > _CODE - 2 * _APART:
            codes[token] = _signs(1, _CODE, draw)[0]
        kept = torch.cat([kept, codes[token : token + 1]])
    return codes


def _signs(rows: int, columns: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (rows, columns), generator=draw).float() * 2 - 1
