"""The formats that a plan advises for a CPU are those that were the fastest on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.plan import formats
from octavo.plan.formats import fast_formats

DOCS = Path(__file__).parents[3] / "docs"
AMX = "flags : fpu avx2 avx512f avx512_vnni amx_tile amx_int8 amx_bf16"


def rows(text: str) -> dict[str, list[float]]:
    """The numbers of Octavo's rows in a table, by the format."""
    found = re.findall(
        r"^\| (?:\*\*SmolLM2 |Octavo )`?([^|*`]+?)`?(?:\*\*)? \|(?: \*\*Octavo\*\* \|)?(.*)\|$", text, re.MULTILINE
    )
    return {
        name: [float(one) for one in re.findall(r"\d+(?:\.\d+)?", cells.replace(",", ""))]
        for name, cells in found
        if " over " not in name  # a ratio
    }


def measured(page: str, begin: str, end: str) -> dict[str, list[float]]:
    return rows((DOCS / page).read_text().split(begin)[1].split(end)[0])


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)
    monkeypatch.setattr(formats.platform, "machine", lambda: "x86_64")
    return tmp_path / "cpuinfo"


def test_with_matrix_units_it_depends_on_the_use(info: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info.write_text(AMX)
    said = fast_formats(info)
    figures = measured("performance.md", "<!-- begin: formats -->", "| ratio |")  # of the Xeon, which comes first
    one_user, prompts = (
        max(figures, key=lambda name: sign * figures[name][column]) for column, sign in ((0, 1), (4, -1))
    )
    many = set(sorted(figures, key=lambda name: -figures[name][2])[:2])
    assert one_user == "Q4_1" and "4 bits are the fastest for one user" in said
    assert prompts == "bfloat16" and "long prompts bfloat16" in said
    assert many == {"W8A8", "int8_per_channel"} and "int8_per_channel" in said
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx512")  # kernels without the units
    assert fast_formats(info) != said


def test_without_them_4_bits_are_fast_everywhere(info: Path) -> None:
    info.write_text("flags : fpu avx2 avx512f avx512_vnni")
    said = fast_formats(info)
    figures = measured("measurements.md", "<!-- begin: files -->", "<!-- end: files -->")
    best = [max(figures, key=lambda name: figures[name][column]) for column in (0, 1, 2)]
    assert best[0] == "Q4_1" and "4 bits" in said and set(best[1:]) == {"W8A8, compressed-tensors"} and "W8A8" in said
    four_bits = max(figures["Q4_0"][2], figures["Q4_1"][2])
    assert four_bits > 0.9 * figures["W8A8, compressed-tensors"][2], "beside it"


def test_what_was_not_measured_is_said_to_be(info: Path) -> None:
    assert "not measured" in fast_formats(info)  # not there
    info.write_text("flags : fpu avx2")
    assert "not measured" in fast_formats(info)
