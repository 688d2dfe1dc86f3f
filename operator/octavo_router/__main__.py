"""python -m octavo_router: the picker beside an Envoy in one pod."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

import uvloop

from octavo_router import calls, lora, management, peers, rejections, replicas, rooms, tenants
from octavo_router.admission import Tenants
from octavo_router.hold import Hold
from octavo_router.server import Processor, Request

_KEPT_BYTES = 1 << 24  # twice as many are kept at most


async def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. Requests under way go on without a picker."""
    me = peers.address_of(args.peer_address, args.peer_port) if args.peers else ""
    processor = Processor(Hold(args.hold_requests, args.hold_seconds), Tenants(me))
    server = await calls.serve(lambda stream: Request(processor, stream), args.port)
    rejected = rejections.Rejections()
    told = {"GET /metrics": processor.page, "GET /held": processor.held}
    asked = {
        "GET /held": processor.held,
        "POST /refuse": processor.refuse,
        "POST /pause": processor.pause,
        "POST /resume": processor.resume,
        "GET /rejected": rejected.page,
    }
    address = args.management_address
    managing = [await management.start(told, address, args.management_port)]
    managing.append(await management.start(asked, address, args.control_port))
    tasks = [
        asyncio.create_task(replicas.follow(args.admin_port, processor.set_replicas)),
        asyncio.create_task(lora.follow(processor.replicas, args.engine_port, processor.set_adapters)),
    ]
    if args.rejections:
        tasks.append(asyncio.create_task(rejections.follow(args.admin_port, args.rejections, rejected)))
    if args.hold_requests:
        tasks.append(asyncio.create_task(rooms.follow(processor.replicas, args.engine_port, processor.set_rooms)))
    if args.tenants:
        others = peers.Peers(processor.tenants, me, peers.resolver(args.peers, args.peer_port)) if args.peers else None

        def limits_changed() -> None:
            processor.limits_changed()
            if others:
                others.tell_all()

        limits = tenants.follow_limits(args.tenants, processor.tenants, limits_changed)
        usage = tenants.follow_usage(
            processor.tenants, processor.replicas, args.engine_port, processor.metrics.usage_read
        )
        tasks += [asyncio.create_task(one) for one in (limits, usage, *([others.run()] if others else []))]
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    stopped = asyncio.create_task(ended.wait())
    await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for one in (server, *managing):
        one.close()
    for task in tasks:
        if task.done():
            task.result()  # none ends by itself: a fault of ours


def keep_memory() -> None:
    """Lets the C library keep what bodies have taken for those that follow: as long as it gives it back at once, half
    of the time to read one goes into pages that come anew. glibc does so up to the size of the largest piece that it
    has given back; others pay no heed."""
    bytes(_KEPT_BYTES)


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(prog="octavo_router", description="Choose the replica of each request for Envoy.")
    parser.add_argument("--port", type=int, default=9002, help="port for Envoy, on loopback")
    parser.add_argument("--admin-port", type=int, default=9901, help="port of Envoy's admin API, on loopback")
    parser.add_argument("--management-address", default="0.0.0.0", help="address of both ports")
    parser.add_argument(
        "--management-port", type=int, default=9001, help="port for metrics and the numbers of held requests"
    )
    parser.add_argument("--control-port", type=int, default=9003, help="port for the operator alone")
    parser.add_argument("--hold-requests", type=int, default=0, help="requests that may wait for a first replica")
    parser.add_argument("--hold-seconds", type=float, default=300, help="how long they may wait")
    parser.add_argument("--tenants", type=Path, help="file with the limits of a gateway's tenants")
    parser.add_argument("--rejections", type=Path, help="log file with the updates that Envoy rejected")
    parser.add_argument("--peers", help="DNS name of the pods of all routers, which share tenants' limits")
    parser.add_argument("--peer-address", help="address of this pod, for the other routers")
    parser.add_argument("--peer-port", type=int, default=9004, help="port for the pickers of other routers")
    parser.add_argument("--engine-port", type=int, default=8001, help="management port of replicas; 0: their API port")
    keep_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    args = parser.parse_args()
    if args.peers and not args.peer_address:
        parser.error("--peers needs --peer-address, at which other routers reach this one")
    uvloop.run(serve(args))


if __name__ == "__main__":
    main()
