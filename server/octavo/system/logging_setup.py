"""Logging of all processes: text for people or JSON for collectors."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")
_MOST_ONCE = 1_000
_logged_once: set[tuple[str, ...]] = set()
_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}


class _TextFormatter(logging.Formatter):
    default_time_format = "%Y-%m-%d %H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(shortname)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.shortname = record.name.removeprefix("octavo.")
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """One object a line; keyword arguments given as ``extra`` become fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD and key != "shortname"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def logging_options() -> dict[str, str]:
    """Return the arguments of `setup_logging`, except ``process``, for a child process that should log like this
    one."""
    root = logging.getLogger()
    as_json = any(isinstance(handler.formatter, _JsonFormatter) for handler in root.handlers)
    return {"level": logging.getLevelName(root.level).lower(), "log_format": "json" if as_json else "text"}


def setup_logging(level: str, log_format: str, process: str) -> None:
    """Send everything from ``level`` on to stderr. ``process`` names this one among the engine's processes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)  # warnings of libraries take the same form


def log_once(logger: logging.Logger, level: int, message: str, *values: str) -> None:
    """Log ``message`` at most once for the same ``values`` in this process.

    Clients choose the values, so only the first _MOST_ONCE pairs of a message and its values are logged.
    """
    key = (message, *values)
    if key not in _logged_once and len(_logged_once) < _MOST_ONCE:
        _logged_once.add(key)
        logger.log(level, message, *values)
