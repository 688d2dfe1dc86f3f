"""The CPU kernels beside torch's own and beside the machine's limits, which are measured in the same run.

    python -m benchmarks kernels_cpu [--threads N] [--quick] [--json FILE]

The shapes are SmolLM2-135M's: 30 layers, 9 query and 3 key/value heads of 64, and a head of 49,152 tokens. Every
figure is the best of a few runs with weights and caches that do not fit into the processor's caches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import octavo_kernels
from octavo_kernels import AttentionMetadata, AttentionOptions, cpu, packing, quant
from octavo_kernels.cpu.library import get_library

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INNER, VOCAB = 30, 9, 3, 64, 576, 1536, 49152
SHAPES = [((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
MACS = LAYERS * sum(n * k for n, k in SHAPES) + VOCAB * HIDDEN  # of one token


def best(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def limits() -> dict[str, float]:
    """What this machine can do: GB/s of reading, and thousand million int8 products a second."""
    library = get_library()
    if library is None:
        raise SystemExit("the CPU kernels are not built: make setup")
    threads, rounds = torch.get_num_threads(), 100_000
    memory, out = torch.ones(1 << 29, dtype=torch.uint8), torch.zeros(threads, dtype=torch.int64)
    read = library.pack("read_memory", memory.data_ptr(), out.data_ptr(), memory.numel())
    dots = library.pack("dot_products", out.data_ptr(), rounds)
    lanes = 64 if library.isa.startswith(("avx512", "amx")) else 32 if library.isa.startswith("avx") else 16
    return {
        "read_gb_s": memory.numel() / best(lambda: library.run(read), 10) / 1e9,
        "int8_gmac_s": threads * rounds * 12 * lanes / best(lambda: library.run(dots), 100) / 1e9,
    }


def packed(bits: int, affine: bool, channels: int, width: int, terms: int) -> quant.PackedLinear:
    shape = (channels, width // quant.GROUP)
    codes = torch.randint(1, 1 << bits, (*shape, quant.GROUP), dtype=torch.uint8)
    return packing.pack_codes(
        codes, torch.rand(shape).half(), torch.rand(shape).half() if affine else None, bits=bits, activation_terms=terms
    )


def linears(rows_of: list[int], repeats: int, limit: dict[str, float]) -> list[dict[str, Any]]:
    """All the linears of one step, head included: tokens/s by rows."""
    results = []

    def report(name: str, rows: int, seconds: float, weight_bytes: int, terms: int) -> None:
        entry: dict[str, Any] = {"linears": name, "rows": rows, "tokens_s": rows / seconds, "ms": seconds * 1e3}
        line = f"  {name:34s} {rows:4d} rows {rows / seconds:8.0f} tokens/s {seconds * 1e3:8.2f} ms"
        if weight_bytes:
            memory = weight_bytes / limit["read_gb_s"] / 1e9
            arithmetic = MACS * rows * terms / limit["int8_gmac_s"] / 1e9
            entry["of_limit"] = max(memory, arithmetic) / seconds
            line += f"   {entry['of_limit']:4.0%} of the {'memory' if memory > arithmetic else 'arithmetic'}'s limit"
        print(line, flush=True)
        results.append(entry)

    kinds = [
        ("W4A8 (Q4_1), head 8 bits x 2 terms", 4, True, 1),
        ("W4A8 (Q4_1), 2 terms everywhere", 4, True, 2),
        ("W8A8, head 2 terms", 8, False, 1),
        ("W8A8, 2 terms everywhere", 8, False, 2),
    ]
    for name, bits, affine, terms in kinds:
        layers = [packed(bits, affine, n, k, terms) for _ in range(LAYERS) for n, k in SHAPES]
        layers.append(packed(8, False, VOCAB, HIDDEN, 2))
        for rows in rows_of:
            inputs = {k: torch.randn(rows, k) for k in (HIDDEN, INNER)}
            outputs = [torch.empty(0)] * len(layers)

            def step(layers=layers, inputs=inputs, outputs=outputs) -> list[Tensor]:
                outputs[:] = [cpu.quantized_linear(inputs[p.width], p) for p in layers]
                return outputs

            program = cpu.record(step)
            report(name, rows, best(program.replay, repeats), sum(p.nbytes for p in layers), terms)
    shapes = SHAPES * LAYERS + [(VOCAB, HIDDEN)]
    int8_weights = [torch.randint(-127, 128, (n, k), dtype=torch.int8).t() for n, k in shapes]
    for rows in rows_of:
        values = {k: torch.randint(-127, 128, (rows, k), dtype=torch.int8) for k in (HIDDEN, INNER)}
        seconds = best(lambda v=values, all=int8_weights: [torch._int_mm(v[w.shape[0]], w) for w in all], repeats)
        report("torch._int_mm alone", rows, seconds, 0, 1)
    del int8_weights
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weights = [torch.randn(n, k).to(dtype) for n, k in shapes]
        dense = [packing.pack_dense(weight) for weight in weights]
        for rows in rows_of:
            x = {k: torch.randn(rows, k).to(dtype) for k in (HIDDEN, INNER)}
            ours = {k: v.float() if dtype == torch.float16 else v for k, v in x.items()}
            program = cpu.record(lambda x=ours, dense=dense: [cpu.dense_linear(x[w.width], w) for w in dense])
            report(f"dense {dtype}".replace("torch.", ""), rows, best(program.replay, repeats), 0, 1)
            seconds = best(lambda x=x, weights=weights: [F.linear(x[w.shape[1]], w) for w in weights], repeats)
            report(f"torch {dtype}".replace("torch.", ""), rows, seconds, 0, 1)
    return results


def paged(count: int, length: int, new: int, dtype: torch.dtype, block: int = 16):
    """``count`` sequences of ``length`` positions, ``new`` of them this step's, on pages in random order."""
    pages = -(-length // block)
    cache = torch.randn(2, count * pages + 1, KV_HEADS, block, HEAD_SIZE).to(dtype)
    table = (torch.randperm(count * pages) + 1).int().view(count, pages)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, count * new + 1, new, dtype=torch.int32),
        seq_lens=torch.full((count,), length, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((count * new,), -1),
        max_query_len=new,
        max_seq_len=length,
        num_actual_tokens=count * new,
    )
    return torch.randn(count * new, HEADS, HEAD_SIZE), cache, metadata


def gathered(q: Tensor, cache: Tensor, metadata: AttentionMetadata) -> list[Tensor]:
    """The same by copying each sequence's pages together and torch's attention."""
    out = []
    for r, rows in enumerate(q.split(metadata.max_query_len)):
        length = int(metadata.seq_lens[r])
        k, v = (c[metadata.block_table[r].long()].transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_SIZE) for c in cache)
        k, v, x = k[:, :, :length], v[:, :, :length], rows.to(k.dtype).transpose(0, 1)[None]
        out.append(F.scaled_dot_product_attention(x, k, v, is_causal=len(rows) > 1, enable_gqa=True))
    return out


def attention(repeats: int, limit: dict[str, float]) -> list[dict[str, Any]]:
    """One layer's attention: milliseconds, and for decode the bytes of keys and values read a second."""
    results = []
    cases = [(1, 128, 128), (1, 800, 800), (1, 1000, 1), (20, 256, 1), (20, 1000, 1)]
    for dtype in (torch.float32, torch.bfloat16):
        for count, length, new in cases:
            size = count * length * KV_HEADS * HEAD_SIZE * 2 * dtype.itemsize
            layers = [paged(count, length, new, dtype) for _ in range(max(1, min(LAYERS, (96 << 20) // size)))]
            ours = best(lambda a=layers: [cpu.paged_attention(*x, AttentionOptions(0.125)) for x in a], repeats) / len(
                layers
            )
            theirs = best(lambda a=layers: [gathered(*x) for x in a], max(2, repeats // 2)) / len(layers)
            what = f"prompt of {length}" if new > 1 else f"{count} x 1 row over {length}"
            line = f"  {str(dtype)[6:]:9s} {what:22s} {ours * 1e3:7.3f} ms   gather + SDPA {theirs * 1e3:7.3f} ms"
            entry: dict[str, Any] = {
                "attention": what,
                "dtype": str(dtype)[6:],
                "ms": ours * 1e3,
                "sdpa_ms": theirs * 1e3,
            }
            if new == 1:
                entry["gb_s"] = size / ours / 1e9
                line += f"   {entry['gb_s']:5.1f} GB/s, {entry['gb_s'] / limit['read_gb_s']:4.0%} of reading"
            print(line, flush=True)
            results.append(entry)
    return results


class Model:
    """SmolLM2-135M with made-up weights: what one decoding step calls."""

    def __init__(self, terms: int) -> None:
        self.layers = [[packed(4, True, n, k, terms) for n, k in SHAPES] for _ in range(LAYERS)]
        self.head, self.table = packed(8, False, VOCAB, HIDDEN, 2), torch.randn(VOCAB, HIDDEN)
        self.norm, self.cos_sin = torch.ones(HIDDEN), torch.randn(1024, HEAD_SIZE)
        self.terms = terms

    def step(self, ids: Tensor, positions: Tensor, caches: list[Tensor], metadata: AttentionMetadata) -> Tensor:
        k, x, residual = octavo_kernels, octavo_kernels.embedding(ids, self.table), None
        for cache, (qkv, out, gate_up, down) in zip(caches, self.layers, strict=True):
            rows, residual = k.rms_norm_quantize(x, self.norm, 1e-5, residual, self.terms)
            q = k.rope_and_cache(
                k.quantized_linear(rows, qkv),
                positions,
                self.cos_sin,
                cache,
                metadata.slot_mapping,
                HEADS,
                KV_HEADS,
                HEAD_SIZE,
            )
            x = k.quantized_linear(k.paged_attention(q, cache, metadata, AttentionOptions(0.125)).flatten(1), out)
            rows, residual = k.rms_norm_quantize(x, self.norm, 1e-5, residual, self.terms)
            x = k.quantized_linear(k.silu_and_mul_quantize(k.quantized_linear(rows, gate_up), self.terms), down)
        return k.quantized_linear(k.fused_add_rms_norm(x, residual, self.norm, 1e-5)[0], self.head)


def steps(rows_of: list[int], repeats: int, length: int = 192) -> list[dict[str, Any]]:
    """A whole decoding step with ``length`` tokens of context: called from Python, and recorded and replayed."""
    results = []
    for terms in (1, 2):
        model = Model(terms)
        for rows in rows_of:
            _, cache, metadata = paged(rows, length, 1, torch.bfloat16)
            caches = [torch.randn(cache.shape).bfloat16() for _ in range(LAYERS)]
            pages = metadata.block_table[:, (length - 1) // 16].long()
            metadata.slot_mapping = pages * 16 + (length - 1) % 16
            ids, positions = torch.randint(0, VOCAB, (rows,)), torch.full((rows,), length - 1)

            def step(model=model, ids=ids, positions=positions, caches=caches, metadata=metadata) -> Tensor:
                return model.step(ids, positions, caches, metadata)

            program = cpu.record(step)
            eager, replayed = best(step, repeats), best(program.replay, repeats)
            print(
                f"  4-bit weights, {terms} term(s) {rows:4d} rows   called {eager * 1e3:7.2f} ms   replayed "
                f"{replayed * 1e3:7.2f} ms   {rows / replayed:6.0f} tokens/s",
                flush=True,
            )
            parts = {kind: best(part.replay, repeats) * 1e3 for kind, part in program.by_kind().items()}
            shares = sorted(parts.items(), key=lambda item: -item[1])
            print("    " + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in shares), flush=True)
            results.append({"step_terms": terms, "rows": rows, "called_ms": eager * 1e3, "replayed_ms": replayed * 1e3})
            results[-1]["ms_by_kind"] = parts
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, help="threads to use (torch's number by default)")
    parser.add_argument("--quick", action="store_true", help="fewer rows and runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    repeats, rows_of = (3, [1, 20]) if args.quick else (8, [1, 5, 20, 128])
    limit = limits()
    isa = get_library().isa  # type: ignore[union-attr]
    print(
        f"{torch.get_num_threads()} threads, {isa}: reads {limit['read_gb_s']:.1f} GB/s, "
        f"{limit['int8_gmac_s']:.0f} GMAC/s int8"
    )
    print("\nLinears of SmolLM2-135M, one step")
    figures = {
        "limits": limit,
        "isa": isa,
        "threads": torch.get_num_threads(),
        "linears": linears(rows_of, repeats, limit),
    }
    print("\nAttention of one layer")
    figures["attention"] = attention(repeats, limit)
    print("\nA decoding step, 192 tokens of context")
    figures["steps"] = steps(rows_of, repeats)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
