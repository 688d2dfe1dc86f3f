"""The speed of steps, from what they read and compute: shares of a device's peak, or what a calibration has measured.

A step that decodes reads all weights that its tokens pass through and their keys and values; one with prompts computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

from octavo.interface.model_config.experts import ExpertsConfig
from octavo.memory.dry_run import Plan
from octavo.plan.gpus import GPU

# Shares of the peak that engines reach on large models; a calibration replaces them.
BANDWIDTH_SHARE, COMPUTE_SHARE = 0.65, 0.45
# Speed of one core of a CPU, as engines of small models reach it: bytes and operations a second.
CORE_BANDWIDTH, CORE_FLOPS = 1e10, 2e11
STEP_SECONDS = 0.0005  # that a step takes beside, at least


@dataclass(frozen=True)
class Speed:
    """The speed that one device, or a machine without GPUs, reaches, in bytes and operations a second."""

    bandwidth: float
    flops: float
    step_seconds: float = STEP_SECONDS
    # Measured ones alone. What decoded tokens compute is then added to what a step reads, where a data sheet says no
    # more than that the longer of both counts: (sequences, seconds for each operation of one sequence), on a curve, as
    # kernels do not take twice as long for twice as many rows.
    decode: tuple[tuple[float, float], ...] = ()
    kv_bandwidth: float | None = None
    prompt_bandwidth: float | None = None  # of the keys and values that tokens of prompts look back at
    request_seconds: float = 0.0  # of a request outside of steps, before its first token
    source: str = ""  # the file that holds the calibration; '': there is none

    @property
    def calibrated(self) -> bool:
        """True if it was measured."""
        return bool(self.source)

    @classmethod
    def of_gpu(cls, gpu: GPU) -> Speed:
        """Estimate from a GPU's data sheet."""
        return cls(gpu.bandwidth * 1e9 * BANDWIDTH_SHARE, gpu.tflops * 1e12 * COMPUTE_SHARE)

    @classmethod
    def of_cpu(cls, cores: int) -> Speed:
        """Estimate from the number of cores alone."""
        return cls(CORE_BANDWIDTH * cores, CORE_FLOPS * cores)

    @classmethod
    def from_dict(cls, said: dict[str, Any], source: str) -> Speed:
        """The inverse of `to_dict`. Raises TypeError, ValueError and KeyError."""
        numbers = {f.name: said.get(f.name) for f in fields(cls) if f.name not in ("source", "decode")}
        decode = tuple((float(count), float(seconds)) for count, seconds in said["decode"])
        given = {name: float(value) for name, value in numbers.items() if value is not None}
        return cls(**given, decode=decode, source=source)

    def to_dict(self) -> dict[str, Any]:
        """The figures, as JSON can hold them."""
        return {name: value for name, value in asdict(self).items() if name != "source"}


@dataclass(frozen=True)
class Point:
    """The measured medians of a live server, in seconds."""

    users: int
    context: int
    output: int
    ttft: float
    itl: float  # of steps without prompts: the median gap between tokens
    tokens_per_second: float


def fit_speed(plan: Plan, points: Sequence[Point]) -> Speed:
    """Fit a speed to points of several numbers of users with short prompts, and of one user with prompts of at least
    three lengths. ``plan``: of the server that they were measured on."""
    parts = plan.parts_of_machine
    computed = 2 * plan.memory.parameters * active_share(plan) / plan.ranks * parts
    kv_bytes = plan.kv_bytes_per_token / plan.ranks * parts
    short, middle, *_, long = sorted((point for point in points if point.users == 1), key=lambda point: point.context)
    several = sorted((point for point in points if point.context == short.context), key=lambda point: point.users)
    row = (several[1].itl - short.itl) / (several[1].users - 1) if len(several) > 1 else 0.0
    base = max(short.itl - max(row, 0.0), short.itl / 4, 1e-6)
    read = max(base - STEP_SECONDS, base / 2)
    rising = accumulate((point.itl - base for point in several), max)
    decode = tuple((point.users, max(1e-9, extra) / computed) for point, extra in zip(several, rising, strict=True))
    length = (long.context + long.output / 2) - (short.context + short.output / 2)
    position = max(1e-12, (long.itl - short.itl) / max(1.0, length))
    token, look_back = _prompt_seconds(plan, base, short, middle, long)
    spent = short.context * (token + look_back * short.context / 2)
    return Speed(
        bandwidth=plan.memory.weights * plan.stages * parts / read,
        flops=computed / token,
        step_seconds=base - read,
        decode=decode,
        kv_bandwidth=kv_bytes / position,
        prompt_bandwidth=kv_bytes / look_back,
        request_seconds=max(0.0, short.ttft - base - spent),
    )


def _prompt_seconds(plan: Plan, base: float, short: Point, middle: Point, long: Point) -> tuple[float, float]:
    """Seconds of a prompt's token, and of each position that it looks back at. ``base``: seconds of a step by
    itself."""
    room = _room(plan, 1)

    def each(one: Point, other: Point) -> float:
        """A token between the two lengths, which looks back at as many as lie before their mean."""
        steps = -(-other.context // room) - -(-one.context // room)
        return (other.ttft - one.ttft - steps * base) / (other.context - one.context)

    first, second = each(short, middle), each(middle, long)
    look_back = max(1e-15, (second - first) / ((long.context - short.context) / 2))
    return max(1e-9, first - look_back * (short.context + middle.context) / 2), look_back


def active_share(plan: Plan) -> float:
    """The share of the parameters that a token passes through: of experts, those that are chosen."""
    text = plan.config.model.text
    if not isinstance(text, ExpertsConfig) or not text.expert_count:
        return 1.0
    count, chosen = text.num_experts, text.num_experts_per_tok
    experts = min(text.expert_parameters, 0.98 * plan.memory.parameters)
    return float(1 - experts * (1 - chosen / count) / plan.memory.parameters)


def step_seconds(
    plan: Plan, speed: Speed, sequences: float, length: float, prompt: float = 0.0, position: float = 0.0
) -> float:
    """Seconds of a step in which so many sequences of that length get a token each, beside so many tokens of prompts,
    at that position on average."""
    share, ranks, parts = active_share(plan), plan.ranks, plan.parts_of_machine
    touched = min(1.0, share * (sequences + prompt)) if share < 1 else 1.0
    weights = plan.memory.weights * plan.stages * touched
    kv_bytes = plan.kv_bytes_per_token / ranks
    computed = 2 * plan.memory.parameters * share / ranks
    if not speed.decode or speed.kv_bandwidth is None:
        read = (weights + sequences * length * kv_bytes) / speed.bandwidth
        return speed.step_seconds + parts * max(read, computed * (sequences + prompt) / speed.flops)
    cached = sequences * length * kv_bytes / speed.kv_bandwidth
    if speed.prompt_bandwidth is not None:
        cached += prompt * position * kv_bytes / speed.prompt_bandwidth
    arithmetic = computed * (_decode_seconds(speed.decode, sequences) + prompt / speed.flops)
    return speed.step_seconds + parts * (weights / speed.bandwidth + cached + arithmetic)


def _decode_seconds(measured: Sequence[tuple[float, float]], sequences: float) -> float:
    """Interpolate seconds between the numbers of sequences that were measured; beyond the last, on the line through the
    origin or the last two, whichever is steeper."""
    known = [(0.0, 0.0), *measured]
    for (fewer, less), (more, seconds) in pairwise(known):
        if sequences <= more:
            return less + (seconds - less) * (sequences - fewer) / (more - fewer)
    (fewer, less), (more, seconds) = known[-2:]
    return seconds + max(seconds / more, (seconds - less) / (more - fewer)) * (sequences - more)


@dataclass(frozen=True)
class Pace:
    """The pace, in seconds, of so many requests at a time, each of which is followed by another one."""

    ttft: float
    itl: float
    tokens_per_second: float


def pace(plan: Plan, speed: Speed, running: float, prompt: float, context: float, output: float) -> Pace:
    """``prompt`` tokens of ``context`` are computed for each request. A test holds it to what the scheduler does.

    Prompts fill steps, beside one token of each request that is being answered. Requests that began together go on
    together: their prompts come one after the other, and between the first token and the last of one come all others.
    """
    length, steps, prompt = context + output / 2, max(1.0, output - 1), max(1.0, prompt)
    room, all_prompts = _room(plan, running), running * prompt
    filled = all_prompts / max(1.0, all_prompts / room + 0.5)  # tokens of prompts in a step that has any
    plain = step_seconds(plan, speed, running, length)
    mixed = max(plain, step_seconds(plan, speed, running - 1, length, filled, max(0.0, context - prompt / 2)))
    between = (running - 1) * prompt / filled
    # The step that is under way when a request arrives: of three or more users, most find another one's prompt in it.
    # Then the steps of its own prompt, the last of which it shares.
    under_way = min(1.0, (running - 1) / 2) * min(1.0, all_prompts / room)
    shared = 0.5 * max(1 / running, min(1.0, (running - 1) * prompt / (2 * room)))
    waiting = max(0.0, between - steps)  # for prompts that have come before
    ttft = speed.request_seconds + (waiting + max(1.0, under_way + prompt / room + shared)) * mixed
    itl = plain + min(1.0, between / steps) * (mixed - plain)
    return Pace(ttft, itl, running * output / (ttft + (output - 1) * itl))


def _room(plan: Plan, running: float) -> float:
    """Tokens of prompts that a step takes."""
    scheduler = plan.config.scheduler
    room = max(1.0, scheduler.max_num_batched_tokens - running + 1)
    return min(room, scheduler.long_prefill_token_threshold or room)
