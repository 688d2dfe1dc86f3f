"""``octavo bench serve|sweep|throughput|latency|startup``."""

from __future__ import annotations

import argparse
from importlib import import_module

# name -> (module, function that adds flags, function that runs, what it is for)
BENCHES = {
    "serve": ("octavo.bench.serve", "add_arguments", "run", "Load an OpenAI-compatible server."),
    "sweep": ("octavo.bench.sweep", "add_arguments", "run", "Compare configurations of `octavo serve` under load."),
    "throughput": (
        "octavo.bench.offline",
        "add_throughput_arguments",
        "run_throughput",
        "Run the engine on all prompts at once.",
    ),
    "latency": (
        "octavo.bench.offline",
        "add_latency_arguments",
        "run_latency",
        "Run the engine on one batch at a time.",
    ),
    "startup": ("octavo.bench.startup", "add_arguments", "run", "Measure how long `octavo serve` takes to be ready."),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each benchmark."""
    commands = parser.add_subparsers(title="benches", metavar=f"{{{','.join(BENCHES)}}}", required=True)
    for name, (module_name, add, run_name, text) in BENCHES.items():
        module = import_module(module_name)
        command = commands.add_parser(name, help=text, description=text)
        getattr(module, add)(command)
        command.set_defaults(bench=getattr(module, run_name))


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns its exit status."""
    status: int = args.bench(args)
    return status
