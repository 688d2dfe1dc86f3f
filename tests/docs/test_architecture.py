"""The architecture page's table of rooms says what the import contracts say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = {
    contract["containers"][0]: [{room.strip() for room in floor.split("|")} for floor in contract["layers"]]
    for contract in CONTRACTS
    if contract["type"] == "layers"
}
PROGRAMS = {"server/octavo/": "octavo", "operator/octavo_operator/": "octavo_operator"}


def rooms_of_page() -> dict[str, list[tuple[str, set[str]]]]:
    """Every room of a program, in the page's order, with the floor that its row names."""
    page = (ROOT / "docs/architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    programs: dict[str, list[tuple[str, set[str]]]] = {}
    program = ""
    for rooms, below in re.findall(r"^\| (`.*?|\*\*`.*?) \| .* \| (.*) \|$", page, re.MULTILINE):
        if rooms.startswith("**"):
            program = PROGRAMS.get(rooms.strip("*`"), "")
        elif program:
            names = [] if below == "nothing" else re.findall(r"`(\w+)`", below)
            programs.setdefault(program, []).extend((room, set(names)) for room in re.findall(r"`(\w+)`", rooms))
    return programs


@pytest.mark.parametrize("program", PROGRAMS.values())
def test_rooms_stand_in_the_order_of_the_contracts(program: str) -> None:
    floors = LAYERS[program]
    below = [*floors[1:], set()]
    expected = {room: lower for floor, lower in zip(floors, below, strict=True) for room in floor}
    rows = rooms_of_page()[program]
    assert dict(rows) == expected
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    assert [floor_of[room] for room, _ in rows] == sorted(floor_of[room] for room, _ in rows)


def test_the_page_is_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 150
