"""Engines that compute nothing: a prefix cache of text, prefill at a fixed rate, so many slots, streamed tokens. One
process serves several of them, each at its own port, which takes a second and not a core.

    python emulated_engines.py PORT... [--blocks N] [--slots N] [--prefill TOKENS_A_SECOND] [--token-seconds S]
        [--queue REQUESTS_THAT_MAY_WAIT_FOR_A_SLOT] [--tells-room 0]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import time
import urllib.request
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

BLOCK_CHARACTERS, TOKEN_CHARACTERS = 64, 4


def text_of(body: dict[str, Any]) -> str:
    """What a request's prompt holds, in order."""
    if "messages" in body:
        return "".join(f"{one['role']}\n{_said(one['content'])}\n" for one in body["messages"])
    return str(body["prompt"])


def _said(content: Any) -> str:
    """An image is as much as its hash."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part.get("text") or str(hash(json.dumps(part))) for part in parts)


class PrefixCache:
    """Blocks of text that are found again by all that stands before them. The least recently used go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, text: str) -> int:
        """Characters of the beginning that were there; all of the text is there afterwards."""
        hashes, chain = [], 0
        for start in range(0, len(text) - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS):
            chain = hash((chain, text[start : start + BLOCK_CHARACTERS]))
            hashes.append(chain)
        found = next((i for i, one in enumerate(hashes) if one not in self._blocks), len(hashes))
        for one in reversed(hashes):  # a prefix outlives what follows it
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)
        return found * BLOCK_CHARACTERS


class Replica:
    """The pace of one engine: who has a slot waits for its turn to prefill, at a fixed rate, what is not cached."""

    def __init__(self, blocks: int, slots: int, prefill: float) -> None:
        self._cache = PrefixCache(blocks)
        self._slots, self._turn, self._rate = asyncio.Semaphore(slots), asyncio.Lock(), prefill

    @contextlib.asynccontextmanager
    async def prefilled(self, text: str) -> AsyncIterator[int]:
        """Entered with the characters that were cached, once the others are computed; has its slot until the end."""
        async with self._slots:
            async with self._turn:
                cached = self._cache.take(text)
                await asyncio.sleep((len(text) - cached) / TOKEN_CHARACTERS / self._rate)
            yield cached


class EmulatedEngine:
    """The HTTP API of one engine, as far as routers and a load need it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._replica = Replica(args.blocks, args.slots, args.prefill)
        self._token_seconds = args.token_seconds
        self._room, self._slots = args.slots + args.queue, args.slots if args.tells_room else None
        self._requests = self._queries = self._hits = self._inside = self._refused = 0
        self._tenants: dict[tuple[str, str], int] = {}  # tokens

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        for path in ("/readyz", "/health", "/health_generate"):
            app.router.add_get(path, self.healthy)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Streams, or answers with the whole; or refuses, where the queue is full."""
        if any(name.lower().startswith("x-envoy-retr") for name in request.headers):
            return web.Response(status=500, text="what is between routers and Envoy has come to an engine")
        if self._inside >= self._room:
            self._refused += 1
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        self._inside += 1
        try:
            return await self._generate(request)
        finally:
            self._inside -= 1

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = text_of(body)
        self._requests += 1
        async with self._replica.prefilled(text) as cached:
            tokens = (len(text) // TOKEN_CHARACTERS, cached // TOKEN_CHARACTERS)
            self._queries, self._hits = self._queries + tokens[0], self._hits + tokens[1]
            usage = {"prompt_tokens": tokens[0], "prompt_tokens_details": {"cached_tokens": tokens[1]}}
            many = int(body.get("max_tokens", 16))
            tenant = request.headers.get("x-octavo-tenant", "")
            secret = request.headers.get("x-octavo-tenant-id", "")
            account = tenant, hashlib.sha256(secret.encode()).hexdigest()[:16] if secret else ""
            self._tenants[account] = self._tenants.get(account, 0) + tokens[0]
            if not body.get("stream"):
                for _ in range(many):
                    self._tenants[account] += 1
                    await asyncio.sleep(self._token_seconds)
                return web.json_response({"choices": [{"index": 0, "text": "x" * many}], "usage": usage})
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            event = {"id": "emulated", "choices": [{"index": 0, "text": "x", "delta": {"content": "x"}}]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            for _ in range(many):
                await answer.write(data)
                self._tenants[account] += 1
                await asyncio.sleep(self._token_seconds)
            await answer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
            return answer

    async def metrics(self, _: web.Request) -> web.Response:
        """vLLM's names, as far as they are asked for here."""
        named = {
            "request_success_total": self._requests,
            "prefix_cache_queries_total": self._queries,
            "prefix_cache_hits_total": self._hits,
        }
        tenants = "".join(
            f'octavo:tenant_tokens_total{{tenant="{name}",account="{account}",type="all"}} {tokens}\n'
            for (name, account), tokens in self._tenants.items()
        )
        room = f"octavo:max_num_seqs {self._slots}\n" if self._slots else ""
        own = f"emulated:refused_total {self._refused}\nemulated:requests {self._inside}\n"
        page = "".join(f"vllm:{name} {value}\n" for name, value in named.items())
        return web.Response(text=page + tenants + room + own)

    async def models(self, _: web.Request) -> web.Response:
        """One model."""
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def healthy(self, _: web.Request) -> web.Response:
        """Always."""
        return web.Response(text="ok")


class EmulatedEngines:
    """A process with an engine at each of the ports; a context manager."""

    def __init__(self, ports: list[int], **settings: float) -> None:
        flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.ports = ports
        self._command = [sys.executable, __file__, *map(str, ports), *flags]

    def __enter__(self) -> EmulatedEngines:
        self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        for port in self.ports:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                    break
                except OSError:
                    assert self.process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(90)


async def serve(args: argparse.Namespace) -> None:
    for port in args.ports:
        runner = web.AppRunner(EmulatedEngine(args).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ports", nargs="+", type=int)
    parser.add_argument("--blocks", type=int, default=2**20)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prefill", type=float, default=20000)
    parser.add_argument("--token-seconds", type=float, default=0.01)
    parser.add_argument("--queue", type=int, default=2**20)
    parser.add_argument("--tells-room", type=int, default=1)
    asyncio.run(serve(parser.parse_args()))
