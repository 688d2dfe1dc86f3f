"""The pages / and /docs. Both load nothing from other servers."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.operation import Operation
from octavo.entrypoints.state import state_of
from octavo.version import __version__

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
    """Show what is served here, whether it is ready, and how to ask it something."""
    state = state_of(request)
    tokenizer = state.engine.tokenizer
    page = _template("index.html").render(
        version=__version__,
        root=_root(request),
        address=str(request.base_url).rstrip("/"),
        models=state.model_names,
        max_model_len=state.engine.config.scheduler.max_model_len,
        problem=state.why_not_alive() or state.why_not_ready(),
        chats=tokenizer is not None and bool(state.chat_options.chat_template or tokenizer.chat_templates),
        has_key=bool(state.args.api_key),
        has_docs=not state.args.disable_fastapi_docs,
    )
    return HTMLResponse(page, headers=_HEADERS)


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


OPERATIONS = (Operation("GET", "/", index, "Show an overview of this server", answer="text/html"),)
