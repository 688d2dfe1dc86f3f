"""The page at /: one document made of the files in page/, which asks this server and nothing else.

It tells nothing of the server, so whoever can reach the port may have it, also where the API asks for a key: the page
asks its visitor for that.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from functools import lru_cache
from pathlib import Path

from starlette.types import Scope

from octavo.fetch.model_names import FIRST_QUESTIONS

_HERE = Path(__file__).parent
_SCRIPTS = ("markdown", "api", "conversation", "messages", "pictures", "composer", "details", "memory", "main")


@lru_cache
def chat_page() -> tuple[bytes, dict[str, str]]:
    """Return the document in UTF-8, and its headers. Its policy allows its own script and style by their hashes,
    requests to this server alone, and no text as HTML."""
    page = _HERE / "page"
    style = (page / "page.css").read_text(encoding="utf-8")
    files = [(page / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '"use strict";\n{\n' + "\n".join(files) + "}\n"  # one scope for all files, and nothing global
    script = script.replace("{questions}", json.dumps(FIRST_QUESTIONS))
    icon = "data:image/svg+xml;base64," + b64encode((_HERE / "icon.svg").read_bytes()).decode()
    document = (page / "page.html").read_text(encoding="utf-8")
    for mark, text in (("{icon}", icon), ("{style}", style), ("{script}", script)):
        document = document.replace(mark, text)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return document.encode(), {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "vary": "accept",
    }


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def wants_page(scope: Scope, path: str) -> bool:
    """Return whether a browser asks for the page: other clients ask at / whether somebody is there."""
    accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return path in ("", "/") and scope["method"] in ("GET", "HEAD") and b"text/html" in accepted
