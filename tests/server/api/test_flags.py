"""The command line: vLLM's flag names in both spellings, and no flag that is accepted and ignored."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from octavo.cli import serve
from octavo.cli.flags import from_flags, with_dashes
from octavo.cli.main import main
from octavo.config import EngineArgs
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
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
    if name in serve.ENGINE_CHOICES:
        value = next(choice for choice in serve.ENGINE_CHOICES[name] if choice != default)
        return value, value
    if isinstance(default, list):
        return "other", ["other"]
    if isinstance(default, dict):
        return '{"a": 1}', {"a": 1}
    kind = str(cls.__dataclass_fields__[name].type)
    if "int" in kind:
        return "7", 7
    return ("7.5", 7.5) if "float" in kind else ("other", "other")


@pytest.mark.parametrize("argument", ["--management-por=9001", "--served-model=x"])
def test_half_a_flag_is_none(argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The operator's rules about engine.args name flags; the start of one must not do the same."""
    with pytest.raises(SystemExit) as stopped:
        main(["serve", str(tmp_path / "no-model"), argument])
    assert stopped.value.code == 2
    assert f"unrecognized arguments: {argument}" in capsys.readouterr().err


def test_both_spellings():
    assert parse("--max_model_len", "128").max_model_len == parse("--max-model-len=128").max_model_len == 128
    assert parse("--served_model_name=my_model").served_model_name == ["my_model"], "values are left as they are"


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("4096", 4096), ("4k", 4000), ("4K", 4096), ("1M", 1 << 20)]
)
def test_lengths(text, value):
    assert parse("--max-model-len", text).max_model_len == value


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
    for flags in (["-tp", "2"], ["--tokenizer-mode", "slow"], ["--default-chat-template-kwargs", "[1]"]):
        with pytest.raises(SystemExit):
            parse(*flags)
        assert flags[1] in capsys.readouterr().err


def test_flags_of_vllm_that_are_not_built_say_so(capsys):
    for flags in (["--enable-lora"], ["--hf-overrides", "{}"], ["--hf_token", "hf_secret"]):
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


def test_unknown_flags_and_commands(capsys):
    for argv in (["serve", "--no-such-flag"], ["dance"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out
