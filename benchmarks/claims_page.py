"""The page of `make bench WHAT=claims`: claims, measurements, plots."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WASTE_GOAL, HF_GOAL = 0.04, 24.0


@dataclass(frozen=True)
class Claim:
    """A row of the table. ``met`` None: there is no goal."""

    text: str
    goal: str
    measured: str
    met: bool | None = None

    def row(self) -> str:
        verdict = {True: "met", False: "**missed**", None: ""}[self.met]
        return f"| {self.text} | {self.goal} | {self.measured} | {verdict} |"


def claims_of(results: dict[str, Any]) -> list[Claim]:
    """A claim for each measurement in ``results``."""
    found: list[Claim] = []
    if "waste" in results:
        mean = results["waste"]["block_sizes"]["16"]["mean"]
        found.append(Claim("share of the KV cache without a token", "< 4 %", f"{mean:.1%}", mean < WASTE_GOAL))
    for i, run in enumerate(results.get("hugging_face", {}).get("runs", [])):
        how = "default settings" if i == 0 else "same types"
        for one in run["baselines"]:
            single = one["batch_size"] == 1
            way = "one at a time" if single else f"batches of {one['batch_size']}"
            goal = (f"≥ {HF_GOAL:.0f}x", one["ratio"] >= HF_GOAL) if single and i == 0 else ("–", None)
            text = f"output tokens/s, {how}: Octavo / Hugging Face generate, {way}"
            found.append(Claim(text, goal[0], f"{one['ratio']:.1f}x", goal[1]))
    if "prefix" in results:
        for users in (1, 10):
            on, off = (_row(results["prefix"], way, users) for way in ("on", "off"))
            ttft = off["median_ttft_ms"] / on["median_ttft_ms"]
            rate = on["output_throughput"] / off["output_throughput"]
            text = f"prefix cache, {_people(users)}: prompts that share {results['prefix']['shared']} tokens"
            found.append(Claim(text, "–", f"first token {ttft:.1f}x sooner, {rate:.1f}x the tokens/s"))
    if "users" in results:
        paged, reserved = (_peak(results["users"], way) for way in ("paged", "reserved"))
        text = "concurrent requests in the same KV cache / with room for the longest"
        found.append(Claim(text, "–", f"{paged / reserved:.1f}x ({paged:.0f} and {reserved:.0f})"))
    return found


def _row(prefix: dict[str, Any], caching: str, users: int) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in prefix["rows"] if row["caching"] == caching and row["users"] == users)
    return found


def _people(users: int) -> str:
    return f"{users} user{'s' * (users > 1)}"


def _median(users: dict[str, Any], way: str, name: str) -> float:
    return statistics.median(run[name] for run in users["runs"][way])


def _peak(users: dict[str, Any], way: str) -> float:
    return _median(users, way, "peak")


def text_of(results: dict[str, Any]) -> str:
    """The page, in Markdown."""
    about = results["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        "# What is claimed, measured",
        "",
        "<!-- Written by benchmarks/claims.py from benchmarks/results/claims.json: change these. -->",
        "",
        "| claim | goal | measured | |",
        "|---|---:|---:|---|",
        *(claim.row() for claim in claims_of(results)),
        "",
        f"Model: SmolLM2-135M-Instruct, the embedded one. Machine: {about['machine']}; no GPU. Date: {about['date']}. "
        f"Versions: {versions} (commit {about['commit']}). Load average before the run: {about['load_before']}. Ratios "
        "are taken within the run. Other servers on the same machine: [Performance on a CPU](performance.md).",
        "",
        "```sh",
        about["command"],
        "```",
    ]
    for name, section in SECTIONS.items():
        if name in results:
            lines += ["", *section(results[name])]
    return "\n".join(lines) + "\n"


def _waste_section(waste: dict[str, Any]) -> list[str]:
    sizes = waste["block_sizes"]
    return [
        "## Memory that holds no token",
        "",
        "![share of the KV cache without a token, by size of blocks](claims-waste.png)",
        "",
        f"{waste['requests']} concurrent requests, each of {waste['shortest']} to {waste['longest']:,} tokens (prompt "
        "and answer), run through the engine's own scheduler and KV cache manager until the last one ends. No model "
        "runs, so the figure is the same on every machine. With blocks of 16 tokens, the default, "
        f"{sizes['16']['mean']:.1%} of the allocated cache holds no token, on average over all steps "
        f"({sizes['16']['worst_step']:.1%} in the worst): each request's last block is half empty. If each request "
        f"reserves {waste['longest']:,} tokens at its start, {waste['reserved']['mean']:.0%} of the cache holds none.",
    ]


def _hf_section(found: dict[str, Any]) -> list[str]:
    lines = [
        "## Beside Hugging Face generate",
        "",
        "![output tokens a second of Octavo and of Hugging Face generate](claims-hugging-face.png)",
        "",
        "| | weights | activations | KV cache | batch | output tokens/s | Octavo / this |",
        "|---|---|---|---|---|---:|---:|",
    ]
    for run in found["runs"]:
        own = run["octavo"]
        batch = f"continuous, up to {min(own['max_num_seqs'], run['num_requests'])}"
        lines.append(_hf_row("**Octavo**", own, batch, f"**{run['output_tokens_per_second']:,.0f}**", ""))
        for one in run["baselines"]:
            batch = "one at a time" if one["batch_size"] == 1 else f"static, {one['batch_size']}"
            rate, ratio = f"{one['output_tokens_per_second']:,.1f}", f"{one['ratio']:.1f}x"
            lines.append(_hf_row("Hugging Face", one, batch, rate, ratio))
    return [
        *lines,
        "",
        "All runs use the same prompts of random words and greedy decoding to full length; times include prompts. "
        "The first rows show Octavo's default settings with the file's own weights, the others the baseline's types. A "
        "loop over `generate` runs one prompt at a time; a static batch holds prompts of similar length and lasts as "
        "long as its longest answer.",
        "",
        "```text",
        *(run["command"] for run in found["runs"]),
        "```",
    ]


def _hf_row(name: str, types: dict[str, Any], batch: str, rate: str, ratio: str) -> str:
    return (
        f"| {name} | {types['weights']} | {types['activations']} | {types['kv_cache']} | {batch} | {rate} | {ratio} |"
    )


def _prefix_section(prefix: dict[str, Any]) -> list[str]:
    rows = [
        f"| {row['users']} | {row['caching']} | {row['output_throughput']:,.1f} | {row['median_ttft_ms']:,.0f} ms "
        f"| {row['p99_ttft_ms']:,.0f} ms | {row['prefix_hit_rate']:.0f} % |"
        for row in sorted(prefix["rows"], key=lambda row: row["users"])
    ]
    return [
        "## Prompts with a common prefix",
        "",
        "![time to the first token and output tokens a second with and without the prefix cache](claims-prefix.png)",
        "",
        f"Every prompt has {prefix['shared']} shared tokens (as of a system prompt) and {prefix['own']} of its own. "
        "Each user sends a request when the previous one is answered. The very first request is not timed, but counts "
        "in the hit rate.",
        "",
        "| users | prefix cache | output tokens/s | first token, median | 99th percentile | hit rate |",
        "|---:|---|---:|---:|---:|---:|",
        *rows,
        "",
        "```text",
        prefix["command"],
        "```",
    ]


def _users_section(users: dict[str, Any]) -> list[str]:
    rows = [
        f"| {name} | {_peak(users, way):.0f} | {_median(users, way, 'output_throughput'):,.0f} "
        f"| {_median(users, way, 'median_ttft_ms') / 1000:,.1f} s | {_median(users, way, 'preemptions'):.0f} |"
        for way, name in (("paged", "as they grow"), ("reserved", f"{users['longest']:,} tokens each"))
    ]
    length = users["runs"]["paged"][0]["mean_length"]
    commands = [users["runs"][way][0]["command"] for way in ("paged", "reserved")]
    return [
        "## Concurrent requests in the same memory",
        "",
        "![running requests over time](claims-users.png)",
        "",
        f"The KV cache has {users['tokens']:,} tokens ({users['cache_bytes'] / 2**20:.0f} MiB). Requests have "
        f"{length:.0f} tokens on average (prompt and answer), at most {users['longest']:,}, and all are sent at once. "
        f"If each request reserves the maximum, {users['reserved']} run at the same time. Octavo allocates blocks as "
        "requests grow; when no block is left, the newest request waits and is computed again (preemption).",
        "",
        "| allocation | concurrent requests | output tokens/s | first token, median | preemptions |",
        "|---|---:|---:|---:|---:|",
        *rows,
        "",
        "```text",
        *commands,
        users["load"],
        "```",
    ]


SECTIONS = {
    "waste": _waste_section,
    "hugging_face": _hf_section,
    "prefix": _prefix_section,
    "users": _users_section,
}


def plot_all(results: dict[str, Any], folder: Path) -> None:
    """PNG files beside the page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, (file, size, draw) in PLOTS.items():
        if name in results:
            figure, axes = pyplot.subplots(1, size, figsize=(8, 3.2), squeeze=False)
            draw(list(axes[0]), results[name])
            for axis in axes[0]:
                axis.spines[["top", "right"]].set_visible(False)
            figure.tight_layout()
            figure.savefig(folder / file, dpi=110, metadata={"Software": None})
            pyplot.close(figure)


OURS, OTHERS = "tab:blue", "tab:gray"


def _bars(axis: Any, names: list[str], values: list[float], colors: list[str], form: str) -> None:
    bars = axis.bar(names, values, color=colors, width=0.6)
    labels = [form.format(value) for value in values]
    axis.bar_label(bars, labels, padding=2, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axis.margins(y=0.15)


def _plot_waste(axes: list[Any], waste: dict[str, Any]) -> None:
    sizes = waste["block_sizes"]
    names = [f"blocks of {size}" for size in sizes] + [f"room for\n{waste['longest']:,} tokens"]
    values = [100 * sizes[size]["mean"] for size in sizes] + [100 * waste["reserved"]["mean"]]
    _bars(axes[0], names, values, [OURS] * len(sizes) + [OTHERS], "{:.1f} %")
    axes[0].axhline(100 * WASTE_GOAL, color="tab:red", linewidth=1, linestyle="--", label="goal: below 4 %")
    axes[0].set_ylabel("KV cache without a token, %")
    axes[0].legend(frameon=False, loc="upper left")


def _plot_hf(axes: list[Any], found: dict[str, Any]) -> None:
    for axis, run in zip(axes, found["runs"], strict=True):
        own = run["octavo"]
        rates = [run["output_tokens_per_second"], *(one["output_tokens_per_second"] for one in run["baselines"])]
        ways = [
            "one at\na time" if one["batch_size"] == 1 else f"batches\nof {one['batch_size']}"
            for one in run["baselines"]
        ]
        names = ["Octavo", *(f"HF, {way}" for way in ways)]
        _bars(axis, names, rates, [OURS, OTHERS, OTHERS], "{:,.0f}")
        axis.set_title(f"Octavo {own['weights']}, HF {run['baselines'][0]['weights']}", fontsize=10)
    axes[0].set_ylabel("output tokens a second")


def _plot_prefix(axes: list[Any], prefix: dict[str, Any]) -> None:
    for axis, (key, title) in zip(
        axes,
        {"median_ttft_ms": "first token, median, ms", "output_throughput": "output tokens a second"}.items(),
        strict=True,
    ):
        rows = sorted(prefix["rows"], key=lambda row: (row["users"], row["caching"] == "on"))
        names = [f"{_people(row['users'])}\ncache {row['caching']}" for row in rows]
        _bars(
            axis, names, [row[key] for row in rows], [OURS if r["caching"] == "on" else OTHERS for r in rows], "{:,.0f}"
        )
        axis.set_title(title, fontsize=10)


def _plot_users(axes: list[Any], users: dict[str, Any]) -> None:
    for way, color, label in (("paged", OURS, "blocks as they grow"), ("reserved", OTHERS, "room for the longest")):
        points = users["runs"][way][0]["running"]
        times, counts = zip(*points, strict=True)
        axes[0].step(times, counts, where="post", color=color, label=label)
    axes[0].set_xlabel("seconds")
    axes[0].set_ylabel("requests running")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)


PLOTS = {
    "waste": ("claims-waste.png", 1, _plot_waste),
    "hugging_face": ("claims-hugging-face.png", 2, _plot_hf),
    "prefix": ("claims-prefix.png", 2, _plot_prefix),
    "users": ("claims-users.png", 1, _plot_users),
}
