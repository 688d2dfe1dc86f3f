"""How many tokens to guess for a sequence: as many as make tokens come fastest, and none where they would come slower.

A step takes longer with each token in it, and a guess is right or not. What a step of so many tokens takes is learnt
from the steps that ran, how often guesses are right from each sequence's own. Pure: times are given.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 200  # about as many of the last steps say what a step takes
MARGIN = 1.1  # a guess has to be worth more than it takes by this factor: both are estimates
PROBE_SHARE = 0.01  # of the time of all steps that tries may take
FIRST_PROBE, LAST_PROBE = 16, 128  # steps without guesses until one is tried, and its growth while that is wrong
DRAFTS, ALL_DRAFTS = 16, 100  # about as many of the last drafts, of a sequence and of all, say how often one is right
FADING = 0.99  # of what a sequence has shown, in each step without a guess: it may have been bad luck
PRIOR_WEIGHT = 2.0  # guessed tokens: so much does a sequence's beginning rest on what all others have shown
FIRST_ACCEPTANCE = 0.97  # before any guess: the first few show what it is
_PRIOR_SHARE = 0.03  # of one token in a step of one, before steps of several sizes have run: low, so that they do
_PRIOR_VARIANCE = 0.25  # of sizes, in tokens squared: so much does that count


class StepTimes:
    """What a step takes: a line over its number of tokens, fitted to the last steps; older ones count less and less."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0
        self._share = _PRIOR_SHARE  # of one token in a step of one, when steps of several sizes ran last

    def observe(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` tokens has taken ``seconds``."""
        if self._weight:  # one that was held up by something else says little
            fixed, each = self.line()
            seconds = min(seconds, 1.5 * (fixed + each * rows))
        keep = 1 - 1 / STEPS
        self._weight = self._weight * keep + 1
        self._rows = self._rows * keep + rows
        self._seconds = self._seconds * keep + seconds
        self._rows_rows = self._rows_rows * keep + rows * rows
        self._rows_seconds = self._rows_seconds * keep + rows * seconds
        variance, covariance = self._moments()
        if variance > _PRIOR_VARIANCE:
            each = min(max(covariance / variance, 0.0), self._seconds / self._rows)
            one = self._seconds / self._weight + each * (1 - self._rows / self._weight)
            self._share += (each / one - self._share) / 32
        else:  # forgotten in the end, so that it is tried again
            self._share += (_PRIOR_SHARE - self._share) / 4000

    def _moments(self) -> tuple[float, float]:
        """The variance of sizes, and their covariance with seconds."""
        rows = self._rows / self._weight
        variance = self._rows_rows / self._weight - rows * rows
        return max(0.0, variance), self._rows_seconds / self._weight - rows * self._seconds / self._weight

    def line(self) -> tuple[float, float]:
        """Seconds of a step and of each token in it; before any step, in an unknown unit."""
        if not self._weight:
            return 1 - _PRIOR_SHARE, _PRIOR_SHARE
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        prior = seconds * self._share / (1 - self._share + self._share * rows)
        variance, covariance = self._moments()
        each = (covariance + _PRIOR_VARIANCE * prior) / (variance + _PRIOR_VARIANCE)
        each = min(max(each, 0.0), seconds / rows)
        return seconds - each * rows, each


@dataclass(slots=True)
class _Acceptance:
    right: float = 0.0  # guessed tokens; old ones fade
    tried: float = 0.0
    skipped: int = 0  # steps since a guess was asked for
    probe: int = FIRST_PROBE

    def add(self, num_tried: int, num_right: int, memory: int) -> None:
        keep = 1 - 1 / memory
        self.right = self.right * keep + num_right
        self.tried = self.tried * keep + num_tried


class DraftLengths:
    """Chooses, sequence after sequence of a step, so that expected tokens over expected time become largest."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._all = _Acceptance(FIRST_ACCEPTANCE, 1.0)
        self._sequences: dict[str, _Acceptance] = {}
        self._tokens = self._seconds = self._each = 0.0
        self._allowance = 0.0  # seconds that tries may take
        self._guess = 0.0  # seconds that guessing one token takes, where a model does
        self.never_wrong = True  # any guess so far

    def begin_step(self, num_decoding: int) -> None:
        """A step is made in which so many sequences get a token."""
        fixed, self._each = self.times.line()
        self._tokens = float(num_decoding)
        self._seconds = fixed + self._each * num_decoding
        self._each += self._guess
        self._allowance = min(self._allowance + PROBE_SHARE * self._seconds, 2 * self._each)

    def observe_drafting(self, num_drafts: int, seconds: float) -> None:
        """A model has taken ``seconds`` to guess ``num_drafts`` tokens."""
        each = seconds / num_drafts
        if self._guess:
            # Beyond that it has read what it had missed: what a try costs.
            self._allowance -= max(0.0, seconds - 1.5 * self._guess * num_drafts)
            each = self._guess + (min(each, 1.5 * self._guess) - self._guess) / 16
        self._guess = each

    def pays(self, req_id: str) -> bool:
        """Whether a guess is worth what it takes, as far as is known."""
        if self.never_wrong:
            return True
        chance = self._chance(self._sequences.get(req_id) or _Acceptance())
        return chance * self._seconds > self._tokens * self._each * MARGIN

    def choose(self, req_id: str, most: int) -> int:
        """How many tokens to guess for a sequence, at most ``most``."""
        sequence = self._sequences.get(req_id)
        if sequence is None:
            sequence = self._sequences[req_id] = _Acceptance()
        chance, price = self._chance(sequence), self._each * MARGIN
        tokens, seconds, gain, length = self._tokens, self._seconds, chance, 0
        while length < most and gain * seconds > tokens * price:
            tokens, seconds, gain, length = tokens + gain, seconds + self._each, gain * chance, length + 1
        if length == 0 and most > 0 and self._seconds > self._tokens * price:  # one that is right would pay
            sequence.skipped += 1
            sequence.right *= FADING
            sequence.tried *= FADING
            if sequence.skipped >= sequence.probe and self._allowance >= self._each:
                length = 1
        return length

    def add(self, req_id: str, length: int) -> None:
        """So many have been guessed, and are part of the step."""
        sequence = self._sequences[req_id]
        chance = self._chance(sequence)
        if length and sequence.skipped >= sequence.probe:
            self._allowance -= self._each * length
        if length:
            sequence.skipped = 0
        for i in range(1, length + 1):
            self._tokens += chance**i
        self._seconds += self._each * length

    def count(self, req_id: str, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` guesses the first ``num_accepted`` were right; of those after the first wrong one nothing
        is known."""
        self.never_wrong &= num_accepted == num_drafts
        tried = min(num_accepted + 1, num_drafts)
        self._all.add(tried, num_accepted, ALL_DRAFTS)
        sequence = self._sequences.get(req_id)
        if sequence is not None:
            sequence.add(tried, num_accepted, DRAFTS)
            sequence.probe = FIRST_PROBE if num_accepted else min(2 * sequence.probe, LAST_PROBE)

    def forget(self, req_id: str) -> None:
        """The sequence has ended; it may be unknown."""
        self._sequences.pop(req_id, None)

    def _chance(self, sequence: _Acceptance) -> float:
        prior = self._all.right / self._all.tried
        return (sequence.right + PRIOR_WEIGHT * prior) / (sequence.tried + PRIOR_WEIGHT)
