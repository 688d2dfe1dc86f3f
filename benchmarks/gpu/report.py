"""What the benchmarks of small kernels print: figures as fractions of the copy bandwidth measured in the same run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.gpu.measure import device_name, limits, save


@dataclass
class Row:
    """One line; ``others`` are microseconds of other ways to do the same."""

    name: str
    us: float
    bytes_moved: int
    of_copy: float
    others: dict[str, float] = field(default_factory=dict)


class Report:
    """``path``: where the figures go, as JSON."""

    def __init__(self, section: str, path: Path | None) -> None:
        self.bandwidth, self.matrix_rate = limits()
        self.section, self.path = section, path
        self.rows: list[Row] = []
        print(f"{section:50} {'us':>9} {'of copy':>8}   others, us", flush=True)

    def add(self, name: str, us: float, bytes_moved: int, **others: float | None) -> None:
        """``others`` that did not run are None."""
        ran = {other: time for other, time in others.items() if time is not None}
        row = Row(name, us, bytes_moved, bytes_moved / us * 1e6 / self.bandwidth, ran)
        self.rows.append(row)
        text = "  ".join(f"{other} {time:.1f} ({time / us:.2f}x)" for other, time in ran.items())
        print(f"{name:50} {us:9.2f} {row.of_copy:8.0%}   {text}", flush=True)
        limits_found = {"copy_bytes_per_second": self.bandwidth, "matrix_flop_per_second": self.matrix_rate}
        about = {"section": self.section, "device": device_name()} | limits_found
        save(self.path, about | {"rows": [asdict(row) for row in self.rows]})
