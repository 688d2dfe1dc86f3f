"""`octavo bench sweep` for the tabs that show its figures: what a visitor wants measured, and the rows as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from octavo.bench.sweep import Sweep, add_arguments, configurations_of
from octavo.bench.sweep_table import Row, from_json
from octavo.dashboard.visitors import check_flags
from octavo.errors import ConfigError, OctavoError
from octavo.flags.parser import CommandParser
from octavo.system.parent import octavo_command

_LOOK_SECONDS = 0.5  # between looks at what has been measured: the machine is left to the measurement
_STOP_SECONDS = 70.0  # from SIGINT to SIGKILL: a server that it has started ends first


def load_words(users: str, **counts: float | None) -> list[str]:
    """Flags of `octavo bench sweep` for a load; ``counts``: requests_per_user, input_len, output_len, repeats. Raises
    ConfigError for a field that was left empty."""
    words = [f"--users={''.join((users or '').split())}"]
    for name, count in counts.items():
        if count is None or count < 1:
            raise ConfigError(f"{name.replace('_', ' ')} must be a number of at least 1")
        words.append(f"--{name.replace('_', '-')}={count:.0f}")
    return words


def check(words: Sequence[str], local: bool = False) -> Sweep:
    """Check a sweep and return the settings of `octavo bench sweep`. ``local``: see `check_flags`. Raises
    ConfigError."""
    parser = CommandParser(prog="octavo bench sweep")
    add_arguments(parser)
    args = parser.parse_args(list(words))
    names = {name for one in configurations_of(args.param) for name in one}
    check_flags(names, local)  # before any flag is read: some name files
    return Sweep.of(args)


class SweepRun:
    """`octavo bench sweep` under way."""

    def __init__(self, words: Sequence[str], api_key: str | None) -> None:
        """``api_key`` of the server that is loaded: it goes through the environment, which nobody else sees."""
        self._words, self._api_key = list(words), api_key
        self._process: asyncio.subprocess.Process | None = None
        self.stopped = False  # by `stop`

    def stop(self) -> None:
        """End the sweep and its server, as Ctrl-C does. Its results so far stay."""
        self.stopped = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)

    async def rows(self) -> AsyncGenerator[list[Row], None]:
        """The rows with what has been measured until then, every so often and at the end; empty before the first load.
        Closing the iterator stops it. Raises OctavoError where it fails as a whole."""
        with tempfile.TemporaryDirectory(prefix="octavo-sweep-") as folder, open(f"{folder}/log", "w+b") as log:
            file = Path(folder) / "rows.json"
            words = ["bench", "sweep", *_before_serve_flags(self._words, f"--output-json={file}")]
            self._process = await asyncio.create_subprocess_exec(
                *octavo_command(*words),
                env=_environment(self._api_key),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            rows: list[Row] = []
            try:
                if self.stopped:  # before it had begun
                    self.stop()
                while not await self._ended(_LOOK_SECONDS):
                    rows = _read(file) or rows
                    yield rows
            finally:
                await self._end()
            rows = _read(file) or rows
            log.seek(0)
            said = log.read().decode(errors="replace").splitlines()
            if not rows and not self.stopped:
                errors = [line.partition("octavo: error: ")[2] for line in said if line.startswith("octavo: error: ")]
                raise OctavoError((errors or said or ["octavo bench sweep said nothing and ended"])[-1])
            yield rows

    async def _ended(self, seconds: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        return self._process.returncode is not None

    async def _end(self) -> None:
        assert self._process is not None
        if self._process.returncode is not None:
            return
        self.stop()
        if not await self._ended(_STOP_SECONDS):
            self._process.kill()
            await self._process.wait()


def _before_serve_flags(words: list[str], flag: str) -> list[str]:
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], flag, "--disable-tqdm", *words[at:]]


def _environment(api_key: str | None) -> Mapping[str, str]:
    hidden = ("OCTAVO_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")  # of other servers than those that are measured
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return environment | ({"OPENAI_API_KEY": api_key} if api_key else {})


def _read(file: Path) -> list[Row]:
    """The rows of a file; none if it is absent or incomplete."""
    try:
        return from_json(file.read_text())
    except (OSError, ValueError):
        return []
