"""A model that says what a test wants: the last token of the prompt names a script, which it recites at temperature 0.

Its layers add nothing, so that the next token depends on the last one alone; each piece of a script is one token.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": '
PATCH = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+\\u00e9 \\"x\\""}}\n</tool_call>'
REMOTE = '<tool_call>\n{"name": "mcp__clock__now", "arguments": {}}\n</tool_call>'
OPEN = '<tool_call>{"name": "now", "arguments": {"zone":"Z"}}</tool_call>'
# By the token that a prompt ends with. Every piece is there once; "" ends the answer, no last "" goes round in circles.
SCRIPTS: dict[str, list[str]] = {
    "[reason]": ["<think>", "Is it", " so?", "</think>\n\n", "It is", " so é 日.", ""],
    "[call]": [
        "<think>\n",
        "I need",
        " the time.\n</think>\n\n",
        "Let me",
        " look.\n",
        CALL,
        '"UTC"}}\n</tool_call>',
        "",
    ],
    "[cut]": ["Look:", ' <tool_call>{"name": "now", "arguments": {"zone": "', "U", "T"],
    "[patch]": ["I patch.", PATCH, ""],
    "[remote]": [REMOTE, ""],
    "[open]": [
        "<think>\n\n",
        "No time",
        " yet.\n",
        '<tool_call>{"name": "now", "arguments": {"zone":"Z"}}</tool_call>',
        "",
    ],
    "[endless]": ["<think> ", "on", " and on"],
    "[empty]": [""],
    "[lines]": ["a\u2028b", "c\x85d", "e\u2029f", ""],
    "[plain]": ["One", " two", " STOP", " three", ""],
}
TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
)
_WIDTH, _ROOM = 128, 512


def write_scripted_model(tiny_model: Path, folder: Path) -> None:
    """Make the model in ``folder`` of the tokenizer of ``tiny_model``."""
    shutil.copytree(tiny_model, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    pieces = [piece for name, script in SCRIPTS.items() for piece in (name, *script) if piece]
    assert len(set(pieces)) == len(pieces)
    backend.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in pieces])
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    number = {piece: backend.token_to_id(piece) for piece in pieces} | {"": config["eos_token_id"]}
    assert max(number.values()) < _ROOM
    config |= {
        "vocab_size": _ROOM,
        "hidden_size": _WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    embed = torch.randint(0, 2, (_ROOM, _WIDTH)).float() * 2 - 1
    head = torch.zeros(_ROOM, _WIDTH)
    followers = {}
    for name, script in SCRIPTS.items():
        chain = [name, *script]
        followers |= dict(itertools.pairwise(chain))
        if script[-1]:
            followers[script[-1]] = script[-2]
    for piece, follower in followers.items():
        head[number[follower]] += embed[number[piece]] / 4
    half = _WIDTH // 2
    weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": torch.ones(_WIDTH)}
    layer = {
        "self_attn.q_proj": (_WIDTH, _WIDTH),
        "self_attn.k_proj": (half, _WIDTH),
        "self_attn.v_proj": (half, _WIDTH),
        "self_attn.o_proj": (_WIDTH, _WIDTH),
        "mlp.gate_proj": (32, _WIDTH),
        "mlp.up_proj": (32, _WIDTH),
        "mlp.down_proj": (_WIDTH, 32),
    }
    weights |= {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in layer.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"model.layers.0.{name}.weight"] = torch.ones(_WIDTH)
    save_file(weights, str(folder / "model.safetensors"))
