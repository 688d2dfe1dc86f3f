"""Where one step goes: every part of it, at 1, 20 and (a prompt) 128 rows, beside what the machine would allow.

    python -m benchmarks step_profile [--rows 1,20] [--no-server] [--page]
    python -m benchmarks step_profile --model FOLDER --quantization int8 --no-server

Three measurements on one model, the embedded one by default, all in one run. The machine: how fast it reads memory and
multiplies. The kernels: a recorded step taken apart, each kind replayed with the caches emptied of its weights. The
rest: timers around the scheduler, the runner and the sampler of an engine that generates, and the CPU time of a
server's two processes under that many users. Figures go to results/step_profile.json, under the kind of processor and
the name of the format; ``--page`` writes the tables into docs/measurements.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import octavo_kernels
from benchmarks.kernels_cpu import best, get_library, limits
from benchmarks.peers.cpus import better_dtype, cpu_kind, load_results, save_results
from benchmarks.sections import replace_section
from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.worker.cpu.recorded_steps import RecordedSteps
from octavo_kernels import AttentionMetadata, cpu
from octavo_kernels.cpu.recording import Program
from octavo_kernels.quant import PackedLinear

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "measurements.md"
CONTEXT, PROMPT, OUTPUT = 192, 128, 128
EMBEDDED = "SmolLM2-135M, Q4_1"
LINEARS = ("linear: qkv", "linear: attention out", "linear: gate, up", "linear: down")
LINEAR_KINDS = ("quantized_linear", "dense_linear")
SQUARE = 1024  # of the matrices whose product shows what the machine can multiply: they stay in its caches
GATED = LINEARS[2]
KINDS = {
    "embedding": "embedding",
    "quantized_embedding": "embedding",
    "quantize": "norms, activation, quantise",
    "rms_norm": "norms, activation, quantise",
    "silu_and_mul": "norms, activation, quantise",
    "rope_and_cache": "rotary, cache write",
    "paged_attention": "attention",
}


class Timers:
    """Seconds spent in methods, one list of calls a name."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = {}
        self._undo: list[tuple[Any, str, Any]] = []

    def watch(self, owner: Any, method: str, name: str) -> None:
        original, calls = getattr(owner, method), self.calls.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                calls.append(time.perf_counter() - started)

        self._undo.append((owner, method, original))
        setattr(owner, method, timed)

    def stop(self) -> None:
        for owner, method, original in self._undo:
            setattr(owner, method, original)

    def median_ms(self, name: str, last: int) -> float:
        """Of the last calls: those before belong to prompts, or recorded what is replayed now."""
        calls = self.calls[name][-last:]
        return 1e3 * statistics.median(calls) if calls else 0.0


# ---------------------------------------------------------------- kernels


def fill(model: CausalLM, caches: list[torch.Tensor], blocks: int) -> None:
    """Write to the first blocks: memory that nobody has written is one page of zeros, however much of it is read."""
    slots = torch.arange(blocks * caches[0].shape[3])
    for cache, spec in zip(caches, model.kv_cache_specs(), strict=True):
        qkv = torch.randn(len(slots), 3 * spec.num_kv_heads * spec.head_size)
        octavo_kernels.rope_and_cache(
            qkv, slots, None, cache, slots, spec.num_kv_heads, spec.num_kv_heads, spec.head_size
        )


def all_limits() -> dict[str, float]:
    """What this machine can do: GB/s of reading, and thousand million products a second of int8 and of 16 bits, each by
    the fastest way known: our kernels' dot products, or torch's product of two square matrices."""
    found = limits()
    int8 = torch.randint(-127, 128, (SQUARE, SQUARE), dtype=torch.int8)
    real = torch.randn(SQUARE, SQUARE).to(getattr(torch, better_dtype()))
    rates = {"int8_gmac_s": best(lambda: torch._int_mm(int8, int8), 10), "real_gmac_s": best(lambda: real @ real, 10)}
    for name, seconds in rates.items():
        found[name] = max(found.get(name, 0.0), SQUARE**3 / seconds / 1e9)
    return found


def kernels(llm: LLM, rows: int, new: int, limit: dict[str, float], repeats: int) -> list[dict[str, Any]]:
    """Parts of a step of ``rows`` sequences that compute ``new`` tokens each: milliseconds, and the least possible."""
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    model, caches = runner.model, runner.kv_cache.layers
    length = CONTEXT if new == 1 else new
    block = caches[0].shape[3]
    pages = -(-length // block)
    table = (torch.randperm(rows * pages) % (caches[0].shape[1] - 1) + 1).int().view(rows, pages)
    fill(model, caches, rows * pages + 1)
    at = torch.arange(length - new, length)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, rows * new + 1, new, dtype=torch.int32),
        seq_lens=torch.full((rows,), length, dtype=torch.int32),
        block_table=table,
        slot_mapping=(table[:, at // block].long() * block + at % block).flatten(),
        max_query_len=new,
        max_seq_len=length,
        num_actual_tokens=rows * new,
    )
    ids, positions = torch.randint(0, 40_000, (rows * new,)), at.repeat(rows)
    program = cpu.record(lambda: model(ids, positions, ForwardContext([metadata], caches)))
    layers = [layer.method.held for layer in model.linear_layers() if layer is not model.lm_head]
    plain = [name for name in LINEARS if name != GATED or "gated_linear" not in program.kinds]

    def label(kind: str, number: int) -> str:
        if kind == "gated_linear":
            return GATED
        if kind in LINEAR_KINDS:
            return plain[number % len(plain)]
        return KINDS.get(kind, kind)

    evict = torch.ones(1 << 24, dtype=torch.int64)
    least: dict[str, tuple[float, float]] = {}
    for number, weight in enumerate(layers):
        name = LINEARS[number % 4]
        rate = limit["int8_gmac_s" if isinstance(weight, PackedLinear) else "real_gmac_s"]
        size, products = least.get(name, (0.0, 0.0))
        least[name] = (size + weight.nbytes, products + rows * new * weight.channels * weight.width / rate)
    least["attention"] = (
        len(caches) * rows * length * 2 * caches[0].shape[2] * caches[0].shape[4] * caches[0].itemsize,
        0,
    )
    parts = []
    for name, part in program.by_kind(label).items():
        ms = 1e3 * cold(part, evict if name in least else None, repeats)
        entry: dict[str, Any] = {"part": name, "ms": ms}
        if name in least:
            size, products = least[name]
            entry |= {"memory_ms": size / limit["read_gb_s"] / 1e6, "products_ms": products / 1e6}
        parts.append(entry)
    parts.append({"part": "all layers, replayed as one", "ms": 1e3 * cold(program, None, 2 * repeats)})
    return parts


def cold(program: Program, evict: torch.Tensor | None, repeats: int) -> float:
    """Seconds of the fastest replay; weights alone would stay in the cache from one replay to the next."""
    times = []
    for _ in range(repeats):
        if evict is not None:
            evict.sum()
        started = time.perf_counter()
        program.replay()
        times.append(time.perf_counter() - started)
    return min(times)


# ---------------------------------------------------------------- engine


def engine(llm: LLM, rows: int) -> list[dict[str, Any]]:
    """Median milliseconds a decode step of ``rows`` sequences in the engine's loop, part by part."""
    core = llm.engine
    assert isinstance(core, EngineCore)
    steps = 48
    params = SamplingParams(max_tokens=steps + 8, ignore_eos=True, temperature=0)
    generator = torch.Generator().manual_seed(rows)
    prompts = torch.randint(100, 40_000, (rows, PROMPT), generator=generator).tolist()
    outputs: list[Any] = []
    timers = Timers()
    timers.watch(core, "step", "step")
    timers.watch(core.scheduler, "schedule", "schedule")
    timers.watch(core.scheduler, "update_from_output", "update")
    timers.watch(core.executor, "execute_model", "execute")
    timers.watch(RecordedSteps, "_replay", "program")
    take = core.step
    core.step = lambda: outputs.append(take()) or outputs[-1]  # type: ignore[method-assign, func-returns-value]
    try:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    finally:
        timers.stop()
    ms = {name: timers.median_ms(name, steps) for name in timers.calls}
    messages = _messages(outputs[-steps // 2])
    return [
        {"part": "layers, head, best tokens: one program", "ms": ms["program"]},
        {"part": "runner: inputs, results", "ms": ms["execute"] - ms["program"]},
        {"part": "scheduler", "ms": ms["schedule"] + ms["update"]},
        {"part": "statistics, loop", "ms": ms["step"] - ms["execute"] - ms["schedule"] - ms["update"]},
        {"part": "message to the API, packed", "ms": messages[0]},
        {"part": "message to the API, unpacked", "ms": messages[1]},
    ]


def _messages(outputs: Any) -> tuple[float, float]:
    """Milliseconds to pack one step's results for the other process, and to unpack them there."""
    from octavo.engine.output_codec import decode_outputs, encode_outputs

    packed = encode_outputs(outputs)
    return 1e3 * best(lambda: encode_outputs(outputs), 50), 1e3 * best(lambda: decode_outputs(packed), 50)


# ---------------------------------------------------------------- server


def server(rows_of: list[int]) -> dict[int, dict[str, float]]:
    """Under as many users: milliseconds a step over HTTP, and the CPU time a step of each of the processes."""
    from benchmarks.peers.compare import Prompts
    from benchmarks.peers.engines import all_engines, peers_folder
    from benchmarks.peers.load import run_level
    from benchmarks.peers.server import Server

    ours = all_engines(peers_folder(), 1)[0]
    prompts, found = Prompts(), {}
    with Server(ours) as running:
        for rows in rows_of:
            run_level(running.port, ours.model, prompts.take(rows), rows, 8)
            api, core = running.tree()[:2]
            before = [sum(process.cpu_times()[:2]) for process in (api, core)]
            requests = 4 if rows == 1 else 1
            level = run_level(running.port, ours.model, prompts.take(requests * rows), rows, OUTPUT)
            spent = [sum(p.cpu_times()[:2]) - was for p, was in zip((api, core), before, strict=True)]
            steps = requests * OUTPUT
            found[rows] = {
                "itl_p50_ms": level.itl_p50,
                "tok_s": level.tok_s,
                "ms_per_step": 1e3 * level.seconds / steps,
                "api_cpu_ms": 1e3 * spent[0] / steps,
                "core_cpu_ms": 1e3 * spent[1] / steps,
            }
    return found


# ---------------------------------------------------------------- the page


def page(cpus: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Of all kinds of processor, and all formats measured on each."""
    lines: list[str] = []
    for cpu_name, formats in cpus.items():
        lines += [f"### {cpu_name}", ""]
        for name, figures in formats.items():
            lines += [*_format(name, figures), ""]
    return "\n".join(lines[:-1])


def _format(name: str, figures: dict[str, Any]) -> list[str]:
    limit = figures["limits"]
    real = f", {limit['real_gmac_s']:.0f} of {figures['real']}" if "real_gmac_s" in limit else ""
    lines = [
        f"**{name}**: {figures['threads']} threads, {figures['isa']} kernels, {figures['date']}. Limits measured in "
        f"the same run: {limit['read_gb_s']:.1f} GB/s of memory reads, {limit['int8_gmac_s']:.0f} billion int8 "
        f"products a second{real}.",
        "",
    ]
    for step in figures["steps"]:
        lines += [*_kernels(step), ""]
    return lines + _whole_step({step["rows"]: step for step in figures["steps"] if step["new"] == 1})


def _kernels(step: dict[str, Any]) -> list[str]:
    what = f"{step['rows']} rows" if step["new"] == 1 else f"one prompt of {step['new']} tokens"
    context = f", each over {CONTEXT} tokens of context" if step["new"] == 1 else ""
    title = f"{what.replace('1 rows', '1 row')}{context}"
    lines = [f"| {title} | ms | memory allows | products allow | of the limit |", "|---|---:|---:|---:|---:|"]
    total = [0.0, 0.0]
    for part in step["kernels"]:
        bound = max(part.get("memory_ms", 0), part.get("products_ms", 0))
        cells = [f"{part[key]:.2f}" if part.get(key) else "" for key in ("memory_ms", "products_ms")]
        if part["part"].startswith("all"):
            bound = total[1]
        else:
            total = [total[0] + part["ms"], total[1] + bound]
        share = f"{bound / part['ms']:.0%}" if bound else ""
        lines.append(f"| {part['part']} | {part['ms']:.2f} | {cells[0]} | {cells[1]} | {share} |")
    return lines


def _whole_step(engines: dict[int, dict[str, Any]]) -> list[str]:
    lines = ["| the whole step, ms | " + " | ".join(f"{rows} rows" for rows in engines) + " |"]
    lines.append("|---" + "|---:" * len(engines) + "|")
    names = [part["part"] for part in next(iter(engines.values()))["engine"]]
    for number, name in enumerate(names):
        lines.append(f"| {name} | " + " | ".join(f"{s['engine'][number]['ms']:.2f}" for s in engines.values()) + " |")
    titles = {
        "itl_p50_ms": "over HTTP: between two tokens of a user (p50)",
        "core_cpu_ms": "over HTTP: CPU time of the core, all threads",
        "api_cpu_ms": "over HTTP: CPU time of the API process",
    }
    for key, title in titles.items():
        if all("http" in step for step in engines.values()):
            lines.append(f"| {title} | " + " | ".join(f"{s['http'][key]:.2f}" for s in engines.values()) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rows", default="1,20", help="of the decoding steps; a prompt of 128 is measured too (default: 1,20)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each replay; the fastest counts (default: 15)")
    parser.add_argument("--no-server", action="store_true", help="leave the measurements over HTTP out")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/measurements.md")
    parser.add_argument("--model", help="a folder or name, measured without a server (default: the embedded model)")
    parser.add_argument("--quantization", help="of its weights")
    parser.add_argument("--name", default=EMBEDDED, help="of the format (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "step_profile.json")
    args = parser.parse_args()
    rows_of = [int(rows) for rows in args.rows.split(",")]
    library = get_library()
    if library is None:
        raise SystemExit("the CPU kernels are not built: make setup")
    if args.model and (args.name == EMBEDDED or not args.no_server):
        parser.error("--model: needs a --name, and --no-server")
    torch.manual_seed(0)
    figures: dict[str, Any] = {
        "isa": library.isa,
        "date": time.strftime("%Y-%m-%d"),
        "real": better_dtype(),
        "limits": all_limits(),
    }
    llm = LLM(args.model, quantization=args.quantization, max_num_seqs=max(rows_of))
    figures["threads"] = torch.get_num_threads()
    figures["steps"] = []
    with torch.inference_mode():
        for rows, new in [*((rows, 1) for rows in rows_of), (1, PROMPT)]:
            print(f"{rows} x {new}", flush=True)
            step = {"rows": rows, "new": new, "kernels": kernels(llm, rows, new, figures["limits"], args.repeats)}
            if new == 1:
                step["engine"] = engine(llm, rows)
            figures["steps"].append(step)
    del llm
    if not args.no_server:
        print("over HTTP", flush=True)
        for rows, found in server(rows_of).items():
            next(step for step in figures["steps"] if step["rows"] == rows and step["new"] == 1)["http"] = found
    results = load_results(args.output)
    results["cpus"].setdefault(cpu_kind(), {})[args.name] = figures
    save_results(args.output, results)
    print("\n".join(_format(args.name, figures)))
    if args.page:
        replace_section(PAGE, "step-profile", page(results["cpus"]))


if __name__ == "__main__":
    main()
