"""A plan as JSON and as text."""

from __future__ import annotations

from collections import Counter
from typing import Any

from octavo.fetch.description import short_count
from octavo.memory.advice import Suggestion
from octavo.memory.dry_run import Plan
from octavo.memory.ledger import ModelMemory, gib
from octavo.plan.prices import Cost
from octavo.plan.speed import Speed, step_seconds
from octavo.plan.workload import Outlook


def as_json(plan: Plan, suggestions: list[Suggestion], reasons: list[str], served: bool) -> dict[str, Any]:
    """One object, also where the model does not fit."""
    ledger, cache = plan.ledger, plan.config.cache
    return {
        "model": plan.config.model.model,
        "architecture": plan.config.model.architecture,
        "parameters": plan.memory.parameters,
        "weight_dtype": plan.memory.weight_dtype,
        "device": plan.device.where.removeprefix("memory of ").removeprefix("one "),
        "memory_bytes": plan.device.total,
        "weights_bytes": plan.memory.weights,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_cache_dtype": plan.memory.specs[0].dtype if plan.memory.specs else None,
        "block_size": cache.block_size,
        "block_bytes": ledger.block_bytes if ledger else 0,
        "kv_cache_bytes": ledger.kv_cache if ledger else 0,
        "num_blocks": ledger.num_blocks - 1 if ledger else 0,
        "max_model_len": plan.config.scheduler.max_model_len,
        "max_num_seqs": plan.config.scheduler.max_num_seqs,
        "max_num_batched_tokens": plan.config.scheduler.max_num_batched_tokens,
        "max_concurrency": round(plan.concurrency, 2),
        "data_parallel_size": plan.num_engines,
        "num_blocks_in_all": (ledger.num_blocks - 1) * plan.num_engines if ledger else 0,
        "max_concurrency_in_all": round(plan.concurrency * plan.num_engines, 2),
        "fits": ledger is not None,
        "tensor_parallel_size": plan.ranks,
        "pipeline_parallel_size": plan.stages,
        "layers_per_stage": [stage.num_layers or plan.config.model.num_layers for stage in plan.of_stages],
        "weights_bytes_per_stage": [stage.weights for stage in plan.of_stages],
        "other_bytes": dict(ledger.parts) if ledger else {},
        "reasons": reasons,
        "suggestions": [suggestion.as_json() for suggestion in suggestions],
        "served": served,
    }


def as_text(
    plan: Plan,
    architecture: str,
    suggestions: list[Suggestion],
    reasons: list[str],
    seen: Outlook | None,
    speed: Speed | None,
    cost: Cost | None = None,
) -> list[str]:
    """Lines for people: the ledger as the engine prints it, what fits, what could be changed."""
    model, memory = plan.config.model, plan.memory
    lines = [f"{model.model}: {short_count(memory.parameters)} parameters, {architecture}"]
    if plan.stages > 1:
        layers, weights = (", ".join(said) for said in zip(*map(_stage, plan.of_stages), strict=True))
        lines.append(f"{'stages':14} {plan.stages:10,} of {layers} layers; weights of a device of each: {weights}")
    if plan.ledger is not None:
        lines += plan.ledger.lines({memory.weight_dtype: memory.weights - memory.drafter})
        if plan.ledger.kv_cache:
            lines += _capacity(plan)
    if seen is not None and speed is not None:
        lines += _workload(seen, speed)
    if cost is not None:
        lines.append(_cost(cost, speed is not None and speed.calibrated))
    lines += reasons
    if suggestions:
        lines += ["what to change:"] + [f"  {suggestion.text}" for suggestion in suggestions]
    return lines


def _stage(memory: ModelMemory) -> tuple[str, str]:
    return str(memory.num_layers), gib(memory.weights)


def _capacity(plan: Plan) -> list[str]:
    longest, most = plan.config.scheduler.max_model_len, plan.config.scheduler.max_num_seqs
    mean = -(-longest // 4)
    return [
        f"{'KV a token':14} {plan.kv_bytes_per_token:10,} bytes",
        f"{'sequences':14} {plan.sequences_of(longest):10,} of {longest:,} tokens, {plan.sequences_of(mean):,} of "
        f"{mean:,}; at most {most:,} run at a time (--max-num-seqs)",
        *_in_all(plan, longest),
    ]


def _in_all(plan: Plan, longest: int) -> list[str]:
    """The totals of several engines."""
    count = plan.num_engines
    if count == 1:
        return []
    blocks = plan.ledger.num_blocks - 1 if plan.ledger is not None else 0
    return [
        f"{'engines':14} {count:10,} with that each (--data-parallel-size); in all {blocks * count:,} blocks, "
        f"{plan.sequences_of(longest) * count:,} sequences of {longest:,} tokens"
    ]


def _workload(seen: Outlook, speed: Speed) -> list[str]:
    how = f"calibrated: {speed.source}" if speed.calibrated else "not calibrated: by what steps read and compute"
    return [
        f"{'workload':14} {seen.users:10,.0f} requests at the same time; {seen.capacity:,} fit at their longest, "
        f"{seen.mean_capacity:,} at their mean length",
        f"{'speed':14} {seen.tokens_per_second:10,.0f} tokens a second; first token after {seen.ttft * 1e3:,.0f} ms, "
        f"{seen.itl * 1e3:,.1f} ms between tokens ({how})",
        f"{'advice':14} --max-num-seqs {seen.max_num_seqs}",
    ]


def _cost(cost: Cost, calibrated: bool) -> str:
    line = f"{'cost':14} {cost.per_hour:10,.2f} {cost.currency} an hour"
    if cost.per_million is None:
        return line
    how = "calibrated" if calibrated else "an estimate: not calibrated"
    return f"{line}; {cost.per_million:,.2f} for a million output tokens, if requests never cease ({how})"


def rank_rows(plans: list[Plan | None], speed: Speed | None) -> list[str]:
    """A table of ways to share the model among devices: what one holds, and a step of one sequence."""
    rows = ["devices  TP x PP       weights each      KV blocks     a step  sequences of max_model_len"]
    for plan in plans:
        if plan is None:
            continue
        blocks, step = "-", "-"
        if plan.ledger is not None:
            blocks = f"{plan.ledger.num_blocks - 1:,}"
            step = f"{step_seconds(plan, speed, 1, 1024) * 1e3:,.1f} ms" if speed is not None else "-"
        fits = f"{plan.concurrency:,.1f} of {plan.config.scheduler.max_model_len:,}" if plan.ledger else "does not fit"
        later = "" if plan.obstacle is None else "   (not there yet)"
        rows.append(
            f"{plan.num_devices:7}  {plan.ranks:2} x {plan.stages:<2} {gib(plan.memory.weights):>18} {blocks:>14} "
            f"{step:>10}  {fits}{later}"
        )
    return rows


def explanation(plan: Plan) -> list[str]:
    """Explain how the figures come about."""
    config, memory = plan.config, plan.memory
    lines = [f"weights: {memory.parameters:,} parameters as held, and tables: {memory.weights:,} bytes"]
    for (dtype, parts, heads, size, window), count in Counter(
        (spec.dtype, spec.parts, spec.num_kv_heads, spec.head_size, spec.window) for spec in memory.specs
    ).items():
        seen = "all positions" if window is None else f"a window of {window:,}"
        what = "a latent" if parts == 1 else "a key and a value"
        lines.append(f"KV a token: {count} layers x {what} x {heads} heads x {size} numbers in {dtype}, of {seen}")
    ledger = plan.ledger
    if ledger is None:
        return lines
    on_cpu, share = plan.device.kind == "cpu", config.cache.gpu_memory_utilization
    lines.append(
        f"memory: {plan.device.total:,} bytes x --gpu-memory-utilization {share:g}, less the weights and "
        + ", ".join(f"{name} ({gib(size)})" for name, size in ledger.parts if name != "left free")
    )
    if not on_cpu:
        lines.append("activations and graphs are estimated; the engine measures them when it starts")
    if ledger.kv_cache:
        lines.append(
            f"blocks: {ledger.kv_cache:,} bytes / {ledger.block_bytes:,} a block of {ledger.layout.block_size} tokens, "
            f"less the null block: {ledger.num_blocks - 1:,}"
        )
    return lines
