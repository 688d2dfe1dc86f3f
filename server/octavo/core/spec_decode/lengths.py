"""The number of tokens to guess for a sequence: as many as make tokens come fastest, none where they come slower.

A step takes longer with each token in it, and a guess is right or not. What a step of so many tokens takes is learnt
from the steps that ran. How often a guess is right is learnt from all guesses that rest on the same evidence (a long
match is right more often than a short one), and from whether a sequence's have been right more often than that, or
less. Pure: times are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 200  # about as many of the last steps say what a step takes
MARGIN = 1.2  # a guess has to be worth more than it takes by this factor: both are estimates, and others wait for it
PROBE_SHARE = 0.01  # of the time of all steps that tries may take
FIRST_PROBE, LAST_PROBE = 16, 128  # steps without guesses until one is tried, and its growth while that is wrong
DRAFTS, ALL_DRAFTS = 16, 100  # about as many of the last drafts, of a sequence and of all, say how often one is right
FADING = 0.99  # of what a sequence has shown, in each step without a guess: it may have been bad luck
EVIDENCE_FADING = 0.999  # of what evidence has shown, in each step in which it seems too weak for a guess
PRIOR_WEIGHT = 2.0  # guessed tokens: so much does a sequence's beginning rest on what all others have shown
FIRST_ACCEPTANCE = 0.97  # before any guess: the first few show what it is
NO_EVIDENCE = 0  # of guesses of which nothing more is known than who made them
EVIDENCE_ACCEPTANCE, EVIDENCE_WEIGHT = 0.5, 2.0  # before any guess on such evidence, and guesses that this counts for
MOST_CHANCE = 0.99
LONGEST_REST = 7
_PRIOR_SHARE = 0.03  # of one token in a step of one, before steps of several sizes have run: low, so that they do
_PRIOR_VARIANCE = 0.25  # of sizes, in tokens squared: so much does that count
_SIZE_STEPS, _SIZE_PRIOR = 64, 16.0  # as many of the last steps of a size say how it differs; steps the line counts for
_MOST_DIFFERENCE = 0.25  # of a step from the line: more is an accident


class StepTimes:
    """Predict a step's time: a line over its number of tokens, fitted to recent steps with older ones weighted less,
    and a correction for each size, since kernels like some sizes better than others."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0
        self._share = _PRIOR_SHARE  # of one token in a step of one, when steps of several sizes ran last
        self._sizes: dict[int, tuple[float, float]] = {}  # steps of a size, and by what part they differ from the line

    def observe(self, rows: int, seconds: float) -> None:
        """Observe that a step of ``rows`` tokens took ``seconds``."""
        if self._weight:  # one that was held up by something else says little
            fixed, each = self.line()
            expected = fixed + each * rows
            seconds = min(seconds, 1.5 * expected)
            if expected > 0:
                count, difference = self._sizes.get(rows, (0.0, 0.0))
                now = min(max(seconds / expected - 1, -_MOST_DIFFERENCE), _MOST_DIFFERENCE)
                count = min(count + 1, _SIZE_STEPS)
                self._sizes[rows] = count, difference + (now - difference) / count
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

    def seconds(self, rows: int, line: tuple[float, float]) -> float:
        """Predict the seconds of a step of ``rows`` tokens; ``line`` as `line` returns it."""
        count, difference = self._sizes.get(rows, (0.0, 0.0))
        return (line[0] + line[1] * rows) * (1 + difference * count / (count + _SIZE_PRIOR))

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
class _Found:
    """The hit rate of guesses on one kind of evidence; old ones fade."""

    acceptance: float  # before any guess
    weight: float
    right: float = 0.0
    tried: float = 0.0

    @property
    def rate(self) -> float:
        return (self.right + self.weight * self.acceptance) / (self.tried + self.weight)

    def add(self, is_right: bool) -> None:
        keep = 1 - 1 / ALL_DRAFTS
        self.right = self.right * keep + is_right
        self.tried = self.tried * keep + 1

    def fade(self) -> None:
        self.right *= EVIDENCE_FADING
        self.tried *= EVIDENCE_FADING


@dataclass(slots=True)
class _Sequence:
    right: float = 0.0  # guessed tokens; old ones fade
    expected: float = 0.0  # of those that were tried, to be right
    evidence: Sequence[int] = ()  # of the tokens that were guessed last
    rest: int = 0  # steps in which it is not asked for next,
    rests: int = 0  # and those of them that are left
    skipped: int = 0  # steps since a guess was asked for
    probe: int = FIRST_PROBE

    def add(self, is_right: bool, expected: float) -> None:
        keep = 1 - 1 / DRAFTS
        self.right = self.right * keep + is_right
        self.expected = self.expected * keep + expected

    def fade(self) -> None:
        self.right *= FADING
        self.expected *= FADING


class DraftLengths:
    """Chooses, sequence after sequence of a step, so that expected tokens over expected time become largest."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._found = {NO_EVIDENCE: _Found(FIRST_ACCEPTANCE, 1.0)}
        self._sequences: dict[str, _Sequence] = {}
        self._line = self.times.line()
        self._decoding = self._rows = 1
        self._tokens = 1.0
        self._seconds = self._each = 0.0  # of the step as it is, and of one token more
        self._allowance = 0.0  # seconds that tries may take
        self._guess = 0.0  # seconds that guessing one token takes, where a model does
        self.never_wrong = True  # any guess so far

    def begin_step(self, num_decoding: int) -> None:
        """Begin a step in which so many sequences get a token."""
        self._line = self.times.line()
        self._decoding = self._rows = num_decoding
        self._tokens = float(num_decoding)
        self._seconds = self.times.seconds(num_decoding, self._line)
        self._each = self._price(num_decoding)
        self._allowance = min(self._allowance + PROBE_SHARE * self._seconds, 2 * self._each)

    def _price(self, rows: int) -> float:
        """Seconds of one more token in a step of ``rows``."""
        more = self.times.seconds(rows + 1, self._line) - self.times.seconds(rows, self._line)
        return max(more, 0.75 * self._line[1]) + self._guess

    def observe_drafting(self, num_drafts: int, seconds: float) -> None:
        """Observe that a model took ``seconds`` to guess ``num_drafts`` tokens."""
        each = seconds / num_drafts
        if self._guess:
            # Beyond that it has read what it had missed: what a try costs.
            self._allowance -= max(0.0, seconds - 1.5 * self._guess * num_drafts)
            each = self._guess + (min(each, 1.5 * self._guess) - self._guess) / 16
        self._guess = each

    @property
    def can_pay(self) -> bool:
        """True if one more guess would be worth its time if it were right."""
        return self._seconds > self._tokens * self._each * MARGIN

    def take_turn(self, req_id: str) -> bool:
        """Count one more step of a sequence; returns False while it rests from drafts. Under load, where only nearly
        certain guesses pay, asking in vain is what they cost: it rests for up to `LONGEST_REST` steps then."""
        if not self.can_pay:
            return False
        sequence = self._sequences.get(req_id)
        if sequence is not None and sequence.rests > 0:
            sequence.rests -= 1
            return False
        return True

    def pays(self, req_id: str) -> bool:
        """True if a guess without evidence is worth its time, as far as is known."""
        if self.never_wrong:
            return True
        chance = self._chance(self._sequences.get(req_id) or _Sequence(), NO_EVIDENCE)
        return chance * self._seconds > self._tokens * self._each * MARGIN

    def choose(self, req_id: str, evidence: Sequence[int]) -> int:
        """Choose how many tokens to guess for a sequence, of guesses that rest on ``evidence``."""
        sequence = self._sequences.get(req_id)
        if sequence is None:
            sequence = self._sequences[req_id] = _Sequence()
        tokens, seconds, gain, length = self._tokens, self._seconds, 1.0, 0
        price = self._each
        for kind in evidence:
            gain *= self._chance(sequence, kind)
            if gain * seconds <= tokens * price * MARGIN:
                break
            tokens, seconds, length = tokens + gain, seconds + price, length + 1
            price = self._price(self._rows + length)
        crowded = self._seconds < 2 * self._tokens * self._each * MARGIN  # only what is right every other time pays
        sequence.rest = min(2 * sequence.rest + 1, LONGEST_REST) if crowded and length == 0 else 0
        sequence.rests = sequence.rest
        if length == 0 and evidence and self.can_pay:
            sequence.skipped += 1
            sequence.fade()
            if evidence[0] != NO_EVIDENCE:
                self._evidence(evidence[0]).fade()
            if sequence.skipped >= sequence.probe and self._allowance >= self._each:
                length = 1
        return length

    def add(self, req_id: str, evidence: Sequence[int]) -> None:
        """Add tokens that were guessed on this evidence to the step."""
        sequence, gain = self._sequences[req_id], 1.0
        sequence.evidence = evidence
        for kind in evidence:
            gain *= self._chance(sequence, kind)
            self._tokens += gain
        if evidence:
            if sequence.skipped >= sequence.probe:
                self._allowance -= self._each * len(evidence)
            sequence.skipped = 0
            self._rows += len(evidence)
            guessing = self._guess * (self._rows - self._decoding)
            self._seconds = self.times.seconds(self._rows, self._line) + guessing
            self._each = self._price(self._rows)

    def observe(self, req_id: str, num_drafts: int, num_accepted: int) -> None:
        """Observe that the first ``num_accepted`` of ``num_drafts`` guesses were right; nothing is known of those after
        the first wrong one."""
        self.never_wrong &= num_accepted == num_drafts
        sequence = self._sequences.get(req_id)
        evidence = sequence.evidence if sequence is not None else ()
        for i in range(min(num_accepted + 1, num_drafts)):
            found = self._evidence(evidence[i] if i < len(evidence) else NO_EVIDENCE)
            if sequence is not None:
                sequence.add(i < num_accepted, found.rate)
            found.add(i < num_accepted)
        if sequence is not None:
            sequence.probe = FIRST_PROBE if num_accepted else min(2 * sequence.probe, LAST_PROBE)

    def release(self, req_id: str) -> None:
        """Release a sequence that has ended; it may be unknown."""
        self._sequences.pop(req_id, None)

    def _evidence(self, kind: int) -> _Found:
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = _Found(EVIDENCE_ACCEPTANCE, EVIDENCE_WEIGHT)
        return found

    def _chance(self, sequence: _Sequence, kind: int) -> float:
        rate = self._evidence(kind).rate
        prior = PRIOR_WEIGHT * rate
        return min(MOST_CHANCE, rate * (sequence.right + prior) / (sequence.expected + prior))
