"""How near the speeds of `octavo plan` come after a calibration, and whether its --max-num-seqs is a good one.

    python -m benchmarks plan_accuracy [MODEL]

Serves the model on this machine, calibrates by it in about a minute, then prints six points (users, lengths): tokens a
second and the median time to the first token as planned and as measured. Then it serves the model with several
--max-num-seqs and prints how many tokens a second each gives, beside the one that is advised. About six minutes on a
quiet machine; figures of a busy one say nothing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from octavo.bench.calibrate import Bench, calibrate, server_blocks
from octavo.bench.local_server import local_server
from octavo.engine.args import EngineArgs
from octavo.memory.dry_run import Plan, make_plan
from octavo.memory.ledger import this_machine
from octavo.plan.model import planned_model
from octavo.plan.speed import Speed
from octavo.plan.workload import Workload, outlook

POINTS = ((1, 64, 128), (1, 1024, 64), (4, 256, 128), (8, 512, 64), (16, 128, 128), (16, 512, 128))
SECONDS = 12.0  # of each point, about
USERS, CONTEXT, OUTPUT = 16, 128, 64  # of the sweep
SWEEP = (2, 4, 8, 16, 32)
LIMITS = {"tok/s": 0.20, "TTFT": 0.30, "advice": 0.05}


def plan_of(model: str, max_num_seqs: int | None = None) -> Plan:
    """On this machine's CPU."""
    args = EngineArgs(model=model, device="cpu", max_num_seqs=max_num_seqs)
    with planned_model(args) as found:
        return make_plan(replace(found.config, device="cpu"), this_machine(), found.measure)


def points(model: str) -> tuple[Speed, bool]:
    """Prints the points. Returns the speed, and whether all are near."""
    plan, near = plan_of(model), True
    assert plan.ledger is not None, plan.problem
    with local_server(["--model", model, "--device", "cpu"]) as server:
        print("KV cache:", server_blocks(server.url), "on the server,", plan.ledger.num_blocks - 1, "planned")
        speed, _ = calibrate(server.url, plan, lambda text: print(text, file=sys.stderr))
        speed = replace(speed, source="now")
        bench = Bench(server.url, None, SECONDS)
        print("users  context  output     tok/s planned  measured        TTFT planned    measured")
        for users, context, output in POINTS:
            planned = outlook(plan, Workload(context, output, users), speed)
            seen = bench.point(users, context, output)
            rate, ttft = planned.tokens_per_second / seen.tokens_per_second - 1, planned.ttft / seen.ttft - 1
            near &= abs(rate) <= LIMITS["tok/s"] and abs(ttft) <= LIMITS["TTFT"]
            print(
                f"{users:5} {context:8} {output:7} {planned.tokens_per_second:17,.1f} {seen.tokens_per_second:9,.1f} "
                f"{rate:+6.0%} {planned.ttft * 1e3:9,.0f} ms {seen.ttft * 1e3:8,.0f} ms {ttft:+6.0%}",
                flush=True,
            )
    return speed, near


def sweep(model: str, speed: Speed) -> bool:
    """Prints tokens a second by --max-num-seqs, the better of two rounds, there and back. Returns whether the advised
    one is near the best."""
    advised = outlook(plan_of(model), Workload(CONTEXT, OUTPUT, USERS), speed).max_num_seqs
    tried = sorted({*SWEEP, advised})
    found = dict.fromkeys(tried, 0.0)
    for seqs in (*tried, *reversed(tried)):
        with local_server(["--model", model, "--device", "cpu", "--max-num-seqs", str(seqs)]) as server:
            rate = Bench(server.url, None, SECONDS).point(USERS, CONTEXT, OUTPUT).tokens_per_second
        found[seqs] = max(found[seqs], rate)
    for seqs, rate in found.items():
        mark = "   advised" if seqs == advised else ""
        print(f"--max-num-seqs {seqs:3} {rate:9,.1f} tok/s for {USERS} users{mark}")
    share = found[advised] / max(found.values())
    print(f"the advised one gives {share:.1%} of the best")
    return share >= 1 - LIMITS["advice"]


def main() -> int:
    """Returns 0 where all is within `LIMITS`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="Model (default: %(default)s)")
    parser.add_argument("--no-sweep", action="store_true", help="The points alone (default: off)")
    args = parser.parse_args()
    speed, near = points(args.model)
    good = args.no_sweep or sweep(args.model, speed)
    print("within the limits" if near and good else "outside of the limits", LIMITS)
    return 0 if near and good else 1


if __name__ == "__main__":
    sys.exit(main())
