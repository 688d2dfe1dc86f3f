"""Gradio, imported in half the time."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import ssl
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from octavo.errors import ConfigError

_LAZY = "pandas"  # for components that no tab has


def import_gradio() -> None:
    """Must come before any other import of Gradio. Raises ConfigError where it is not installed."""
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_DISABLE_TELEMETRY="1")  # asks and tells nobody
    # Statistics that nobody reads: made of all events, after each of them, in threads, with pandas.
    os.environ.update(GRADIO_ANALYTICS_CACHE_FREQUENCY=str(sys.maxsize))
    try:
        with _without_repetition(), _lazily():
            import gradio  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the dashboard needs Gradio: pip install 'octavo[dashboard]' ({error})") from None


@contextlib.contextmanager
def _without_repetition() -> Iterator[None]:
    """While Gradio is imported, it writes a stub for editors of each of its 80 components, compiles a template of each
    event of each of them for its docstring, and reads all certificates for each of its HTTP clients."""
    import jinja2

    getfile: Any = inspect.getfile

    def no_source(object: Any) -> str:
        """Raises OSError for gradio's classes, so that no stub files are written for them."""
        if isinstance(object, type) and object.__module__.startswith("gradio."):
            raise OSError("no stubs")
        return str(getfile(object))

    faster: list[tuple[Any, str, Any]] = [
        (inspect, "getfile", no_source),
        (jinja2, "Template", functools.cache(jinja2.Template)),
        (ssl, "create_default_context", functools.cache(ssl.create_default_context)),
    ]
    plain = [(module, name, getattr(module, name)) for module, name, _ in faster]
    for module, name, function in faster:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in plain:
            setattr(module, name, function)


class _LazyFinder(MetaPathFinder):
    """Finds one module, which is executed when an attribute of it is first looked at."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module that is loaded lazily; None for any other."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == _LAZY else None
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


@contextlib.contextmanager
def _lazily() -> Iterator[None]:
    finder = _LazyFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
