"""The pages / and /docs. Both load nothing from other servers."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response

from octavo.entrypoints.chat_page import chat_page, wants_page
from octavo.entrypoints.errors import APIError
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.state import state_of

if TYPE_CHECKING:
    from jinja2 import Template

_HERE = Path(__file__).parent
_SWAGGER_FILES = {"swagger-ui-bundle.js": "swagger_bundle.js", "swagger-ui.css": "swagger_style.css"}  # of offapi
# Whatever a page names, the browser loads nothing from elsewhere.
_HEADERS = {
    "content-security-policy": "default-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}


async def index(request: Request) -> Response:
    """The chat page to a browser; to other clients, which look whether somebody is there, a few lines of text."""
    if wants_page(request.scope, "/"):
        page, headers = chat_page()
        return HTMLResponse(page, headers=headers)
    state = state_of(request)
    problem = state.why_not_alive() or state.why_not_ready()
    address = str(request.base_url).rstrip("/")
    lines = [
        f"Octavo serves {', '.join(state.model_names)}.",
        f"Not ready: {problem}" if problem else "Ready.",
        f"Chat: {address}/ in a browser",
        f"OpenAI clients: base URL {address}/v1",
    ]
    if not state.args.disable_fastapi_docs:
        lines.append(f"Routes: {address}/docs")
    return PlainTextResponse("\n".join(lines) + "\n", headers={"vary": "accept", "x-content-type-options": "nosniff"})


@lru_cache
def _template(name: str) -> Template:
    from jinja2 import Environment  # not needed before the first look

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_HERE / name).read_text(encoding="utf-8"))


async def docs(request: Request) -> Response:
    """Swagger UI over /openapi.json."""
    page = _template("docs.html").render(root=_root(request), title=request.app.state.title)
    return HTMLResponse(page, headers=_HEADERS)


async def docs_file(request: Request) -> Response:
    """A file of Swagger UI."""
    name = request.path_params["name"]
    if name not in _SWAGGER_FILES:
        raise APIError(404, f"There is no such file: the documentation has {' and '.join(sorted(_SWAGGER_FILES))}")
    package = find_spec("offapi")  # importing it would read all of its files
    if package is None or not package.submodule_search_locations:
        raise APIError(404, "Swagger UI is not installed: pip install offapi, or read /openapi.json")
    return FileResponse(Path(package.submodule_search_locations[0], _SWAGGER_FILES[name]))


async def icon(request: Request) -> Response:
    """The icon of both pages."""
    return FileResponse(_HERE / "icon.svg", media_type="image/svg+xml")


def _root(request: Request) -> str:
    """Return what precedes the server's own paths: --root-path."""
    return str(request.scope.get("root_path", "")).rstrip("/")


OPERATIONS = (Operation("GET", "/", index, "Show the chat page to a browser, an overview to other clients"),)
