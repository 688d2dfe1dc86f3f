"""`octavo check`: every flag of another server's command line in one answer, judged as `octavo serve` judges it."""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.engine import vllm_arguments as vllm
from octavo.errors import ConfigError
from octavo.flags.fields import with_dashes
from octavo.flags.parser import CommandParser
from octavo.flags.serve_flags import add_serve_flags, serve_arguments
from octavo.migration import llama_cpp, ollama, pasted, tgi
from octavo.migration.check import Checked, check
from octavo.migration.rules import Rule
from octavo.migration.verdict import Status
from octavo.migration.vllm import PART_OF, serve_parser

LINES = (Path(__file__).parent / "vllm_lines.txt").read_text().strip().split("\n\n")
NAMES = [line.splitlines()[0].removeprefix("# ") for line in LINES]
RUN_UNCHANGED = 16  # of the 20; the others are refused flag by flag


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_REPLICA_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_of_twenty_pasted_lines_at_least_fourteen_run_unchanged() -> None:
    checked = dict(zip(NAMES, map(check, LINES), strict=True))
    running = [name for name, one in checked.items() if one.runs]
    print(f"{len(running)} of {len(checked)} lines run unchanged; not: {sorted(set(checked) - set(running))}")
    assert len(LINES) == 20 and len(running) == RUN_UNCHANGED >= 14


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_every_flag_of_a_line_is_judged_in_one_answer(line: str) -> None:
    told = " ".join(one.given for one in check(line).verdicts)
    flags = [word for word in with_dashes(pasted.read(line).arguments) if word.startswith("-")]
    assert flags and all(flag in told for flag in flags), told


def starts(arguments: list[str]) -> bool:
    """Whether `octavo serve` takes these arguments, as far as it looks before it asks for the model."""
    parser = CommandParser(prog="octavo serve")
    add_serve_flags(parser)
    try:
        serve_arguments(parser.parse_args(with_dashes(arguments)), {})
    except (SystemExit, ConfigError):
        return False
    return True


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_the_start_judges_as_the_check_does(line: str) -> None:
    assert check(line).runs == starts(pasted.read(line).arguments)


@pytest.mark.parametrize("line", LINES, ids=NAMES)
def test_the_command_that_it_gives_runs_and_stays_as_it_is(line: str) -> None:
    given = check(line).command
    again = check(given)
    assert again.runs and again.command == given and starts(shlex.split(given)[2:])
    assert {one.status for one in again.verdicts} <= {Status.TAKEN, Status.RENAMED}


def of(checked: Checked, flag: str) -> tuple[Status, str]:
    found = [one for one in checked.verdicts if one.given.split()[0] == flag]
    assert len(found) == 1, checked.verdicts
    return found[0].status, found[0].text


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_every_argument_of_the_tables_has_the_verdict_of_its_table() -> None:
    for name in vllm.NOT_SUPPORTED_YET:
        status, text = of(check(f"vllm serve m {flag(name)} 1"), flag(name))
        assert status is Status.REFUSED and vllm.INSTEAD.get(name, "leave it out") in text
    for name in vllm.ALWAYS:
        assert of(check(f"vllm serve m {flag(name)}"), flag(name))[0] is Status.NO_EFFECT
    for name, (values, _) in vllm.ONLY.items():
        assert of(check(f"vllm serve m {flag(name)} {values[0]}"), flag(name))[0] is Status.NO_EFFECT
        assert of(check(f"vllm serve m {flag(name)} other"), flag(name))[0] is Status.REFUSED
    for name, (count, why) in vllm.NO_EFFECT.items():
        line = f"vllm serve m {flag(name)}" + (" 1" if count in (1, "+") else "")
        status, text = of(check(line), flag(name))
        assert status is Status.NO_EFFECT and why in text


def test_flags_that_vllm_has_removed_are_known_by_name() -> None:
    ours = {name.removeprefix("--").replace("-", "_") for name in serve_parser().flags()}
    assert ours >= vllm.REMOVED and len(vllm.REMOVED) > 60
    for name in vllm.REMOVED - ours.intersection(PART_OF) - {"device"}:
        assert "vLLM has removed it" in of(check(f"vllm serve m {flag(name)}=1"), flag(name))[1], name


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("$ vllm serve m --port 1", ["m", "--port", "1"]),
        ("vllm serve m \\\n  --port 1   \\\n  -tp 2", ["m", "--port", "1", "-tp", "2"]),
        ("vllm serve m\n  --port 1\n  -tp 2", ["m", "--port", "1", "-tp", "2"]),
        ("# start\nexport A=b\npip install vllm && vllm serve m --port 1 > log 2>&1 &", ["m", "--port", "1"]),
        ("A=b nohup /opt/venv/bin/vllm serve m # the model", ["m"]),
        ("CUDA_VISIBLE_DEVICES=0 python3.11 -m vllm.entrypoints.openai.api_server --model m", ["--model", "m"]),
        ("uv run vllm serve m", ["m"]),
        ("vllm serve m --hf-overrides '{\"a\":\n 1}'", ["m", "--hf-overrides", '{"a":\n 1}']),
        ("docker run --gpus all -it --rm -p 8000:8000 vllm/vllm-openai --model m", ["--model", "m"]),
        ("sudo docker run -d --gpus=all -v a:b --ipc host x.io/vllm:1 vllm serve m -tp 2", ["m", "-tp", "2"]),
        ("podman run --entrypoint vllm quay.io/vllm:1 serve m", ["m"]),
        ("octavo serve m", ["m"]),
    ],
)
def test_a_command_is_found_in_what_people_paste(line: str, arguments: list[str]) -> None:
    found = pasted.read(line)
    assert (found.server, found.arguments) == (pasted.VLLM, arguments)


def test_a_model_behind_a_switch_is_no_value_of_it() -> None:
    for switch in ("--enable-sleep-mode", "--enable-chunked-prefill", "--trust-remote-code", "--enforce-eager"):
        assert check(f"vllm serve {switch} org/name --port 1").command.replace(" --enforce-eager", "") == (
            "octavo serve org/name --port 1"
        )


def test_forms_of_arguments_of_vllm_s_are_judged_as_they_are_meant() -> None:
    line = "vllm serve --enable-chunked-prefill true --speculative-config.method ngram -O3 --enable_lora=false org/name"
    checked = check(f"{line} --speculative-config.num_speculative_tokens 4")
    assert checked.runs and checked.command == (
        "octavo serve --speculative-config.method ngram --no-enable-lora org/name "
        "--speculative-config.num_speculative_tokens 4"
    )
    assert not check("vllm serve m --enable-chunked-prefill=False").runs
    assert not check("vllm serve m --speculative-config.metod ngram").runs


def test_variables_are_judged_too() -> None:
    line = "export A=x\ndocker run -e VLLM_API_KEY=k -e VLLM_ATTENTION_BACKEND=XFORMERS vllm/vllm-openai --model m"
    checked = check(line)
    assert (
        of(checked, "VLLM_API_KEY")[0] is Status.TAKEN and of(checked, "VLLM_ATTENTION_BACKEND")[0] is Status.NO_EFFECT
    )
    assert checked.runs


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (
            "llama-server -hf ggml-org/gemma-3-1b-it-GGUF -c 8192 -np 4 -ngl 99 -fa on --jinja --temp 0.7 --top-k 20",
            "octavo serve hf.co/ggml-org/gemma-3-1b-it-GGUF --max-model-len 8192 --max-num-seqs 4 "
            """--override-generation-config '{"temperature": 0.7, "top_k": 20}'""",
        ),
        (
            "./build/bin/llama-server -m /models/m.gguf -ctk q8_0 -ctv q8_0 --host 0.0.0.0 --port 8080 -fa --no-mmap",
            "octavo serve /models/m.gguf --kv-cache-dtype int8 --host 0.0.0.0 --port 8080",
        ),
        (
            "docker run -p 8080:8080 -e LLAMA_ARG_CTX_SIZE=4096 ghcr.io/ggml-org/llama.cpp:server -m m.gguf",
            "octavo serve --max-model-len 4096 m.gguf",
        ),
        (
            "text-generation-launcher --model-id org/falcon --num-shard 1 --quantize eetq --max-total-tokens 4096",
            "octavo serve org/falcon --tensor-parallel-size 1 --quantization int8 --max-model-len 4096",
        ),
        (
            "docker run -e MODEL_ID=org/m ghcr.io/huggingface/text-generation-inference:3 --hostname 0.0.0.0",
            "octavo serve org/m --host 0.0.0.0",
        ),
        ("ollama run qwen3:0.6b --verbose 'Why is the sky blue?'", None),
        ("OLLAMA_HOST=0.0.0.0:11434 OLLAMA_NUM_PARALLEL=4 ollama serve", None),
        ("ollama ls", "octavo list"),
        ("ollama pull hf.co/org/m:Q4_K_M", "octavo pull hf.co/org/m:Q4_K_M"),
    ],
)
def test_lines_of_other_servers_run_under_our_names(line: str, command: str | None) -> None:
    checked = check(line)
    assert checked.runs, checked.verdicts
    if command is not None:
        assert checked.command == command
    elif "serve" in line:
        assert checked.command == "octavo serve --host 0.0.0.0 --port 11434 --max-num-seqs 4"
    else:
        assert checked.command == "octavo run Qwen/Qwen3-0.6B --verbose 'Why is the sky blue?'"


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("llama-server -m a.gguf --mmproj b.gguf --n-predict 5", ["--mmproj", "--n-predict"]),
        ("llama-server -m a.gguf -ctk q4_0 --no-such", ["-ctk", "--no-such"]),
        (
            "text-generation-launcher --model-id a/b --rope-factor 2 --tokenizer-config-path x",
            ["--rope-factor", "--tokenizer"],
        ),
        ("ollama create mine -f Modelfile", ["create"]),
        ("ollama run nowhere:7b", ["nowhere:7b"]),
    ],
)
def test_what_has_no_counterpart_is_refused_with_a_way_out(line: str, refused: list[str]) -> None:
    found = [one for one in check(line).verdicts if one.status is Status.REFUSED]
    assert len(found) == len(refused)
    for one, start in zip(found, refused, strict=True):
        assert one.given.startswith(start) and one.text


def rules() -> Iterator[Rule]:
    yield from (*llama_cpp.RULES, *tgi.RULES, *ollama.VARIABLES)


def test_rules_lead_to_flags_that_exist_and_say_why() -> None:
    ours = {*serve_parser().flags(), "MODEL"}
    for rule in rules():
        assert rule.ours in {"", *ours}, rule.names
        assert rule.ours or rule.text, rule.names
    for table in (llama_cpp.RULES, tgi.RULES, ollama.VARIABLES, ollama.RUN):
        names = [name for rule in table for name in rule.names.split()]
        assert len(names) == len(set(names))


def test_what_does_not_fit_together_is_told_beside_the_flags() -> None:
    checked = check("vllm serve m --max-loras 2 --middleware x")
    assert not checked.runs
    refused = [one.text for one in checked.verdicts if one.status is Status.REFUSED]
    assert len(refused) == 2 and "needs enable_lora" in refused[1]


# The command itself.


def test_the_status_tells_whether_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "vllm serve m --swap-space 4"]) == 0
    told = capsys.readouterr().out
    assert "no effect: preempted requests are recomputed" in told and "It would run: octavo serve m" in told
    assert main(["check", "vllm serve m --middleware x --cpu-offload-gb 8"]) == 1
    told = capsys.readouterr().out
    assert told.count("refused: ") == 2 and told.endswith("octavo serve m\n")
    assert main(["check", "vllm", "serve", "m", "-tp", "2"]) == 0, "also without quotes"
    assert main(["check", "ls -l"]) == 1
    assert "no command of vLLM" in capsys.readouterr().err
    assert main(["check", "vllm serve 'm"]) == 1
    assert "no closing quotation" in capsys.readouterr().err


def test_a_script_reads_json_and_gives_the_command_on_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("vllm serve m \\\n --uvicorn-log-level info"))
    assert main(["check", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["server"] == "vLLM" and told["runs"] and told["command"] == "octavo serve m --uvicorn-log-level info"
    assert told["flags"][1] == {"given": "--uvicorn-log-level info", "status": "another name", "text": "--log-level"}


def test_no_token_is_shown_among_the_flags() -> None:
    checked = check("vllm serve m --hf-token hf_secret --api-key sk-secret")
    assert "secret" not in " ".join(one.given + one.text for one in checked.verdicts)
    assert os.environ.get("HF_TOKEN") != "hf_secret"
