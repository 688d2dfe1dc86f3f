#!/usr/bin/env python3
"""Asks every model of a gateway, by its name.

    python models.py models

in a pod: the Service of the LLMGateway. Ends with status 1 unless all answer.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

QUESTION = "Name the capital of France."


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return dict(json.load(urllib.request.urlopen(request, timeout=300)))


def main(service: str) -> int:
    found = call(f"http://{service}/v1/models")["data"]
    width = max(len(one["id"]) for one in found)
    print(f"    {len(found)} names\n\n    {'model':{width}s}  LLMDeployment  seconds  answer", flush=True)
    for one in found:
        began = time.monotonic()
        body = {"model": one["id"], "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12}
        answer = call(f"http://{service}/v1/chat/completions", {**body, "temperature": 0})
        text, seconds = answer["choices"][0]["message"]["content"], time.monotonic() - began
        print(f"    {one['id']:{width}s}  {one['owned_by']:13s}  {seconds:7.1f}  {text!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
