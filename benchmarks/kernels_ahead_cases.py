"""Calls that launch every Triton kernel in the shapes of models, for kernels_ahead.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

HALVES = (torch.bfloat16, torch.float16)


FLOAT8 = torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import AttentionMetadata, AttentionOptions
    from octavo_kernels import triton as backend

    def attend(dtype, kv_dtype, head_size, heads, kv_heads, queries, count, limit=None, **options):
        rows = queries * count
        metadata = AttentionMetadata(
            query_start_loc=empty(count + 1, dtype=torch.int32),
            seq_lens=empty(count, dtype=torch.int32),
            block_table=empty(count, 256, dtype=torch.int32),
            slot_mapping=empty(rows, dtype=torch.int64),
            max_query_len=queries,
            max_seq_len=4096,
            num_actual_tokens=rows,
        )
        cache = empty(2, 1000, kv_heads, 16, head_size, dtype=kv_dtype)
        q = empty(rows, heads, head_size, dtype=dtype)
        backend.paged_attention(q, cache, metadata, AttentionOptions(head_size**-0.5, **options), limit)

    # Every row of the tables in triton/attention_configs.py: 16, 32, 64 and 128 rows of a tile, and prompts.
    steps = {"decode": (32, 8, 1), "5 drafts": (32, 8, 5), "8 of 8 heads": (64, 8, 8), "71/1 heads": (71, 1, 1)}
    for dtype in HALVES:
        for kv_dtype in (dtype, FLOAT8):
            name = f"attention {short(dtype)} kv {short(kv_dtype)}"
            whole = dtype == torch.bfloat16 or kv_dtype == dtype  # float16 with fp8 keys is one head size
            for head_size, kind in product((64, 128, 256, 512) if whole else (128,), steps):
                if head_size == 512 and kind == "71/1 heads":
                    continue  # refused
                yield f"{name} d{head_size} {kind}", partial(attend, dtype, kv_dtype, head_size, *steps[kind], 64)
                yield f"{name} d{head_size} {kind}, one", partial(attend, dtype, kv_dtype, head_size, *steps[kind], 1)
            for head_size in (64, 80, 96, 128, 256, 512) if whole else (128,):
                yield f"{name} d{head_size} mixed", partial(attend, dtype, kv_dtype, head_size, 32, 8, 2048, 64)
            case = partial(attend, dtype, kv_dtype, 256, 16, 8, 2048, 64, window=4096, softcap=50.0)
            yield f"{name} d256 window softcap", case
            if whole:
                ahead = empty(2048 * 64, dtype=torch.int32)
                yield f"{name} d128 limit", partial(attend, dtype, kv_dtype, 128, 32, 8, 2048, 64, limit=ahead)
            yield f"{name} d128 window", partial(attend, dtype, kv_dtype, 128, 32, 8, 2048, 64, window=4096)
            chunks = {"window": 8192, "chunked": True}
            yield f"{name} d128 chunks", partial(attend, dtype, kv_dtype, 128, 40, 8, 2048, 64, **chunks)
    for head_size in (64, 128):
        case = partial(attend, torch.float32, torch.float32, head_size, 32, 8, 2048, 64)
        yield f"attention f32 d{head_size} mixed", case


def latent_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import AttentionMetadata
    from octavo_kernels import triton as backend

    def attend(dtype, heads, queries, count):
        rows = queries * count
        ints = partial(empty, dtype=torch.int32)
        slots = empty(rows, dtype=torch.int64)
        metadata = AttentionMetadata(ints(count + 1), ints(count), ints(count, 256), slots, queries, 4096, rows)
        cache = empty(1, 1000, 1, 16, 576, dtype=dtype)
        made = backend.latent_queries(
            empty(rows, heads, 192, dtype=dtype),
            empty(rows, 576, dtype=dtype),
            slots,
            empty(4096, 64),
            cache,
            slots,
            empty(heads, 128, 512, dtype=dtype),
            empty(512, dtype=dtype),
            1e-6,
        )
        backend.latent_attention(made, cache, metadata, 192**-0.5, empty(heads, 512, 128, dtype=dtype))

    # Tiles of 16, 32 and 64 rows, two tiles of heads, and prompts.
    steps = {"16 heads": (16, 1), "32 heads": (32, 1), "64 heads": (64, 1), "128 heads": (128, 1), "drafts": (16, 3)}
    for dtype in HALVES:
        for name, (heads, queries) in steps.items():
            for count in (64, 1):
                yield f"attention {short(dtype)} latent {name} x {count}", partial(attend, dtype, heads, queries, count)
        yield f"attention {short(dtype)} latent mixed", partial(attend, dtype, 128, 2048, 4)
        case = partial(
            backend.rope_, empty(64, 3072, dtype=dtype), empty(64, dtype=torch.int64), empty(512, 64), 24, 64
        )
        yield f"rope_ {short(dtype)}", case
    yield "attention f32 latent mixed", partial(attend, torch.float32, 16, 2048, 4)


def layer_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import triton as backend

    def rope(dtype, kv_dtype, heads, kv_heads, head_size, norm):
        weight = empty(head_size, dtype=dtype) if norm else None
        backend.rope_and_cache(
            empty(8, (heads + 2 * kv_heads) * head_size, dtype=dtype),
            empty(8, dtype=torch.int64),
            empty(4096, head_size),
            empty(2, 1000, kv_heads, 16, head_size, dtype=kv_dtype),
            empty(8, dtype=torch.int64),
            heads,
            kv_heads,
            head_size,
            weight,
            weight,
        )

    def copy(dtype):
        backend.copy_blocks(empty(1000, 2, 2, 8, 16, 128, dtype=dtype), empty(4, 2, dtype=torch.int64))

    for dtype in HALVES:
        for width in (1024, 4096, 5120):
            x, weight = empty(8, width, dtype=dtype), empty(width, dtype=dtype)
            yield f"rms_norm {short(dtype)} {width}", partial(backend.rms_norm, x, weight, 1e-6)
            yield f"fused_add_rms_norm {short(dtype)} {width}", partial(backend.fused_add_rms_norm, x, x, weight, 1e-6)
        heads = empty(8, 4 * 256 + 2 * 256, dtype=dtype)[:, 1024:]
        yield f"rms_norm_ of heads {short(dtype)}", partial(backend.rms_norm_, heads, empty(256), 1e-6)
        yield f"layer_norm {short(dtype)}", partial(backend.layer_norm, x, weight, weight, 1e-5, x)
        yield f"scale {short(dtype)}", partial(backend.scale, x, 0.5, 30.0)
        yield f"silu_and_mul {short(dtype)}", partial(backend.silu_and_mul, empty(8, 2 * 14336, dtype=dtype))
        table = empty(151936, 4096, dtype=dtype)
        yield f"embedding {short(dtype)}", partial(backend.embedding, empty(8, dtype=torch.int64), table)
        for head_size, norm in product((64, 80, 96, 128, 256, 512), (False, True)):
            name = f"rope_and_cache {short(dtype)} d{head_size}{' norm' * norm}"
            yield name, partial(rope, dtype, dtype, 32, 8, head_size, norm)
        yield f"copy_blocks {short(dtype)}", partial(copy, dtype)
        for n, k in ((6144, 4096), (4096, 14336), (28672, 4096), (2560, 1728)):
            for rows in (1, 16):
                case = partial(backend.linear, empty(rows, k, dtype=dtype), empty(n, k, dtype=dtype))
                yield f"linear {short(dtype)} {rows} x {n} x {k}", case


def sampling_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import Constraints, SamplingRows, SamplingTable
    from octavo_kernels import triton as backend

    rows, vocab = 8, 151936
    ints, floats, longs = (partial(empty, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.int64))
    table = SamplingTable(
        temperature=floats(64),
        top_k=longs(64),
        top_p=empty(64, dtype=torch.float64),
        min_p=empty(64, dtype=torch.float64),
        streams=longs(64),
    )
    constraints = Constraints(
        bitmask=ints(rows, vocab // 32),
        bitmask_index=ints(rows),
        edit_start=ints(rows + 1),
        edit_ids=ints(64),
        edit_values=floats(64),
        seen=ints(rows, vocab // 32),
        seen_index=ints(rows),
        counts=ints(rows, vocab),
        counts_index=ints(rows),
        repetition=floats(rows),
        frequency=floats(rows),
        presence=floats(rows),
    )
    for dtype in (torch.bfloat16, torch.float32):
        logits = empty(rows, vocab, dtype=dtype)
        for truncated, constrained in product((False, True), repeat=2):
            step = SamplingRows(table, longs(rows), longs(rows), truncated, constraints if constrained else None)
            name = f"sample {short(dtype)}{' cuts' * truncated}{' constraints' * constrained}"
            yield name, partial(backend.sample, logits, step)
        part = partial(backend.sample_part, logits, SamplingRows(table, longs(rows), longs(rows), False), vocab)
        yield f"sample_part {short(dtype)}", part
        yield f"top_logprobs {short(dtype)}", partial(backend.top_logprobs, logits, longs(rows), longs(rows), 5)


def exchange_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels.triton.exchange import Exchange, all_gather, all_reduce_, best_of_ranks

    for ranks in (2, 3, 4, 8):
        group = Exchange(empty(ranks + 1, dtype=torch.int64), ranks - 1, ranks)
        for dtype, rows in product((*HALVES, torch.float32), (1, 256)):
            name = f"{short(dtype)} {rows} x 4096 on {ranks}"
            yield f"all_reduce {name}", partial(all_reduce_, empty(rows, 4096, dtype=dtype), group)
        logits = empty(8, 152064 // ranks, dtype=torch.bfloat16)
        yield f"all_gather on {ranks}", partial(all_gather, logits, 151936, group)
        pairs = empty(8, dtype=torch.int64), empty(8, dtype=torch.float64)
        yield f"best_of_ranks on {ranks}", partial(best_of_ranks, *pairs, group)


def input_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import triton as backend

    longs = partial(empty, dtype=torch.int64)
    for width in (256, 8192, 2501):  # of tables: one chunk, some, and one that moves entry by entry
        state = (longs(65), longs(65), longs(65), empty(1, 65, width, dtype=torch.int32))
        yield f"decode_inputs {width}", partial(backend.decode_inputs, longs(8), *state, 16)


def group_weight(form, n, k, group, zeros, scale_dtype):
    from octavo_kernels import GroupWeight
    from octavo_kernels.group_weight import TILE, WORDS, block_columns

    groups = -(-k // group)
    codes = empty(-(-n // TILE), -(-k // block_columns(form)), TILE, WORDS, dtype=torch.int32)
    scales, points = empty(groups, n, dtype=scale_dtype), empty(groups, n, dtype=torch.uint8)
    return GroupWeight(codes, scales, points if zeros else None, None, form, n, k, group)


def quantized_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import ScaledWeight
    from octavo_kernels import triton as backend
    from octavo_kernels.triton import scaled_weight

    # Form, N, K, group, zeros: AWQ, GPTQ with groups of 64, W4A16 of odd sizes, W8A16, MXFP4, weights alone in FP8.
    kinds = {
        "awq g128": (("int4", 6144, 4096, 128, True, torch.float16), (8, 24, 64, 200, 512)),
        "gptq g32": (("int4", 4096, 14336, 32, False, torch.float16), (8, 200)),
        "w4a16 rows": (("int4", 1000, 1088, 1152, False, torch.bfloat16), (8, 200)),
        "w8a16 g128": (("int8", 6144, 4096, 128, True, torch.float16), (8, 200)),
        "mxfp4": (("e2m1", 5760, 2880, 32, False, torch.uint8), (8, 200)),
        "fp8": (("e4m3", 6144, 4096, 4096, False, torch.float32), (8,)),
    }
    for dtype in HALVES:
        for name, (kind, counts) in kinds.items():
            for rows in counts if dtype == torch.bfloat16 else counts[:1]:
                case = partial(backend.group_linear, empty(rows, kind[2], dtype=dtype), group_weight(*kind))
                yield f"group_linear {short(dtype)} {name} {rows}", case
    # FP8 and int8 with a scale a row, FP8 in blocks of 128, K that ends within a block.
    scaled = {
        "int8": (torch.int8, 6144, 4096, 1),
        "fp8": (FLOAT8, 6144, 4096, 1),
        "fp8 blocks": (FLOAT8, 6144, 4096, 32),
        "fp8 1728": (FLOAT8, 1000, 1728, 1),
    }
    for name, (kept, n, k, blocks) in scaled.items():
        values = ScaledWeight(empty(n, k, dtype=kept), empty(blocks, n))
        for rows in (8, 40, 200):
            x, scales = empty(rows, k, dtype=kept), empty(blocks, rows).t()
            yield f"scaled_linear {name} {rows}", partial(scaled_weight.launch, x, scales, values, None, torch.bfloat16)
        yield f"quantize {name}", partial(backend.quantize_tokens, empty(8, k, dtype=torch.bfloat16), kept, blocks)


def moe_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import Experts, ScaledWeight, StackedWeight
    from octavo_kernels import triton as backend
    from octavo_kernels.triton.activation import activate

    def held(kind, experts, channels, k):
        """``channels`` of each expert of k columns."""
        n = experts * channels
        if isinstance(kind, torch.dtype):
            return empty(experts, channels, k, dtype=kind)
        if kind[0] == "scaled":
            return StackedWeight(
                ScaledWeight(empty(n, k, dtype=kind[1]), empty(k // 128 if kind[2] else 1, n)), experts
            )
        form, group, zeros, scales = kind
        return StackedWeight(group_weight(form, n, k, group or -(-k // 128) * 128, zeros, scales), experts)

    def layer(kind, dtype, rows, experts, k, hidden, inner, shared=False, bias=False, **how):
        biases = (empty(experts, 2 * inner), empty(experts, hidden)) if bias else (None, None)
        weights = (held(kind, experts, 2 * inner, hidden), held(kind, experts, hidden, inner))
        x = empty(rows, hidden, dtype=dtype)
        beside = (x, empty(rows, 1)) if shared else ()
        ids, chosen = empty(rows, k, dtype=torch.int32), empty(rows, k)
        backend.fused_moe(x, ids, chosen, Experts(*weights, *biases, **how), *beside)

    qwen, mixtral, oss = (128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880)  # E, k, H, I
    clamped = {"activation": "clamped_swiglu", "bias": True}
    kinds = {
        "f16 qwen": (torch.float16, torch.float16, qwen, {}),
        "bf16 qwen": (torch.bfloat16, torch.bfloat16, qwen, {"shared": True}),
        "f32 qwen": (torch.float32, torch.float32, qwen, {}),
        "awq mixtral": (("int4", 128, True, torch.float16), torch.bfloat16, mixtral, {}),
        "fp8 mixtral": (("e4m3", 0, False, torch.float32), torch.bfloat16, mixtral, {"weighs_input": True}),
        "mxfp4 gpt-oss": (("e2m1", 32, False, torch.uint8), torch.bfloat16, oss, clamped),
        "w8a8 fp8 blocks qwen": (("scaled", FLOAT8, True), torch.bfloat16, qwen, {}),
        "w8a8 fp8 mixtral": (("scaled", FLOAT8, False), torch.bfloat16, mixtral, {}),
        "w8a8 int8 mixtral": (("scaled", torch.int8, False), torch.bfloat16, mixtral, {}),
    }
    for name, (kind, dtype, sizes, how) in kinds.items():
        for per_expert in (0, 8, 40, 100):  # rows of an expert: one choice a tile, and each kind of tile
            rows = max(2, per_expert * sizes[0] // sizes[1])
            yield f"moe {name} {rows}", partial(layer, kind, dtype, rows, *sizes, **how)
    for name, (count, k, how) in {
        "softmax 128": (128, 8, {"renormalise": True}),
        "groups of 256": (256, 8, {"kind": "sigmoid", "groups": (8, 4), "bias": empty(256), "scale": 2.5}),
        "factors of 128": (128, 8, {"renormalise": True, "expert_scale": empty(128)}),
    }.items():
        yield f"moe route {name}", partial(backend.topk_route, empty(8, count), k, **how)
    for kind in ("relu", "gelu", "gelu_tanh"):
        yield f"activate {kind}", partial(activate, empty(8, 2 * 6912, dtype=torch.bfloat16), kind, True)
    gates, wide = empty(8, 256, dtype=torch.bfloat16), empty(8, 35 * 256, dtype=torch.bfloat16)
    for kind in ("gelu_tanh", "none"):
        yield f"activate {kind} with another's columns", partial(activate, gates, kind, up=wide[:, 256:512])


def adapter_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    from octavo_kernels import SlotMemory
    from octavo_kernels import triton as backend

    def add(dtype, rows, rank, sizes, columns, out):
        memory = SlotMemory(8, rank, dtype)
        table = memory.add(sizes, columns)
        memory.allocate(torch.device("meta"))
        slots = empty(rows, dtype=torch.int32)
        tiles = backend.lora_tiles(slots, 8)
        h = backend.lora_shrink(empty(rows, columns, dtype=dtype), table, slots, tiles)
        backend.lora_expand_(empty(rows, sum(sizes), dtype=out), h, table, slots, tiles)

    def embed(dtype, rows):
        memory = SlotMemory(1, 16, dtype)
        table = memory.add([4096], 128256, is_embedding=True)
        memory.allocate(torch.device("meta"))
        slots = empty(rows, dtype=torch.int32)
        h = backend.lora_gather(empty(rows, dtype=torch.int64), table, slots, 0, 128256)
        backend.lora_expand_(empty(rows, 4096, dtype=dtype), h, table, slots, backend.lora_tiles(slots, 1))

    # Up to 16 rows and more, of one, two and three blocks of numbers of a row, ranks of several blocks.
    qkv, down = ([4096, 1024, 1024], 4096), ([4096], 14336)
    for name, rank, layer in (("r8 down", 8, down), ("r16 qkv", 16, qkv), ("r256 qkv", 256, qkv)):
        for rows in (16, 17):
            yield f"lora bf16 {name} {rows}", partial(add, torch.bfloat16, rows, rank, *layer, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        yield f"lora {short(dtype)} r16 qkv 17", partial(add, dtype, 17, 16, *qkv, dtype)
    yield "lora bf16 embedding", partial(embed, torch.bfloat16, 32)
    yield "lora bf16 part of a sum", partial(add, torch.bfloat16, 17, 16, *down, torch.float32)
    yield "lora bf16 odd sizes", partial(add, torch.bfloat16, 17, 12, [1001, 7], 1728, torch.bfloat16)


CASES = (
    input_cases,
    attention_cases,
    latent_cases,
    layer_cases,
    quantized_cases,
    moe_cases,
    adapter_cases,
    sampling_cases,
    exchange_cases,
)


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", FLOAT8: "fp8"}[dtype]
