#!/usr/bin/env python3
"""Talks in turns of several conversations, and shows which replica answered and what it knew of the prompt.

    python conversations.py smollm2 [smollm2-pods]

in a pod: the Service to ask, and the headless one with the replicas' addresses, whose metrics tell who answered. Ends
with status 1 unless every second turn found the first one's prompt on the replica that had computed it.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from typing import Any

PLACES = ("a lighthouse in Brittany", "a market in Marrakesh", "a tea house in Kyoto", "a harbour in Bergen")


def ask(url: str, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return dict(json.load(urllib.request.urlopen(request, timeout=120)))


def prompts(address: str) -> float:
    """Prompt tokens that a replica has been sent."""
    page = urllib.request.urlopen(f"http://{address}:8001/metrics", timeout=20).read().decode()
    return sum(float(one) for one in re.findall(r"^vllm:prompt_tokens_total\S* (\S+)$", page, re.MULTILINE))


def main(service: str, pods: str) -> int:
    url = f"http://{service}"
    replicas = sorted({str(found[4][0]) for found in socket.getaddrinfo(pods, 8001, socket.AF_INET)})
    model = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=20))["data"][0]["id"]
    talks = [
        [
            {"role": "system", "content": "You are a patient guide who answers travellers in one short sentence. " * 8},
            {
                "role": "user",
                "content": f"I am in {place}. We have come to {place} for three days, by train, with two "
                f"children and a dog, and it rains. Of all that there is in {place}, what should I look at first?",
            },
        ]
        for place in PLACES
    ]
    before = [prompts(one) for one in replicas]
    places: list[int] = []
    found: list[bool] = []
    print(f"    {len(replicas)} replicas\n\n    conversation            turn  replica          prompt  of it cached")
    for turn in (1, 2):
        for number, messages in enumerate(talks):
            answer = ask(url, model, messages)
            now = [prompts(one) for one in replicas]
            replica = max(range(len(replicas)), key=lambda one: now[one] - before[one])
            before = now
            tokens = answer["usage"]["prompt_tokens"]
            cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            print(f"    {PLACES[number]:24s}{turn:4d}  {replicas[replica]:15s}{tokens:8d}{cached:14d}", flush=True)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "And after that?"}]
            if turn == 1:
                places.append(replica)
                firsts = tokens
            else:
                found.append(replica == places[number] and cached >= 0.8 * firsts)
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else f"{sys.argv[1]}-pods"))
