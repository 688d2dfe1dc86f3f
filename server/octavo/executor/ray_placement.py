"""Places the nodes of an engine on a Ray cluster: a process beside the engine's, which alone talks to Ray.

    python -m octavo.executor.ray_placement     (`Placement` does this)

It reads a line of JSON that says how many ranks there are, reserves room for them, says where, and on a second line has
Ray start `octavo.executor.ray_node` on each other node. Ray carries that line and how a node ended; steps and tensors
go over the nodes' own connections. When this process ends, by the end of stdin too, Ray ends what it has started.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig
from octavo.system.environment import RAY_SECRETS, process_environment
from octavo.system.logging_setup import logging_options
from octavo.system.parent import die_with_parent

logger = logging.getLogger(__name__)

ROOM_SECONDS = 60.0  # that Ray gets to find room


def check_ray() -> None:
    """Raise ConfigError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "distributed_executor_backend ray needs the package ray, of one version on all nodes: pip install "
            "'octavo[ray]'"
        )


class Placement:
    """Room for an engine's ranks on a Ray cluster, as long as it is not closed."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError where there is no cluster, or no room in it."""
        check_ray()
        self.token = secrets.token_hex(32)
        self.problem: str | None = None  # why a node has ended, or all of them
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.executor.ray_placement"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            env={"RAY_USAGE_STATS_ENABLED": "0", **process_environment(*RAY_SECRETS)},
        )
        parallel = config.parallel
        asked = {"ranks": parallel.world_size, "nodes": parallel.nnodes, "device": config.device}
        self._send({"parent": os.getpid(), **asked})
        found = self._receive()
        if found is None or "error" in found:
            self.close()
            raise ConfigError(found["error"] if found else "Ray's driver has ended, see its message above")
        self.config = replace(config, parallel=replace(parallel, nnodes=found["nodes"], master_addr=found["address"]))

    def place(self) -> None:
        """Have Ray start the other nodes, which connect to this one."""
        self._send({"config": self.config.to_dict(), "token": self.token, **logging_options()})
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()

    def _watch(self) -> None:
        ended = self._receive()
        self.problem = ended["error"] if ended else "Ray's driver has ended"

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # `_receive` tells
            pass

    def _receive(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Give the room back, and end the nodes."""
        self._process.kill()
        self._process.wait()


def choose_nodes(capacities: list[float], ranks: int, nodes: int) -> int:
    """Choose over how many nodes to spread ``ranks``, as many on each: ``nodes`` or, if that is 1, as few as possible.
    ``capacities``: ranks that there is room for on each, this machine's first. Raises ConfigError."""
    for count in [nodes] if nodes > 1 else range(1, ranks + 1):
        fitting = sum(capacity >= ranks / count for capacity in capacities)
        if ranks % count == 0 and fitting >= count and capacities[0] >= ranks / count:
            return count
    shown = ", ".join(f"{capacity:g}" for capacity in capacities)
    wanted = f"{nodes} nodes" if nodes > 1 else "any number of nodes"
    raise ConfigError(
        f"Ray's nodes have {shown} CPUs or GPUs, this one's first: {ranks} ranks find no room on {wanted} with as many "
        "on each"
    )


def main() -> int:
    """Run the placement; returns the exit status."""
    asked = json.loads(sys.stdin.readline())
    die_with_parent(asked["parent"])
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from octavo.executor.ray_node import run_node

    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="error")
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        return _say(error=f"no Ray cluster answers here ({_line(error)}); run ray start --head, or set RAY_ADDRESS")
    here = ray.get_runtime_context().get_node_id()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
    kind = "GPU" if asked["device"] != "cpu" and "GPU" in alive[0]["Resources"] else "CPU"
    capacities = [node["Resources"].get(kind, 0.0) for node in alive]
    try:
        count = choose_nodes(capacities, asked["ranks"], asked["nodes"])
    except ConfigError as error:
        return _say(error=str(error))
    per_node = asked["ranks"] // count
    # CPUs: as many as the smallest node has, since ranks use all that they find
    amount = per_node if kind == "GPU" else int(sorted(capacities, reverse=True)[count - 1])
    address = alive[0]["NodeManagerAddress"]
    bundles = [{kind: amount} for _ in range(count)]
    bundles[0][f"node:{address}"] = 0.001
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(ROOM_SECONDS):
        return _say(
            error=f"Ray found no room within {ROOM_SECONDS:g} s for {count} nodes with {amount} free {kind}s each; its "
            f"{len(alive)} nodes have {', '.join(f'{c:g}' for c in capacities)} in all"
        )
    _say(nodes=count, address=address)
    line = sys.stdin.readline()
    threading.Thread(target=_exit_when_stdin_ends, daemon=True).start()
    tasks = []
    for node in range(1, count):
        amounts = {"num_gpus": amount} if kind == "GPU" else {"num_cpus": amount}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        task = ray.remote(run_node).options(max_retries=0, scheduling_strategy=strategy, **amounts)
        tasks.append(task.remote(line, node))
    if tasks:
        (first, *_), _ = ray.wait(tasks)
        node = tasks.index(first) + 1
        try:
            said = ray.get(first)
        except RayError as error:
            said = _line(error)
        _say(error=f"node {node} of Ray's has ended: {said}")
    threading.Event().wait()
    return 0


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _say(**message: Any) -> int:
    print(json.dumps(message), flush=True)
    return 1


def _exit_when_stdin_ends() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
