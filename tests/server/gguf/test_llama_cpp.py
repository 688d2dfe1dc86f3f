"""llama.cpp's own greedy tokens of small random files: names, order of rows, norms and metadata are read as it does.

Where two tokens are as good as equal the texts may part: llama.cpp rounds GELU to float16, for one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_encoders import NAMES as ENCODERS
from support.gguf_encoders import write_encoder
from support.gguf_families import LAYOUTS, write_family
from support.gguf_files import BYTE_LEVEL_ALPHABET, write_gguf
from support.gguf_gemma import write_embedding_gemma
from support.paged import load, logits_of
from support.tiny_models import FAMILIES, make_model

from octavo import LLM
from octavo.chat.infill import Around, InfillFile, encode_parts, find_infill_tokens, infill_prompt

PEERS = Path(os.environ.get("OCTAVO_PEERS") or Path.home() / ".cache" / "octavo" / "peers")
LLAMA_SERVER = next(
    (path for name in ("llama-build/bin", "llama.cpp") if (path := PEERS / name / "llama-server").exists()), None
)
pytestmark = [pytest.mark.long, pytest.mark.skipif(LLAMA_SERVER is None, reason="llama.cpp is not here: make peers")]
PROMPTS = [[5, 17, 200, 3, 44, 9, 301, 17, 80, *range(20, 50)], [7, 300, 12]]
NUM_TOKENS, TIE = 24, 5e-3
# It has no window for Phi-3, wants all of layers that are left out here, has one way to choose groups of experts, knows
# DeepSeek's models without q_lora_rank by their number of layers, and turns other pairs of Bamba's heads if it turns
# parts.
OTHERWISE = {
    "phi3-window",
    "glm4moe",
    "qwen35-mtp",
    "nemotron_h_moe-mtp",
    "deepseek2-groups",
    "deepseek2-lite",
    "bamba",
}
PLAIN = [name for name in FAMILIES if name != "opt" and name != "mistral"]  # whose files are Llama's but for the name


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@contextmanager
def serving(path: Path, *flags: str, route: str = "completion") -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [str(LLAMA_SERVER), "-m", str(path), "--port", str(port), "-c", "128", "-np", "1", "-t", "1"]
    command += ["--poll", "0", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-webui", "--no-warmup", *flags]
    with path.with_suffix(".log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None and time.monotonic() < deadline, path.with_suffix(".log").read_text()
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/{route}"
        finally:
            process.terminate()


def greedy(url: str, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    tokens: list[int] = ask(url, body)["tokens"]
    return tokens


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("layout", [*(name for name in LAYOUTS if name not in OTHERWISE), *PLAIN])
def test_greedy_tokens_are_those_of_llama_cpp(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if layout in LAYOUTS:
        write_family(path, LAYOUTS[layout].model(), LAYOUTS[layout])
    else:
        write_gguf(path, make_model(*FAMILIES[layout]), arch=layout)
    with serving(path) as url:
        answers = [greedy(url, prompt) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        logits = logits_of(load(path), [prompt + answer])[0][len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        allowed = torch.arange(logits.shape[1]) != 2  # the end of a text is not
        lead = logits[:, allowed].max(dim=-1).values - chosen
        assert lead.max() < TIE * logits.std(), f"token {int(lead.argmax())}: another one leads by {lead.max():.4f}"


def test_vectors_of_embedding_gemma_are_those_of_llama_cpp(tmp_path: Path) -> None:
    settings = {"use_bidirectional_attention": True, "vocab_size": 320, "hidden_size": 192, "intermediate_size": 96}
    settings |= {"num_hidden_layers": 7, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
    settings |= {"query_pre_attn_scalar": 64, "sliding_window": 16, "max_position_embeddings": 256}
    torch.manual_seed(1)
    dense = torch.randn(256, 192) / 14, torch.randn(192, 256) / 16
    write_embedding_gemma(path := tmp_path / "m.gguf", settings, dense=dense)
    texts = ["paris is the capital of france", "a city, a cat!", "dog " * 20]
    with serving(path, "--embeddings", "--pooling", "mean", route="v1/embeddings") as url:
        theirs = [ask(url, {"input": text})["data"][0]["embedding"] for text in texts]
    ours = [output.outputs.embedding for output in LLM(str(path), dtype="float32").embed(texts, use_tqdm=False)]
    assert torch.cosine_similarity(torch.tensor(ours), torch.tensor(theirs)).min() >= 0.9999


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    """Texts go in as texts, so that both cut them; its GELU is an approximation."""
    settings = {"norm_bias": False} if family == "modernbert" else {}  # of which it knows nothing
    path = write_encoder(tmp_path, family, settings=settings, __pooling_type=1)
    texts = ["paris is the capital of france", "a city, a cat!", "dog " * 40]
    with serving(path, "--embeddings", "--pooling", "mean", route="v1/embeddings") as url:
        theirs = [ask(url, {"input": text})["data"][0]["embedding"] for text in texts]
    llm = LLM(str(path), dtype="float32")
    ours = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    assert torch.cosine_similarity(torch.tensor(ours), torch.tensor(theirs)).min() >= 0.9999


ROLES = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
# Qwen2.5-Coder's marks and StarCoder's, and a model that has none for files.
MARKS = {
    "qwen2": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>"),
    "gpt-2": ("<one>", "<two>", "<three>"),
}
FILES = [{"filename": "old/items.py", "text": "class Item:\n    pass\n"}, {"filename": "é.py", "text": "x = 1"}]
INFILLED = [
    {"input_prefix": "def total(a):\n    ", "input_suffix": "\n    return here\n"},
    {"input_prefix": "def total(a):\n", "prompt": "    here = there", "input_suffix": " in the rest\n"},
    {"input_prefix": "the", "input_suffix": "", "prompt": "re", "input_extra": FILES},
    {"input_prefix": "", "input_suffix": "\thé  and 日本", "input_extra": FILES[1:]},
]


@pytest.mark.parametrize("pre", MARKS)
def test_prompts_for_infilling_are_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    """As text with every mark, and in the number of tokens."""
    letters = "etaoinshrdlu"
    pairs = [(a, b) for a in ("Ġ", "Ċ", *letters) for b in ("Ġ", *letters) if (a, b) != ("Ċ", "Ġ")]
    tokens = ["<|endoftext|>", *BYTE_LEVEL_ALPHABET, *(a + b for a, b in pairs)]
    size = -(-(len(tokens) + len(MARKS[pre])) // 64) * 64
    kind, settings = FAMILIES["llama"]
    model = make_model(kind, {**settings, "vocab_size": size})

    def vocabulary(writer: Any) -> None:
        marks = {role: len(tokens) + at for at, (role, _) in enumerate(zip(ROLES, MARKS[pre], strict=False))}
        whole = [*tokens, *MARKS[pre]]
        whole += [f"<unused{at}>" for at in range(size - len(whole))]
        kinds = [
            3 if at == 0 or at in marks.values() else 5 if "unused" in token else 1 for at, token in enumerate(whole)
        ]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(whole)
        writer.add_token_types(kinds)
        writer.add_token_merges([f"{a} {b}" for a, b in pairs])
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(False)
        for role, number in marks.items():
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)

    write_gguf(path := tmp_path / "m.gguf", model, arch="llama", vocabulary=False, more=vocabulary)
    with serving(path, "-c", "1024", "-b", "256", route="infill") as url:  # other files have what a batch leaves
        theirs = [ask(url, {"n_predict": 1, "temperature": 0, **body}) for body in INFILLED]
    tokenizer = LLM(str(path), dtype="float32").tokenizer
    marks = find_infill_tokens(tokenizer)
    assert marks is not None
    for body, answer in zip(INFILLED, theirs, strict=True):
        files = [InfillFile(file["filename"], file["text"]) for file in body.get("input_extra", [])]
        around = Around(body["input_suffix"], body.get("prompt", ""), files)
        ids = infill_prompt(marks, encode_parts(tokenizer, marks, body["input_prefix"], around))
        assert tokenizer.decode(ids, skip_special_tokens=False) == answer["prompt"]
        assert len(ids) == answer["tokens_evaluated"]
