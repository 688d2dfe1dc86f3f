"""`octavo plan MODEL`: what a model takes of a device, and how many sequences fit, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from octavo.engine.args import EngineArgs
from octavo.entrypoints.args import ServerArgs
from octavo.errors import ConfigError
from octavo.flags.config_file import ConfigFile, with_config_file
from octavo.flags.engine_flags import ENGINE_HELP, add_engine_flags
from octavo.flags.fields import from_flags, parse_int
from octavo.flags.parser import CommandParser
from octavo.flags.server_flags import add_server_flags
from octavo.flags.vllm_flags import add_vllm_flags
from octavo.interface.engine_config import EngineConfig
from octavo.memory.advice import refusal, suggestions
from octavo.memory.dry_run import Plan, make_plan
from octavo.plan.calibration import load_speed, save_speed
from octavo.plan.deployment import as_yaml, deployment, left_out
from octavo.plan.device import PlannedDevice, planned_device
from octavo.plan.gpus import GPUS
from octavo.plan.model import PlannedModel, planned_model
from octavo.plan.prices import Price, cost_of, read_price
from octavo.plan.report import as_json, as_text, explanation, rank_rows
from octavo.plan.speed import Speed
from octavo.plan.workload import Outlook, Workload, outlook
from octavo.system import limits

_LAYOUTS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (8, 1), (4, 2))  # (tensor, pipeline) parallel sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `octavo plan`, and those of `octavo serve`."""
    parser.usage = "%(prog)s MODEL [--gpu NAME | --memory SIZE | --cpu] [flags]"
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help=ENGINE_HELP["model"].replace("to serve", "to plan for") + ". A folder with config.json alone, or that "
        "file, is enough. Only headers are read from a hub",
    )
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        action=ConfigFile,
        default=argparse.SUPPRESS,
        help="Read flags from a YAML file, by their names. Flags on the command line win (default: none)",
    )
    _add_device_flags(parser.add_argument_group("device"))
    _add_workload_flags(parser.add_argument_group("workload"))
    output = parser.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="Print one JSON object (default: off)")
    output.add_argument("--yaml", action="store_true", help="Print an LLMDeployment to apply (default: off)")
    output.add_argument("--explain", action="store_true", help="Explain each figure (default: off)")
    changing = "Flags that change neither memory nor capacity, such as --seed, have no effect on the plan."
    engine = parser.add_argument_group("engine, as octavo serve takes them", changing)
    add_engine_flags(engine, skip=("tensor_parallel_size", "pipeline_parallel_size"))
    add_server_flags(
        parser.add_argument_group("server, as octavo serve takes them: no effect but on what --yaml prints")
    )
    add_vllm_flags(parser)
    if isinstance(parser, CommandParser):
        parser.takes_vllm_flags = True


def _add_device_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gpu", metavar="NAME", help=f"GPU to plan for: {', '.join(GPUS)} (default: this machine's, if it has one)"
    )
    group.add_argument("--gpus", type=parse_int, metavar="N", help="Number of GPUs of an engine (default: tp x pp)")
    group.add_argument(
        "--cpu", action="store_true", help="Plan for this machine's CPU and memory (default: if it has no GPU)"
    )
    group.add_argument(
        "--memory",
        type=parse_int,
        metavar="SIZE",
        help="Memory that the engine may use, as 24GiB: the GPU's with --gpu, else the machine's or the container's "
        "(default: this machine's)",
    )
    for name, short in (("tensor", "tp"), ("pipeline", "pp")):
        group.add_argument(
            f"--{name}-parallel-size",
            f"-{short}",
            type=parse_int,
            metavar="N",
            help=f"Devices that share the model by {name} parallelism. Plans include GPUs; engines do not run it there "
            "yet (default: 1)",
        )
    group.add_argument(
        "--calibrate",
        metavar="URL",
        help="Measure the server at this address for a minute and store its speed for later plans. It must serve the "
        "model on the device (default: off)",
    )


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--context", type=parse_int, metavar="TOKENS", help="Number of tokens of a prompt (default: none)"
    )
    group.add_argument(
        "--output", type=parse_int, metavar="TOKENS", help="Number of tokens of an answer (default: 256)"
    )
    group.add_argument("--users", type=parse_int, metavar="N", help="Number of concurrent requests (default: 1)")
    group.add_argument("--rps", type=float, metavar="N", help="Number of requests per second (default: none)")
    group.add_argument(
        "--prefix-share",
        type=float,
        metavar="SHARE",
        help="Fraction of a prompt that all prompts share, from 0 to 1 (default: 0)",
    )
    group.add_argument(
        "--ttft", type=_seconds, metavar="TIME", help="Target time to the first token, as 500ms (default: any)"
    )
    group.add_argument(
        "--prices",
        metavar="FILE.toml",
        help="Price of devices per hour, as h100 = 2.99 or cpu = 0.4. Adds costs to the plan (default: none)",
    )
    group.add_argument(
        "--itl", type=_seconds, metavar="TIME", help="Target time between tokens, as 40ms (default: any)"
    )


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a time, as 500ms or 2s, got {text!r}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


@dataclass(frozen=True)
class _Asked:
    """The request of a command line."""

    engine: EngineArgs
    server: ServerArgs
    device: PlannedDevice
    ranks: int
    stages: int
    work: Workload | None
    price: Price | None


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 0 where the model fits, 1 where it does not. Raises OctavoError."""
    flags = with_config_file(args)
    args = argparse.Namespace(**{**vars(args), **vars(flags)})
    asked = _asked(args)
    with planned_model(asked.engine) as model:
        config = replace(model.config, device=asked.device.memory.kind)
        plan = make_plan(config, asked.device.memory, model.measure, asked.ranks, asked.stages)
        speed = _calibrated(args, asked, plan) if args.calibrate else _speed(asked, plan)
        if args.yaml:
            _print_yaml(asked, model, plan)
            return 0
        return _print(args, asked, model, config, plan, speed)


def _asked(args: argparse.Namespace) -> _Asked:
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "nnodes": 1}  # see `_layout`
    engine: EngineArgs = replace(from_flags(EngineArgs, args), **one)
    server: ServerArgs = from_flags(ServerArgs, args)
    server.check()
    if args.model_tag is not None:
        if engine.model not in (None, args.model_tag):
            raise ConfigError(f"two models are named, {args.model_tag} and {engine.model}: give one")
        engine.model = args.model_tag
    device = planned_device(args.gpu, args.memory, args.cpu, engine.device)
    price = read_price(args.prices, "cpu" if device.memory.kind == "cpu" else device.name) if args.prices else None
    return _Asked(engine, server, device, *_layout(args), _workload(args), price)


def _print_yaml(asked: _Asked, model: PlannedModel, plan: Plan) -> None:
    if model.unsupported:
        raise ConfigError(f"there is no LLMDeployment of what the engine does not run: {model.unsupported}")
    manifest = deployment(plan, asked.engine, limits.cpu_count(), asked.server)
    for flag in left_out(asked.server):
        print(f"# {flag} is left out: the operator sets it")
    print(as_yaml(manifest))


def _print(
    args: argparse.Namespace, asked: _Asked, model: PlannedModel, config: EngineConfig, plan: Plan, speed: Speed | None
) -> int:
    found = suggestions(config, plan, model.measure, asked.device.host)
    seen = outlook(plan, asked.work, speed) if asked.work and speed and plan.ledger else None
    reasons = _reasons(asked, model, config, plan, seen)
    devices = plan.num_devices // plan.parts_of_machine
    cost = cost_of(asked.price, devices, seen) if asked.price and plan.ledger else None
    if args.json:
        said: dict[str, Any] = as_json(plan, found, reasons, served=not model.unsupported and plan.obstacle is None)
        said["architecture"], said["fast_formats"] = model.architecture, asked.device.formats
        if seen is not None and speed is not None:
            said["workload"] = seen.as_json(speed)
        if cost is not None:
            said["cost"] = cost.as_json()
        print(json.dumps(said))
    else:
        formats = [f"{'formats':14} {asked.device.formats}"] if asked.device.formats else []
        lines = as_text(plan, model.architecture, found, formats + reasons, seen, speed, cost)
        if plan.device.kind != "cpu" and (plan.num_devices > 1 or plan.ledger is None):
            lines += rank_rows([_plan_or_none(config, plan, model, *layout) for layout in _LAYOUTS], speed)
        lines += explanation(plan) if args.explain else []
        print("\n".join(lines))
    return 0 if plan.ledger is not None else 1


def _plan_or_none(config: EngineConfig, plan: Plan, model: PlannedModel, ranks: int, stages: int) -> Plan | None:
    """Return None if that number of devices cannot share the model."""
    try:
        return make_plan(config, plan.device, model.measure, ranks, stages)
    except ConfigError:
        return None


def _layout(args: argparse.Namespace) -> tuple[int, int]:
    """The sizes of tensor and pipeline parallelism."""
    ranks, stages, devices = args.tensor_parallel_size, args.pipeline_parallel_size, args.gpus
    for flag, value in (("--tensor-parallel-size", ranks), ("--pipeline-parallel-size", stages), ("--gpus", devices)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    stages = stages or 1
    ranks = ranks or (devices or 1) // stages if devices is None or ranks is None else ranks
    if devices is not None and ranks * stages != devices:
        raise ConfigError(f"--gpus {devices} is not --tensor-parallel-size x --pipeline-parallel-size: give two")
    return max(1, ranks), stages


def _workload(args: argparse.Namespace) -> Workload | None:
    """None: nothing was said of it. Raises ConfigError."""
    given = (args.context, args.output, args.users, args.rps, args.ttft, args.itl)
    if all(value is None for value in given):
        return None
    if args.users is not None and args.rps is not None:
        raise ConfigError("--users and --rps are two ways to say how many requests there are: give one")
    for name, value in (("--context", args.context), ("--output", args.output), ("--users", args.users)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if args.rps is not None and not 0 < args.rps < 1e6:
        raise ConfigError(f"--rps must be above 0 and below 1000000, got {args.rps:g}")
    share = args.prefix_share or 0.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--prefix-share must be from 0 to 1, got {share:g}")
    return Workload(args.context or 1024, args.output or 256, args.users, args.rps, share, args.ttft, args.itl)


def _speed(asked: _Asked, plan: Plan) -> Speed | None:
    """Measured, else by a data sheet; None: not known, and not needed. Raises ConfigError."""
    found = load_speed(asked.device.name, plan.config.model.model) or asked.device.speed
    if found is None and asked.work is not None:
        raise ConfigError(f"how fast {asked.device.name} is, is not known: name one like it with --gpu, or --calibrate")
    return found


def _calibrated(args: argparse.Namespace, asked: _Asked, plan: Plan) -> Speed:
    from octavo.bench.calibrate import calibrate, server_blocks

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    url, key = args.calibrate.rstrip("/").removesuffix("/v1"), next(iter(asked.server.api_key), None)
    blocks = server_blocks(url, key)
    planned = plan.ledger.num_blocks - 1 if plan.ledger is not None else 0
    if blocks is not None and blocks[0] != planned:
        say(f"the server has {blocks[0]:,} KV cache blocks of {blocks[1]}, the plan {planned:,}: other flags or memory")
    speed, points = calibrate(url, plan, say, key)
    path = save_speed(asked.device.name, plan.config.model.model, speed, points)
    say(f"calibrated {asked.device.name}: kept in {path}")
    return replace(speed, source=str(path))


def _reasons(asked: _Asked, model: PlannedModel, config: EngineConfig, plan: Plan, seen: Outlook | None) -> list[str]:
    reasons = []
    if model.unsupported:
        reasons.append(f"not served: {model.unsupported}")
    if plan.ledger is None:
        reasons.append(f"will not start: {refusal(config, plan, model.measure, asked.device.host)}")
    own_len = config.scheduler.max_model_len
    if plan.ledger is not None and plan.ledger.kv_cache and (cut := plan.ledger.shortened(own_len, config.cache)):
        reasons.append(cut)
    if plan.obstacle is not None:
        reasons.append(f"needs {plan.num_devices} devices: {plan.obstacle}")
    if plan.config.load_format == "dummy" and plan.config.model.text.quantization_config:
        reasons.append("weights are estimated by what config.json says of their format: headers are not here")
    return reasons + list(seen.problems if seen is not None else ())
