"""Other servers' flags and what they become here, from the tables that `octavo check` judges by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from generate import markdown
from octavo.engine import vllm_arguments as vllm
from octavo.migration import llama_cpp, ollama, tgi
from octavo.migration.rules import Rule
from octavo.migration.verdict import Status
from octavo.migration.vllm import PART_OF, VARIABLES, dashed, serve_parser

_MODULES = (
    ("`vllm`", "`octavo`: `LLM`, `AsyncLLM`, `SamplingParams`, `BeamSearchParams`, `PoolingParams`, outputs, prompts"),
    ("`vllm.sampling_params`, `.pooling_params`, `.inputs`, `.outputs`, `.logprobs`, `.sequence`", "`octavo....`"),
    ("`vllm.lora.request`, `vllm.beam_search`", "`octavo.lora.request`, `octavo.beam_search`"),
    ("`vllm.engine.arg_utils`, `vllm.engine.async_llm_engine`", "`octavo.engine....`"),
    ("`vllm.entrypoints.llm`, `vllm.v1.engine.async_llm`, `vllm.v1.metrics.reader`", "`octavo....`"),
)
_KUBEAI = (
    ("`Model`", "`LLMDeployment`"),
    ("`spec.url: hf://...`", "`spec.model.uri: hf://...`, `s3://...`, `gs://...`; `ollama://` is not read"),
    ("`spec.engine: VLLM`, `OLlama`", "one engine"),
    ("`resourceProfile: nvidia-gpu-l4:1`", "`spec.accelerator` and `spec.resources`"),
    (
        "`minReplicas`, `maxReplicas`, `targetRequests`",
        "`spec.autoscaling`; `minReplicas: 0` needs `routing.strategy: prefix` or an `LLMGateway`",
    ),
    ("`args`, `env`", "`spec.engine.args`, `spec.engine.env`; `octavo check` judges the arguments"),
    ("one proxy for all models", "an [`LLMGateway`](../gateways.md)"),
    ("cache profiles", "`spec.model.cache`"),
)


def page() -> str:
    return markdown.page(
        "Coming from another server",
        "`octavo check` takes a command as it is pasted, names every flag's fate, and gives the command to run here:",
        "```sh\noctavo check 'vllm serve Qwen/Qwen3-8B --swap-space 4 --uvicorn-log-level info'\n```",
        "A flag is taken as it is, taken under another name, without effect, or refused, with what to give instead. "
        "`octavo serve` judges by the same tables, which are below, and names all that it refuses at once. Fields of "
        "requests are in [Compatibility](../compatibility.md).",
        *_vllm(),
        *_ollama(),
        *_llama_cpp(),
        *_tgi(),
        "## KubeAI",
        markdown.table(("KubeAI", "here"), _KUBEAI),
    )


def _vllm() -> Iterator[str]:
    yield "## vLLM"
    yield (
        "Flags, request fields, metrics and the Python interface have vLLM's names; most commands run unchanged after "
        "replacing `vllm serve`, or `python -m vllm.entrypoints.openai.api_server`, by `octavo serve`. Other defaults: "
        "`--max-num-seqs` is 128; `--max-num-batched-tokens` is 8192 on a GPU and 192 on a CPU, or 512 where it has "
        "matrix units, weights are plain bfloat16 and there is one rank. Not built: pipeline parallelism on GPUs, "
        "`/pooling`. Structured output: objects have no properties but those that a schema names "
        "(`--no-strict-json-schema`)."
    )
    yield "Programs replace `vllm` by `octavo` in their imports:"
    yield markdown.table(("vLLM", "here"), _MODULES)
    yield "### Under another name"
    yield markdown.table(("flag", "here"), _renamed())
    yield "### Without effect"
    yield (
        "A value in the second column is what is so here; others are refused. Flags marked † are those that vLLM has "
        "removed since the end of 2023."
    )
    yield markdown.table(("vLLM's flag", "values", "why"), _without_effect())
    yield "### Refused"
    yield markdown.table(("vLLM's flag", "feature", "instead"), _refused())
    yield "### Environment variables"
    yield markdown.table(("variable", "here"), ((f"`{name}`", _prose(text)) for name, text in VARIABLES.items()))
    yield "Other variables whose name begins with `VLLM_` have no effect."


def _flag(name: str) -> str:
    return f"`{dashed(name)}`" + (" †" if name in vllm.REMOVED else "")


def _renamed() -> Iterator[tuple[str, str]]:
    for action in serve_parser()._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        for other in flags[1:]:
            if not other.startswith("--no-"):
                yield f"`{other}`", f"`{flags[0]}`"
    for name, whole in PART_OF.items():
        yield _flag(name), f"part of `{dashed(whole)}`, or as it is"


def _without_effect() -> Iterator[tuple[str, str, str]]:
    for name, text in vllm.ALWAYS.items():
        yield _flag(name), "", _prose(text)
    for name, (values, text) in vllm.ONLY.items():
        yield _flag(name), ", ".join(f"`{value}`" for value in values), _prose(text)
    for name, (_, text) in vllm.NO_EFFECT.items():
        yield _flag(name), "any", _prose(text)


def _refused() -> Iterator[tuple[str, str, str]]:
    for name, feature in vllm.NOT_SUPPORTED_YET.items():
        yield _flag(name), _prose(feature), _prose(vllm.INSTEAD.get(name, "leave it out"))


def _ollama() -> Iterator[str]:
    yield "## Ollama"
    yield (
        "`octavo run`, `pull`, `list`, `show` and `rm` are on the [command line](../command-line.md), and clients work "
        "unchanged at the bare address: see [Ollama's API](../ollama.md); `--port 11434` is for clients whose address "
        "is fixed. One server serves one model, by its name on the hub: `hf.co/org/name:Q4_K_M` works as it is, and "
        "names such as `qwen3:0.6b` are answered with the repository that is meant."
    )
    yield markdown.table(("Ollama's command", "here"), _commands())
    yield "Variables of `ollama serve`:"
    yield markdown.table(("variable", "becomes", "here"), _rows(ollama.VARIABLES, "OLLAMA_"))
    yield "Flags of `ollama run`:"
    yield markdown.table(("flag", "becomes", "here"), _rows(ollama.RUN))


def _commands() -> Iterator[tuple[str, str]]:
    yield "`ollama serve`", "`octavo serve MODEL`"
    yield "`ollama run MODEL`", "`octavo run MODEL`"
    for name, ours in ollama.COMMANDS.items():
        yield f"`ollama {name}`", f"`{ours}`"
    for name, text in ollama.NO_COMMANDS.items():
        yield f"`ollama {name}`", _prose(text)


def _llama_cpp() -> Iterator[str]:
    yield "## llama.cpp"
    yield (
        "`llama-server -m F.gguf -c 8192 -np 20` is `octavo serve F.gguf --max-model-len 8192 --max-num-seqs 20`. "
        "The KV cache is paged: slots do not divide the context. In requests `grammar` moves to "
        "`structured_outputs.grammar` (GBNF and Lark); `json_schema` works at the top level, too; `mirostat`, "
        "`typical_p`, DRY and XTC are refused. Variables `LLAMA_ARG_...` are judged as the flags that they stand for."
    )
    yield markdown.table(("flag of llama-server", "becomes", "here"), _rows(llama_cpp.RULES))


def _tgi() -> Iterator[str]:
    yield "## TGI"
    yield (
        "`/generate` and `/generate_stream` are not built: use `/v1/completions`. Fields such as `max_new_tokens` get "
        "a 400 that names OpenAI's field. Variables such as `MODEL_ID` are judged as the flags that they stand for."
    )
    yield markdown.table(("flag of text-generation-launcher", "becomes", "here"), _rows(tgi.RULES))


def _rows(rules: Iterable[Rule], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for rule in rules:
        names = rule.names.split()
        if prefix:
            names = [prefix + name.removeprefix("--").upper().replace("-", "_") for name in names]
        status, text = rule.outcome
        shown = f"`{text}`" if status is Status.RENAMED and text == rule.ours else _prose(text)
        yield " ".join(f"`{name}`" for name in names), str(status), shown


def _prose(text: str) -> str:
    return markdown.prose(text)
