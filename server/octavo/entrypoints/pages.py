"""What a browser is shown: the page at / and the API's documentation at /docs. Both load from this server alone."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.state import state_of
from octavo.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template

_HERE = Path(__file__).parent
_DOCS_FILES = frozenset({"swagger-ui-bundle.js", "swagger-ui.css"})
# Whatever a page names, the browser loads nothing from elsewhere.
_HEADERS = {
    "content-security-policy": "default-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}


async def index(request: Request) -> Response:
    """What is served here, whether it is ready, and how to ask it something."""
    state = state_of(request)
    tokenizer = state.engine.tokenizer
    page = _index_template().render(
        version=__version__,
        root=_root(request),
        address=str(request.base_url).rstrip("/"),
        models=state.model_names,
        max_model_len=state.engine.config.scheduler.max_model_len,
        problem=state.why_not_alive() or state.why_not_ready(),
        chats=tokenizer is not None and bool(state.chat_template or tokenizer.chat_templates),
        has_key=bool(state.args.api_key),
        has_docs=not state.args.disable_fastapi_docs,
    )
    return HTMLResponse(page, headers=_HEADERS)


@lru_cache(maxsize=1)
def _index_template() -> Template:
    from jinja2 import Environment  # not needed before the first look

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_HERE / "index.html").read_text(encoding="utf-8"))


async def docs(request: Request) -> Response:
    """Swagger UI over /openapi.json."""
    root = _root(request)
    page = get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title=f"{request.app.title}: API",
        swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/swagger-ui.css",
        swagger_favicon_url=f"{root}/icon.svg",
        swagger_ui_parameters={"validatorUrl": None},
    )
    return HTMLResponse(page.body, headers=_HEADERS)


async def docs_file(request: Request) -> Response:
    """A file of Swagger UI."""
    import fastapi_offline

    name = request.path_params["name"]
    if name not in _DOCS_FILES:
        raise APIError(404, f"There is no such file: the documentation has {' and '.join(sorted(_DOCS_FILES))}")
    return FileResponse(Path(fastapi_offline.__file__).parent / "static" / name)


async def icon(request: Request) -> Response:
    return FileResponse(_HERE / "icon.svg", media_type="image/svg+xml")


def _root(request: Request) -> str:
    """What stands before the server's own paths: --root-path."""
    return str(request.scope.get("root_path", "")).rstrip("/")
