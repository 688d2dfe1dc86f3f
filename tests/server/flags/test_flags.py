"""The command line: vLLM's flag names in both spellings, and no flag that is accepted and ignored."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from octavo.cli import serve
from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError
from octavo.flags import engine_flags, server_flags
from octavo.flags.config_file import with_config_file
from octavo.flags.fields import from_flags, with_dashes
from octavo.flags.parser import CommandParser

CHOICES = engine_flags.CHOICES | server_flags.CHOICES


def parse(*argv: str) -> argparse.Namespace:
    parser = CommandParser(prog="octavo serve")
    serve.add_arguments(parser)
    return parser.parse_args(with_dashes(list(argv)))


def test_nothing_given_means_the_dataclasses_defaults():
    assert from_flags(EngineArgs, parse()) == EngineArgs()
    assert from_flags(ServerArgs, parse()) == ServerArgs()


def test_every_option_has_a_flag_and_reaches_its_field():
    """One value for each, unlike its default; what the flag sets is what arrives."""
    for cls in (EngineArgs, ServerArgs):
        for field in dataclasses.fields(cls):
            flag, default = "--" + field.name.replace("_", "-"), getattr(cls(), field.name)
            if isinstance(default, bool):
                argv, expected = [flag.replace("--", "--no-", 1) if default else flag], not default
            else:
                text, expected = _other_value(cls, field.name, default)
                argv = [flag, text]
            values = from_flags(cls, parse(*argv))
            assert getattr(values, field.name) == expected, flag
            assert values == dataclasses.replace(cls(), **{field.name: expected})


def _other_value(cls: type, name: str, default: object) -> tuple[str, object]:
    if name in CHOICES:
        value = next(choice for choice in CHOICES[name] if choice != default)
        return value, value
    if isinstance(default, list):
        return "other", ["other"]
    kind = str(cls.__dataclass_fields__[name].type)
    if "dict" in kind:
        return '{"a": 1}', {"a": 1}
    if "int" in kind:
        return "7", 7
    return ("7.5", 7.5) if "float" in kind else ("other", "other")


@pytest.mark.parametrize("argument", ["--management-por=9001", "--served-model=x", "--max-model=5"])
def test_half_a_flag_is_none(argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The operator's rules about engine.args name flags; the start of one must not do the same."""
    with pytest.raises(SystemExit) as stopped:
        main(["serve", str(tmp_path / "no-model"), argument])
    assert stopped.value.code == 2
    flag = argument.partition("=")[0]
    assert f"octavo: error: unknown flag {flag}; did you mean {flag}" in capsys.readouterr().err


def test_both_spellings():
    assert parse("--max_model_len", "128").max_model_len == parse("--max-model-len=128").max_model_len == 128
    assert parse("--served_model_name=my_model").served_model_name == ["my_model"], "values are left as they are"


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("4096", 4096), ("4k", 4000), ("4K", 4096), ("1M", 1 << 20), ("1.5k", 1500)]
)
def test_lengths(text, value):
    assert parse("--max-model-len", text).max_model_len == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2G", 2 << 30),
        ("2GiB", 2 << 30),
        ("2Gi", 2 << 30),
        ("2g", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("1.5M", 3 << 19),
        ("11.12GiB", round(11.12 * 2**30)),
        ("1T", 1 << 40),
        ("512", 512),
    ],
)
def test_sizes(text, value):
    """vLLM's human-readable integers, and the units that people and Kubernetes write."""
    assert parse("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == value


@pytest.mark.parametrize("text", ["2X", "G", "1.5", "2GG", "", "2 GiB B"])
def test_a_size_that_is_none_is_said_with_the_forms(text, capsys):
    with pytest.raises(SystemExit):
        main(["serve", f"--kv-cache-memory-bytes={text}"])
    assert one_error(capsys) == (
        f"--kv-cache-memory-bytes: must be a whole number, or one with a unit (4k, 2G, 1.5GiB), got {text!r}"
    )


def test_other_names_of_dtypes(tiny_checkpoints):
    for name, meant in (("half", "float16"), ("float", "float32")):
        assert EngineArgs(str(tiny_checkpoints["llama"]), dtype=name).create_engine_config().model.dtype == meant
    assert parse("--dtype", "half").dtype == "half"


def test_lists_in_both_forms():
    assert from_flags(ServerArgs, parse("--allowed-origins", "a", "b")).allowed_origins == ["a", "b"]
    assert from_flags(ServerArgs, parse("--allowed-origins", '["a", "b"]')).allowed_origins == ["a", "b"]
    with pytest.raises(ConfigError, match="allowed_origins"):
        from_flags(ServerArgs, parse("--allowed-origins", "[a"))


def test_flags_of_vllm_that_change_nothing(capsys):
    """Scripts may say what is so anyway, and nothing else without being told."""
    parse(
        "--enable-chunked-prefill", "--disable-log-requests", "-tp", "1", "--tokenizer-mode", "auto", "--task=generate"
    )
    assert not capsys.readouterr().err
    parse("--trust-remote-code", "--swap-space", "4", "--compilation-config", "3")
    told = capsys.readouterr().err
    assert told.count("has no effect") == told.count("\n") == 3 and "--swap-space" in told
    for flags in (["-dcp", "2"], ["--tokenizer-mode", "slow"], ["--default-chat-template-kwargs", "[1]"]):
        with pytest.raises(SystemExit):
            parse(*flags)
        assert flags[1] in capsys.readouterr().err


def test_flags_of_vllm_that_are_not_built_say_so(capsys):
    for flags in (["--fully-sharded-loras"], ["--tokenizer-revision", "main"], ["--hf_token", "hf_secret"]):
        with pytest.raises(SystemExit) as stopped:
            parse(*flags)
        told = capsys.readouterr().err
        assert stopped.value.code == 2 and "not supported yet" in told and "secret" not in told


def test_aliases():
    assert parse("--max-queued-requests", "3").max_num_queued_reqs == 3
    assert parse("--uvicorn-log-level", "warning").log_level == "warning"


@pytest.mark.parametrize(
    "flags",
    [["--port", "99999"], ["--max-num-queued-reqs", "-1"], ["--max-request-bytes", "0"], ["--ssl-certfile", "x"]],
)
def test_options_that_cannot_work_are_one_line(flags, capsys):
    assert main(["serve", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ") and error.count("\n") == 1
    assert flags[0].removeprefix("--").replace("-", "_") in error


def test_two_models_are_one_too_many(capsys):
    assert main(["serve", "one", "--model", "two"]) == 1
    assert "one and two" in capsys.readouterr().err


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, which must be one line that begins as all of them do."""
    err = capsys.readouterr().err
    assert err.startswith("octavo: error: ") and err.count("\n") == 1, err
    return err.removeprefix("octavo: error: ").rstrip()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--max-modle-len", "3"], "unknown flag --max-modle-len; did you mean --max-model-len?"),
        (["serve", "--max_modle_len=3"], "unknown flag --max-modle-len; did you mean --max-model-len?"),
        (["bench", "serve", "--num-promts", "3"], "unknown flag --num-promts; did you mean --num-prompts?"),
        (["chat", "--temprature", "0"], "unknown flag --temprature; did you mean --temperature?"),
        (["serve", "--xyzzy"], "unknown flag --xyzzy; see octavo serve --help"),
        (["serve", "one", "two"], "unexpected argument 'two'; see octavo serve --help"),
        (["serve", "--dtype", "flaot"], "--dtype: must be one of auto, float32, .*'flaot'; did you mean float\\?"),
        (["serve", "--lora-dtype", "float16"], r"--lora-dtype is not supported yet \(a variant of LoRA adapters\)"),
        (["serve", "--default_mm_loras", "{}"], "--default-mm-loras is not supported yet"),
        (["bench", "throughput", "--fully-sharded-loras"], "--fully-sharded-loras is not supported yet"),
        (["bench", "latency", "-dcp", "2"], "--decode-context-parallel-size/-dcp: 2 is not supported yet"),
        (["serve", "--enable-eplb"], "--enable-eplb is not supported yet"),
        (["serve", "--speculative-max-model-len", "4"], "--speculative-max-model-len is not supported yet"),
        (["serve", "--no-enable-chunked-prefill"], "--no-enable-chunked-prefill is not supported yet"),
        (
            ["serve", "-pcp", "2"],
            "--prefill-context-parallel-size/-pcp: 2 is not supported yet (one device, for now): give 1",
        ),
        (["srve"], "there is no command 'srve'; did you mean serve?"),
        (["dance"], "there is no command 'dance'; there are run, chat, serve"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the flag that was meant; what vLLM has and we have not is called by its name; no usage."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    said = one_error(capsys)
    assert says in said or re.match(says, said), said


@pytest.mark.parametrize("command", ["serve", "bench throughput"])
def test_every_flag_and_value_that_cannot_be_taken_is_named_at_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--kv-transfer-config {} --max-num-seqs many --cpu-offload-gb 10 --xyzzy --enable-sleep-mode --dtype half"
    for _ in range(2):  # nothing is left from one command line to the next
        with pytest.raises(SystemExit) as stopped:
            main([*command.split(), *line.split()])
        assert stopped.value.code == 2
        said = one_error(capsys)
        named = ["--kv-transfer-config is", "--max-num-seqs: must", "--cpu-offload-gb: 10 is", "--enable-sleep-mode is"]
        assert all(said.count(one) == 1 for one in [*named, "unknown flag --xyzzy"]), said
        assert "--dtype" not in said


def test_reasoning_needs_no_switch_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    parse("--enable-reasoning", "--reasoning-parser", "qwen3")
    assert (
        "--enable-reasoning has no effect: reasoning is split wherever the chat template shows it"
        in capsys.readouterr().err
    )


def test_flags_of_missing_features_may_be_switched_off(capsys):
    args = CommandParser(prog="octavo serve")
    serve.add_arguments(args)
    args.parse_args(["--no-enable-dbo", "--no-trust-remote-code", "--no-use-tqdm-on-load", "--port", "1"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("serve", 55),
        ("chat", 8),
        ("fetch", 5),
        ("bench serve", 40),
        ("bench throughput", 35),
        ("bench latency", 25),
        ("bench startup", 2),
    ],
)
def test_help_states_every_default(command, count, capsys):
    """Of each flag, by device where it depends on that; the group that changes nothing excepted."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out.split("flags of vLLM that change nothing here")[0]
    entries = [" ".join(entry.split()) for entry in re.split(r"\n  (?=-)", text)[1:]]
    assert len(entries) > count
    assert not [entry for entry in entries if "default: " not in entry and not entry.startswith("-h,")]
    if command == "serve":
        assert "8192 on a GPU, 192 on a CPU" in " ".join(entries)


def test_commands(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in ("serve", "chat", "bench", "fetch", "plan"))


# --config


def from_file(tmp_path: Path, text: str, *argv: str) -> argparse.Namespace:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    parser = CommandParser(prog="octavo serve")
    serve.add_arguments(parser)
    return with_config_file(parser.parse_args(with_dashes([*argv, "--config", str(path)])))


SETTINGS = """
model: org/name
max_model_len: 4k
port: 8011
served-model-name: [a, b]
enable-prefix-caching: false
no-enable-auto-tool-choice: true
override-generation-config: {temperature: 0.5}
kv-cache-memory-bytes: 2GiB
chat-template: null
enable_lora: false
enable-chunked-prefill: true
"""


def test_flags_from_a_file(tmp_path, capsys):
    """Flag names as keys, in both spellings; the same as if they had been typed."""
    said = from_file(tmp_path, SETTINGS)
    assert from_flags(EngineArgs, said) == EngineArgs(
        model="org/name", max_model_len=4000, enable_prefix_caching=False, kv_cache_memory_bytes=2 << 30
    )
    assert from_flags(ServerArgs, said) == ServerArgs(
        port=8011,
        served_model_name=["a", "b"],
        enable_auto_tool_choice=False,
        override_generation_config={"temperature": 0.5},
    )
    assert not capsys.readouterr().err


@pytest.mark.parametrize("argv", [["other"], ["--model", "other"]])
def test_the_command_line_wins_over_the_file(tmp_path, argv):
    argv += ["--port", "9", "--served-model-name", "c", "--enable-prefix-caching"]
    said = from_file(tmp_path, SETTINGS, *argv)
    assert (said.model_tag or said.model) == "other" and (argv[0] != "other" or "model" not in said)
    assert (said.port, said.served_model_name, said.enable_prefix_caching) == (9, ["c"], True)
    assert said.max_model_len == 4000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modle-len: 3", "unknown key 'max-modle-len'; did you mean max-model-len?"),
        ("config: x", "unknown key 'config'"),
        ("port: [1, 2]", "port: takes one value, got a list"),
        ("port: abc", "--port: must be a whole number"),
        ("enforce-eager: 3", "enforce-eager: must be true or false, got 3"),
        ("fully_sharded_loras: true", "--fully-sharded-loras is not supported yet"),
        ("- port", "must hold flags and their values"),
        ("a: [", "is not valid YAML (line "),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_name(tmp_path, capsys, text, says):
    with pytest.raises(SystemExit) as stopped:
        from_file(tmp_path, text)
    assert stopped.value.code == 2
    said = one_error(capsys)
    assert said.startswith(f"{tmp_path}/serve.yaml: ") and says in said, said


def test_a_file_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(tmp_path / "none.yaml")])
    assert "none.yaml: cannot be read (No such file or directory)" in one_error(capsys)
