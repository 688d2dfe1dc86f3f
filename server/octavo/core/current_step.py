"""The step that is being scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.results import ScheduledSequence
from octavo.interface.step import CachedRequestData, NewRequestData


@dataclass
class CurrentStep:
    """What it has room for, and what is in it so far."""

    budget: int
    now: float
    scheduled: dict[str, ScheduledSequence] = field(default_factory=dict)
    new: list[NewRequestData] = field(default_factory=list)
    changed: dict[str, CachedRequestData] = field(default_factory=dict)
    copies: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    preempted: bool = False
    reserved: int = 0  # blocks that admitted prompts still need
    draft_budget: int = 0
    drafts: dict[str, list[int]] = field(default_factory=dict)
