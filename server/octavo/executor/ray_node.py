"""A node of an engine that Ray has placed: `run_node` is Ray's task, and waits for the process that is the node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from octavo.errors import OctavoError
from octavo.system.environment import process_environment


def run_node(line: str, node: int) -> str:
    """Run node ``node`` until it ends; returns why it has. ``line``: see `octavo.executor.ray_placement`."""
    message = json.dumps({**json.loads(line), "node": node, "parent": os.getpid()})
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.executor.ray_node"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=process_environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(message.encode() + b"\n")  # its end would end the process: it stays open
    process.stdin.flush()
    said = process.stdout.read().decode(errors="replace").strip()
    code = process.wait()
    return said or f"exit code {code}, see the logs of Ray's workers there"


def main() -> int:
    """Be the node that a line of JSON on stdin describes; returns the exit status."""
    from octavo.executor.headless import NodeState, run_headless
    from octavo.executor.tls_channel import TOKEN
    from octavo.interface.engine_config import EngineConfig
    from octavo.system.logging_setup import setup_logging
    from octavo.system.parent import die_with_parent, read_line_from_stdin

    message = json.loads(read_line_from_stdin())
    die_with_parent(message["parent"])
    setup_logging(message["level"], message["log_format"], process=f"node {message['node']}")
    os.environ[TOKEN] = message["token"]
    config = EngineConfig.from_dict(message["config"])
    config = replace(config, parallel=replace(config.parallel, node_rank=message["node"]))
    files = config.model.files
    missing = [path for path in (files.directory, *files.weights) if not Path(path).exists()]
    try:
        if missing:
            raise OctavoError(
                f"{missing[0]} is not there: have the model's files at the same place on all of Ray's nodes"
            )
        run_headless(config, NodeState())
    except OctavoError as error:
        print(error, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
