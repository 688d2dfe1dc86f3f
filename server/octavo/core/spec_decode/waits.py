"""Sequences wait for their last tokens, where steps overlap, if drafts after these tokens are worth it.

What is guessed on the host follows tokens that it knows. While a step is in flight that gives a sequence its next
token, nothing can be guessed for it: either its step after that is made without guesses, and the device goes on at
once, or it is made when the token is there. All sequences wait or none does: those that wait one by one would drift
apart into steps of few sequences each. Pure: times are given.
"""

from __future__ import annotations

from octavo.core.spec_decode.lengths import StepTimes

MARGIN = 1.1  # waiting has to bring more than it takes by this factor: both are estimates
FIRST_STEPS = 8  # that are observed of each kind before there is a choice
GUESSES = 16  # about as many of the last ones say how many tokens a guess brings
TRY = 8  # steps on end that wait, to find out
FIRST_TRY, LAST_TRY = 64, 1024  # steps that do not wait until the next try, and its growth while that shows nothing


class DraftWaits:
    """Compares tokens over time, with what steps have taken that ran alone and those that overlapped."""

    def __init__(self) -> None:
        self.alone, self.overlapped = StepTimes(), StepTimes()
        self._num_alone = self._num_overlapped = 0
        self._num_decoding, self._rows = 1, 1.0  # sequences, and tokens of each in steps that waited
        self._gain = 1.0  # tokens that guesses add to each one of a step that was waited for
        self._left = TRY  # steps of the try under way
        self._pause, self._skipped = FIRST_TRY, 0

    def observe_step(self, num_tokens: int, seconds: float, alone: bool) -> None:
        """Observe that a step of ``num_tokens``, none of a prompt, took ``seconds``."""
        if alone:
            self._num_alone += 1
            self._rows += (num_tokens / self._num_decoding - self._rows) / GUESSES
            self.alone.observe(num_tokens, seconds)
        else:
            self._num_overlapped += 1
            self.overlapped.observe(num_tokens, seconds)

    def count_turn(self) -> None:
        """Count that a drafter is asked for drafts of a sequence."""
        self._gain -= self._gain / GUESSES

    def observe(self, num_accepted: int) -> None:
        """Observe that so many of its drafts were right."""
        self._gain += num_accepted / GUESSES

    def decide(self, num_decoding: int) -> bool:
        """Decide if the sequences that decode wait now. Called once a step."""
        self._num_decoding = max(1, num_decoding)
        if self._num_overlapped < FIRST_STEPS:
            return False
        if self._num_alone < FIRST_STEPS:
            return True
        waiting, going_on = self._time(self.alone, num_decoding * self._rows), self._time(self.overlapped, num_decoding)
        if (1 + self._gain) * going_on > MARGIN * waiting:
            self._left, self._skipped, self._pause = TRY, 0, FIRST_TRY
            return True
        if self._left > 0:
            self._left -= 1
            return True
        self._skipped += 1
        if self._skipped >= self._pause:
            self._left, self._skipped, self._pause = TRY, 0, min(2 * self._pause, LAST_TRY)
        return False

    def _time(self, times: StepTimes, rows: float) -> float:
        fixed, each = times.line()
        return fixed + each * rows
