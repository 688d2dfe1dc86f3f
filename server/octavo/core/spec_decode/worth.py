"""Give drafts up among many sequences, for as long as steps with drafts bring fewer tokens a second than steps without.

`lengths.py` predicts what a draft brings from what tokens and steps have shown. With many sequences in a step a small
error of that prediction, and the time that asking takes, are as large as the gain. Here both ways are run in turns and
compared, and the worse one is tried again seldom. Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

FEWEST = 4  # sequences: among fewer, prediction decides alone
LEAST_GAIN = 1.01  # of tokens a second: below that drafts are given up
FIRST_RUNS = 4  # runs that compare at first, with and without drafts in turns
RUN = 8  # steps of a run that compares
FIRST_PAUSE, LAST_PAUSE = 64, 1024  # steps until the worse way is tried again, and its growth while it stays worse
STEPS = 2 * RUN  # as many of the last steps of each way count


class _Way:
    """The last steps of one way."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=STEPS)
        self._seconds: deque[float] = deque(maxlen=STEPS)

    @property
    def rate(self) -> float:
        """Tokens a second. The median of the steps' times: one that was held up by something else says little."""
        return fmean(self._tokens) / median(self._seconds) if self._tokens else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    def clear(self) -> None:
        """Forget all: contexts were shorter then."""
        self._tokens.clear()
        self._seconds.clear()


@dataclass(slots=True)
class _Crowd:
    """About so many sequences in a step: which way runs now, for how many steps more."""

    ways: dict[bool, _Way] = field(default_factory=lambda: {True: _Way(), False: _Way()})
    drafts: bool = True  # the way that runs
    left: int = RUN
    better: bool = True  # the way that was faster
    compares: int = FIRST_RUNS  # runs until the ways are compared; 0: the better one runs
    pause: int = FIRST_PAUSE

    def end_step(self) -> None:
        self.left -= 1
        if self.left > 0:
            return
        if self.compares != 1:  # more of the first runs, or one of the worse way
            if self.compares == 0:
                self.ways[not self.drafts].clear()
            self.compares = max(self.compares - 1, 1)
            self.drafts, self.left = not self.drafts, RUN
            return
        better = self.ways[True].rate > LEAST_GAIN * self.ways[False].rate
        self.pause = FIRST_PAUSE if better != self.better else min(2 * self.pause, LAST_PAUSE)
        self.drafts = self.better = better
        self.left, self.compares = self.pause, 0


class DraftWorth:
    """Decides, step after step, if drafts are made, by comparing tokens over time in steps with and without."""

    def __init__(self) -> None:
        self._crowds: dict[int, _Crowd] = {}  # by the order of magnitude of the number of sequences
        self._crowd: _Crowd | None = None
        self._tokens = 0

    def begin_step(self, num_decoding: int) -> bool:
        """Begin a step in which so many sequences get a token. Returns True if it may have drafts."""
        self._tokens = num_decoding
        if num_decoding < FEWEST:
            self._crowd = None
            return True
        self._crowd = self._crowds.setdefault(num_decoding.bit_length(), _Crowd())
        return self._crowd.drafts

    def observe(self, num_accepted: int) -> None:
        """Observe that so many drafts of a sequence were right in the step."""
        self._tokens += num_accepted

    def end_step(self, seconds: float) -> None:
        """End a step that had no token of a prompt and took ``seconds``, those of its drafter included. Steps that are
        not ended do not count."""
        crowd, self._crowd = self._crowd, None
        if crowd is not None:
            crowd.ways[crowd.drafts].add(self._tokens, seconds)
            crowd.end_step()
