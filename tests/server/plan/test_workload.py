"""What is said of a workload, and the LLMDeployment that a plan becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema_rs
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.cli import plan as plan_command
from octavo.cli import serve
from octavo.cli.main import main
from octavo.engine.args import EngineArgs
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError
from octavo.flags.fields import from_flags
from octavo.flags.parser import CommandParser
from octavo.memory.dry_run import Plan, make_plan
from octavo.plan.gpus import CONTEXT_BYTES, GPUS, LEAST_CAPABILITY, find_gpu
from octavo.plan.measure import measure
from octavo.plan.model import planned_model
from octavo.plan.speed import Point, Speed, fit_speed, pace, step_seconds
from octavo.plan.workload import Workload, outlook
from octavo.system.cuda_driver import gpu_here
from octavo_kernels import triton

ROOT = Path(__file__).parents[3]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(folder)


@pytest.fixture(scope="module")
def plan(llama: str) -> Plan:
    device = find_gpu("h100").memory()
    with planned_model(EngineArgs(model=llama, load_format="dummy")) as model:
        return make_plan(replace(model.config, device=device.kind), device, measure)


@pytest.fixture(scope="module")
def schema() -> Any:
    (crd,) = yaml.safe_load_all((ROOT / "crds" / "octavo.dev_llmdeployments.yaml").read_text())
    return strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """With fields that are not there refused: the API server would prune them."""
    if isinstance(schema, list):
        return [strict(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if not key.startswith("x-")}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object" and "spec" not in found:
        found.setdefault("additionalProperties", False)
    return found


FLAGS = st.lists(
    st.sampled_from(
        [
            ("--max-model-len", "4096"),
            ("--max-num-seqs", "16"),
            ("--kv-cache-dtype", "bfloat16"),
            ("--dtype", "bfloat16"),
            ("--quantization", "int8"),
            ("--gpu-memory-utilization", "0.85"),
            ("--gpu-memory-utilization", "0.875"),
            ("--no-enable-prefix-caching",),
            ("--block-size", "32"),
            ("--kv-cache-memory-bytes", "2GiB"),
        ]
    ),
    max_size=5,
    unique_by=lambda flag: flag[0],
)
DEVICES = st.sampled_from([("--gpu", "h100"), ("--gpu", "b200"), ("--memory", "64GiB"), ("--memory", "64000000000")])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flags=FLAGS, device=DEVICES)
def test_yaml_is_an_llmdeployment(
    flags: list[tuple[str, ...]], device: tuple[str, str], llama: str, schema: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [llama, *device, *(word for flag in flags for word in flag)]
    assert main(["plan", *argv, "--yaml"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    jsonschema_rs.validate(schema, manifest)
    assert main(["plan", *argv, "--json"]) == 0
    said, engine = json.loads(capsys.readouterr().out), manifest["spec"]["engine"]
    assert (engine["maxModelLen"], engine["maxNumSeqs"]) == (said["max_model_len"], said["max_num_seqs"])
    assert ("accelerator" in manifest["spec"]) == (device[0] == "--gpu")
    assert manifest["metadata"]["name"] == "llama-3-1-8b"
    for flag in flags:
        if flag[0] in ("--block-size", "--kv-cache-dtype"):
            assert f"{flag[0]}={flag[1]}" in engine["args"]


def test_yaml_of_what_does_not_fit_is_refused(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--memory", "8GiB", "--yaml"]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("octavo: error: there is no LLMDeployment of what does not fit")


@settings(max_examples=60, deadline=None)
@given(
    context=st.integers(1, 6000),
    output=st.integers(1, 1500),
    users=st.integers(1, 300),
    share=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_a_heavier_workload_is_never_better(context: int, output: int, users: int, share: float, plan: Plan) -> None:
    speed = Speed.of_gpu(GPUS["h100"])
    base = outlook(plan, Workload(context, output, users, None, share), speed)
    longer = outlook(plan, Workload(context + 512, output, users, None, share), speed)
    more = outlook(plan, Workload(context, output, users + 10, None, share), speed)
    shared = outlook(plan, Workload(context, output, users, None, min(1.0, share + 0.1)), speed)
    assert longer.capacity <= base.capacity <= shared.capacity + 1
    assert more.ttft >= base.ttft and more.itl >= base.itl
    assert base.capacity <= base.mean_capacity
    whole = outlook(plan, Workload(context, output, users), speed)
    assert whole.capacity == plan.sequences_of(context + output)


def test_a_shared_prefix_is_held_once(plan: Plan) -> None:
    """Half of a prompt that all have in common leaves nearly twice the room for what is each one's own."""
    speed, usable = Speed.of_gpu(GPUS["h100"]), plan.ledger.num_blocks - 1 if plan.ledger else 0
    alone, together = (outlook(plan, Workload(3200, 160, 8, None, share), speed) for share in (0.0, 0.5))
    assert alone.capacity == usable // (3360 // 16)
    assert together.capacity == (usable - 1600 // 16) // (1760 // 16) > 1.8 * alone.capacity
    assert together.ttft < 0.8 * alone.ttft, "only its own part of a prompt is computed"


def test_goals_are_compared_and_advice_keeps_them(plan: Plan) -> None:
    speed = Speed.of_gpu(GPUS["h100"])
    tight = outlook(plan, Workload(4000, 500, 200, itl=0.015, ttft=0.1), speed)
    assert any("between tokens" in problem for problem in tight.problems)
    assert any("first token" in problem for problem in tight.problems)
    kept = outlook(plan, Workload(4000, 500, tight.max_num_seqs, itl=0.015), speed)
    assert kept.itl <= 0.015 and not kept.problems
    few = replace(plan, config=replace(plan.config, scheduler=replace(plan.config.scheduler, max_num_seqs=2)))
    asked = outlook(few, Workload(1000, 200, 20), speed)
    assert asked.max_num_seqs == 20 and any("--max-num-seqs lets 2 run" in problem for problem in asked.problems)
    slow, fast = (outlook(plan, Workload(1000, 200, None, rps), speed) for rps in (0.5, 8.0))
    assert slow.users < fast.users


def test_engines_share_a_workload(plan: Plan) -> None:
    """On GPUs of their own two carry twice the users at the pace of one; on a CPU each has half of its speed. A request
    alone is no faster with two. Prompts and answers are held to the ranks' and engines' shares of a machine."""
    speed = Speed.of_gpu(GPUS["h100"])
    parallel = plan.config.parallel
    two = replace(plan, config=replace(plan.config, parallel=replace(parallel, data_parallel_size=2)))
    for users, rps in ((8, None), (600, None), (None, 4.0)):
        one = outlook(plan, Workload(1000, 200, users, rps), speed)
        both = outlook(two, Workload(1000, 200, users and 2 * users, rps and 2 * rps), speed)
        assert (both.ttft, both.itl, both.max_num_seqs) == pytest.approx((one.ttft, one.itl, one.max_num_seqs))
        for name in ("users", "capacity", "mean_capacity", "tokens_per_second"):
            assert getattr(both, name) == pytest.approx(2 * getattr(one, name), rel=1e-6), name
        assert len(one.problems) == len(both.problems)
    assert outlook(two, Workload(1000, 200, 1), speed) == replace(
        outlook(plan, Workload(1000, 200, 1), speed),
        capacity=2 * plan.sequences_of(1200),
        mean_capacity=2 * plan.sequences_of(1100),
    )
    on_cpu, both_on_cpu = (replace(each, device=replace(each.device, kind="cpu")) for each in (plan, two))
    slow = replace(speed, bandwidth=speed.bandwidth / 2, flops=speed.flops / 2)
    assert step_seconds(both_on_cpu, speed, 4, 900, 30) == pytest.approx(step_seconds(on_cpu, slow, 4, 900, 30))


KEYS: dict[str, type] = {
    "model": str,
    "weights_bytes": int,
    "kv_bytes_per_token": int,
    "block_size": int,
    "kv_cache_bytes": int,
    "num_blocks": int,
    "max_model_len": int,
    "max_num_seqs": int,
    "max_concurrency": float,
    "fits": bool,
    "tensor_parallel_size": int,
    "reasons": list,
    "suggestions": list,
    "served": bool,
}


@pytest.mark.parametrize(
    "device",
    [
        *(("--gpu", name) for name in ("l4", "a10", "rtx4090", "a100-40gb", "a100-80gb", "h100", "h200", "b200")),
        ("--memory", "8GiB"),
        ("--memory", "64GiB"),
        ("--gpu", "a10g", "-tp", "2"),
        ("--cpu",),
    ],
)
def test_scripts_find_the_keys_that_they_rely_on(
    device: tuple[str, ...], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it fits or not, of a folder with config.json alone or of that file."""
    status = main(["plan", llama, *device, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert {key: type(said[key]) for key in KEYS} == KEYS
    assert status == (0 if said["fits"] else 1)
    refused = [reason for reason in said["reasons"] if "will not start" in reason]
    assert bool(refused) != said["fits"]
    assert all(set(way) == {"flag", "value", "text"} for way in said["suggestions"])
    assert all(isinstance(text, str) for way in said["suggestions"] for text in way.values())
    assert said["served"], "one machine does it, with one device or two"
    assert said["kv_bytes_per_token"] == 131_072 or device[0] != "--gpu"
    if said["fits"] and device[0] == "--gpu":  # a CPU's context is shortened to what fits
        assert said["max_concurrency"] == pytest.approx(
            said["num_blocks"] * said["block_size"] / said["max_model_len"], abs=0.01
        )
    assert main(["plan", f"{llama}/config.json", *device, "--json"]) == status
    assert json.loads(capsys.readouterr().out.replace(f"{llama}/config.json", llama)) == said
    if not said["fits"]:
        assert main(["plan", llama, *device]) == 1
        assert "will not start" in capsys.readouterr().out


def test_cost_is_there_with_prices_alone(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\n"H100-80GB" = 3.6\ncpu = 0.5\nmi300x = 2\n')
    argv = [llama, "--gpus", "2", "--context", "1000", "--users", "8"]

    def plan(*flags: str) -> dict[str, Any]:
        assert main(["plan", *argv, *flags, "--json"]) == 0
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said

    assert "cost" not in plan("--gpu", "h100")
    said = plan("--gpu", "h100", "--prices", str(prices))
    cost = said["cost"]
    assert (cost["per_hour"], cost["currency"]) == (7.2, "EUR")
    tokens_an_hour = said["workload"]["tokens_per_second"] * 3600
    assert cost["per_million_output_tokens"] * tokens_an_hour / 1e6 == pytest.approx(7.2, rel=0.001)
    assert main(["plan", *argv, "--gpu", "h100", "--prices", str(prices)]) == 0
    assert "million output tokens, if requests never cease (an estimate: not calibrated)" in capsys.readouterr().out
    del argv[1:]
    cost = plan("--memory", "64GiB", "--prices", str(prices))["cost"]
    assert (cost["per_hour"], cost["per_million_output_tokens"]) == (0.5, None)
    for text, said_of_it in (("h100 = -1", "h100 must be"), ("l4 = 1", "no price of H100 80 GB"), ("=", "not TOML")):
        prices.write_text(text)
        assert main(["plan", *argv, "--gpu", "h100", "--prices", str(prices)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("octavo: error: --prices: ") and said_of_it in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu", "h1000"], "there is no 'h1000'"),
        (["--users", "3", "--rps", "2"], "give one"),
        (["--prefix-share", "1.5", "--users", "3"], "--prefix-share must be from 0 to 1"),
        (["--pipeline-parallel-size", "64", "--gpu", "h100"], "32 layers cannot be dealt to 64 pipeline stages"),
        (["--gpus", "4", "-tp", "3", "--gpu", "h100"], "--gpus 4 is not"),
        (["--device", "cuda"], "name one with --gpu"),
        (["--device", "cpu", "--gpu", "l4"], "give one"),
        (["--port", "70000"], "port must be between"),
        (["--cpu", "--gpu", "l4"], "give one"),
        (["--memory", "24"], "--memory must be at least 64 MiB, got 24 bytes; give a unit, as 24GiB"),
        (["--gpu", "h100", "--kv-cache-dtype", "int8"], "an int8 cache is for CPUs"),
        (["--memory", "64GiB", "--kv-cache-dtype", "fp8"], "an fp8 cache is for GPUs"),
        (["--gpu", "h100", "-tp", "3"], "cannot be split over 3 ranks"),
        (["--gpu", "a100", "--kv-cache-dtype", "fp8"], "an fp8 cache needs a GPU of compute capability 8.9"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], said: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, *argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: ") and said in line


def test_a_command_of_serve_is_taken_as_it_is() -> None:
    parsers = [CommandParser(), CommandParser()]
    for parser, command in zip(parsers, (serve, plan_command), strict=True):
        command.add_arguments(parser)
    assert set(parsers[0].flags()) <= set(parsers[1].flags())


@pytest.mark.parametrize("command", [serve, plan_command])
def test_a_key_made_of_a_file_is_read_without_its_newline(command: ModuleType) -> None:
    parser = CommandParser()
    command.add_arguments(parser)
    args: ServerArgs = from_flags(ServerArgs, parser.parse_args(["--api-key", "abc\n"]))
    assert args.api_key == ["abc"]


def test_flags_of_the_server_get_into_the_deployment(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--served-model-name", "llama", "--port", "9000", "--api-key", "abc", "--tool-call-parser", "hermes"]
    flags += ["--allowed-origins", "https://a.example", "https://b.example", "--trust-remote-code"]
    assert main(["plan", llama, "--memory", "64GiB", "--yaml", *flags]) == 0
    said = capsys.readouterr()
    spec = yaml.safe_load(said.out)["spec"]
    assert spec["model"]["name"] == "llama"
    assert spec["engine"]["args"] == [
        "--tool-call-parser=hermes",
        '--allowed-origins=["https://a.example", "https://b.example"]',
    ]
    assert said.out.startswith("# --port is left out") and "# --api-key is left out" in said.out
    assert "abc" not in said.out and "--trust-remote-code has no effect" in said.err


def test_an_architecture_that_is_not_built_is_planned_and_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"architectures": ["SomeNewForCausalLM"]}))
    assert main(["plan", str(tmp_path), "--gpu", "h100", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["fits"], said["served"], said["architecture"]) == (True, False, "SomeNewForCausalLM")
    assert said["kv_bytes_per_token"] == 131_072 and said["weights_bytes"] == pytest.approx(14.96 * 2**30, rel=0.01)
    assert said["reasons"][0].startswith("not served: architecture 'SomeNewForCausalLM' is not supported")
    held = {f"model.layers.{layer}.weight": torch.zeros(4, 4, dtype=torch.bfloat16) for layer in range(3)}
    save_file(held, tmp_path / "model.safetensors")  # its own size is known better
    assert main(["plan", str(tmp_path), "--gpu", "h100", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 48 and 96 <= said["weights_bytes"] < 2000
    for config in ({"architectures": ["JambaForCausalLM"]}, {"hidden_size": None, "architectures": ["XForCausalLM"]}):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | config))
        assert main(["plan", str(tmp_path), "--gpu", "h100"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("octavo: error: architecture ") and config["architectures"][0] in line


def test_layers_are_dealt_to_stages(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Llama 3 8B: 32 layers of 218,112,000 parameters, a table and a head of 525,336,576, and a norm."""
    flags = ["--gpu", "l4", "-pp", "2", "--json", "--kv-cache-memory-bytes", "4GiB"]
    assert main(["plan", llama, *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["weights_bytes"] == pytest.approx(2 * (16 * 218_112_000 + 525_336_576), rel=0.001)
    assert said["block_bytes"] == 16 * 131_072 // 2 and said["kv_bytes_per_token"] == 131_072
    assert said["pipeline_parallel_size"] == 2 and not said["served"]
    assert said["layers_per_stage"] == [16, 16] and said["weights_bytes"] in said["weights_bytes_per_stage"]
    assert main(["plan", llama, "--gpu", "l4", "--gpus", "4", "-pp", "2"]) == 0
    out = capsys.readouterr().out
    assert "needs 4 devices: pipeline parallelism is not there yet" in out and " 2 x 2 " in out
    assert main(["plan", llama, "--gpu", "h100", "-dp", "2"]) == 0
    assert "needs 2 devices: data parallelism is not there yet on GPUs" in capsys.readouterr().out


def test_a_fit_finds_the_speed_that_was_measured(plan: Plan) -> None:
    """Few rows take hardly longer than one, and tokens late in a prompt take longer than early ones."""
    speed = Speed(5e11, 1e14, 0.001, ((1, 1e-13), (4, 2e-13), (8, 2e-12), (16, 3e-12)), 3e11, 2e11, 0.004)
    four, six, eight = (step_seconds(plan, speed, users, 0) for users in (4, 6, 8))
    assert eight - four == pytest.approx(2 * plan.memory.parameters * 1.8e-12) == 2 * (six - four)

    def seen(users: int, context: int, output: int = 64) -> Point:
        found = pace(plan, speed, users, context, context, output)
        plain = step_seconds(plan, speed, users, context + output / 2)
        return Point(users, context, output, found.ttft, plain, found.tokens_per_second)

    points = [(1, 32), (4, 32), (8, 32), (16, 32), (1, 256), (1, 1024)]
    fitted = fit_speed(plan, [seen(users, context) for users, context in points])
    for users, context in ((1, 100), (4, 500), (16, 2000), (64, 256)):
        wanted, found = seen(users, context), pace(plan, fitted, users, context, context, 64)
        assert found.tokens_per_second == pytest.approx(wanted.tokens_per_second, rel=0.05)
        assert found.ttft == pytest.approx(wanted.ttft, rel=0.1)


class _Driver:
    """The shared libraries of a machine with one GPU, of which another process holds a part."""

    def __init__(self, capability: tuple[int, int] = (8, 9)) -> None:
        self.capability = capability

    def __getattr__(self, name: str) -> Any:
        def answer(*given: Any) -> int:
            out = {"cuDeviceTotalMem_v2": 23_654_000_000, "cuDeviceGetAttribute": 6_251_000}
            if name == "cuDeviceGetName":
                given[0].value = b"NVIDIA L4"
            elif name == "cuDeviceGetAttribute":
                given[0]._obj.value = {36: 6_251_000, 37: 192, 75: self.capability[0], 76: self.capability[1]}[given[1]]
            elif name == "cuDriverGetVersion":
                given[0]._obj.value = 12_080
            elif name in out:
                given[0]._obj.value = out[name]
            elif name == "nvmlDeviceGetMemoryInfo_v2":
                given[1]._obj.used = 1 << 30
            return 0

        return answer


def test_the_gpu_of_this_machine_is_the_default(
    llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gpu_here(lambda name: _Driver())
    assert found is not None and (found.total, found.used) == (23_654_000_000, 1 << 30)
    assert found.bandwidth == pytest.approx(300, rel=0.01) and found.capability == (8, 9)
    assert found.cuda == (12, 8)
    monkeypatch.setattr("octavo.plan.device.gpu_here", lambda: found)
    assert main(["plan", llama, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["device"] == "this machine's NVIDIA L4" and said["memory_bytes"] == found.total
    assert said["other_bytes"]["others, context"] == (1 << 30) + CONTEXT_BYTES
    assert main(["plan", llama, "--cpu", "--json"]) in (0, 1)
    assert "NVIDIA" not in json.loads(capsys.readouterr().out)["device"]


def test_a_gpu_that_is_too_old_is_refused(
    llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LEAST_CAPABILITY == triton.LEAST_CAPABILITY
    for name in ("t4", "Tesla T4", "NVIDIA-Tesla-V100-SXM2-16GB", "v100-32gb"):
        with pytest.raises(ConfigError, match=r"compute capability 7\.\d, and the kernels need 8\.0: take a newer GPU"):
            find_gpu(name)
    found = gpu_here(lambda name: _Driver((7, 5)))
    monkeypatch.setattr("octavo.plan.device.gpu_here", lambda: found)
    assert main(["plan", llama]) != 0
    said = capsys.readouterr()
    assert "compute capability 7.5" in said.out + said.err and "--cpu" in said.out + said.err
    assert main(["plan", llama, "--cpu"]) in (0, 1)


def test_gpus_have_less_than_their_names_say() -> None:
    assert find_gpu("NVIDIA_H100") is GPUS["h100"] and find_gpu("A100") is GPUS["a100-80gb"]
    assert find_gpu("NVIDIA-A100-SXM4-40GB") is GPUS["a100-40gb"] and find_gpu("Tesla-L4") is GPUS["l4"]
    for gpu in GPUS.values():
        if gpu.title.endswith(" GB"):
            assert gpu.gib < int(gpu.title.split()[-2])
    with pytest.raises(ConfigError, match="did you mean"):
        find_gpu("a100-80gbb")
