"""Points at which snapshots of a sequence's state are taken: where conversations diverge."""

from __future__ import annotations

from octavo.core.prefix_finder import PrefixHit
from octavo.core.request import Request

PROMPT = "prompt"  # before a prompt's end: the next turn may render the answer otherwise
MESSAGE = "message"  # ... of an earlier message, after which templates may render others differently
SHARED = "shared"  # as far as another request's tokens are the same, and no snapshot was there
END = "end"  # at an answer's end, or where a sequence gives way to others
INTERVAL = "interval"  # of long texts, where that displaces nothing

DEFAULT_INTERVAL = 4096  # tokens between snapshots of long texts
DEFAULT_GAP = 64  # tokens between two points of a sequence at least
_GENERATION_PROMPT = 8  # tokens with which templates let a model answer, at most: the next turn may not have them

Point = tuple[int, str]  # a position, and why a snapshot is taken there


class Points:
    """Chooses them for each sequence."""

    def __init__(self, block_size: int, interval: int, gap: int) -> None:
        """``interval``: tokens between those of long texts, 0 for none."""
        self.interval, self.gap = interval, gap
        self._block_size = block_size

    def choose(self, request: Request, hit: PrefixHit) -> list[Point]:
        """Points of a prompt behind ``hit``, the last one first."""
        boundaries = request.core_request.boundaries
        if not boundaries:
            boundaries = [self._before_end(request)]
        ends = [wish.num_tokens for wish in request.core_request.retain or ()]  # of what is to be found again
        named = (
            {hit.num_found: SHARED}
            | dict.fromkeys(ends, MESSAGE)
            | dict.fromkeys(boundaries, MESSAGE)
            | {boundaries[-1]: PROMPT}
        )
        wanted = sorted(named.items())
        points, before = list[Point](), hit.num_tokens
        for position, point in wanted:
            apart = position >= before + self.gap if before else position > 0
            inside_image = any(item.offset < position < item.end for item in request.mm_items)
            if apart and position < request.num_tokens and not inside_image:
                points.append((position, point))
                before = position
        return points[::-1]

    def _before_end(self, request: Request) -> int:
        """A point where nobody has said any: as the blocks lie, or at the edge of an image."""
        most = request.num_prompt_tokens - _GENERATION_PROMPT
        position = most // self._block_size * self._block_size
        inside = (item for item in request.mm_items if item.offset < position < item.end)
        image = next(inside, None)
        if image is None:
            return position
        return image.end if image.end <= most else image.offset
