"""Sampling in Triton gives the tokens of plain torch, bit for bit: cuts by sorting, noise in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.layers.parallel import best_in_order
from octavo.sample.gumbel import GumbelNoise, position_keys, stream_key
from octavo_kernels import Constraints, SamplingRows, SamplingTable, reference
from octavo_kernels import triton as backend
from octavo_kernels.reference.sampling import stream_keys as plain_stream_keys
from octavo_kernels.triton import sampling
from octavo_kernels.triton.sampling_math import gumbel, gumbel_bound, random_bits, stream_keys

FIXTURES = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
VOCAB = 301  # not a multiple of anything


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Three chunks, 96 blocks of 4 tokens, 16 looked into: cuts fall inside and outside of what is looked into."""
    monkeypatch.setattr(sampling, "CONFIG", sampling.SamplingConfig(tile=32, steps=4, keep=16))


def table(n: int, device: str, vocab: int = VOCAB, **given: object) -> SamplingTable:
    usual = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0, "streams": 0} | given
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
    columns = {
        name: torch.as_tensor(value, device=device).to(dtypes.get(name, torch.int64)).expand(n).contiguous()
        for name, value in usual.items()
    }
    columns["streams"] = torch.arange(n, device=device) * 0x1234567890ABCDE + columns["streams"]
    return SamplingTable(**columns)


def rows_of(table: SamplingTable, constraints: Constraints | None = None, truncated: bool = True, seed: int = 0):
    n = len(table.top_k)
    positions = torch.arange(seed, seed + n, device=table.top_k.device)
    return SamplingRows(table, torch.arange(n, device=positions.device), positions, truncated, constraints)


def random_logits(n: int, device: str, scale: float = 2.0, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


def assert_same(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The tokens, which are those of plain torch, as is what of the rows is invalid."""
    before = logits.clone()
    ours, plain = backend.sample(logits, rows), reference.sample(logits, rows)
    assert torch.equal(ours.invalid, plain.invalid)
    assert ours.token_ids.tolist() == plain.token_ids.tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits were changed"
    return ours.token_ids


CUTS = [
    {"temperature": 0.0},
    {"temperature": [0.3, 2.5, 1e-5, 1e30]},
    {"top_k": [1, 7, 20, 200]},
    {"top_p": [1e-6, 0.3, 0.9, 0.999]},
    {"min_p": [1e-6, 0.001, 0.1, 1]},
    {"top_k": [3, 20, 50, 300], "top_p": [0.9, 0.5, 0.95, 0.2], "min_p": [0, 0.1, 0.01, 0]},
]
KINDS = {
    "normal": lambda logits: logits,
    "full of ties": lambda logits: logits.round(),  # the k-th token and the boundary of top-p among equals
    "all equal": lambda logits: logits * 0,
    "peaked": lambda logits: logits * 20,
}


@pytest.mark.sampled(share=3)
@pytest.mark.parametrize(
    "kind, cuts",
    [(kind, cuts) for kind in KINDS for cuts in (CUTS if kind in ("normal", "full of ties") else (CUTS[0], CUTS[-1]))],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_tokens_are_those_of_plain_torch(device, kind, cuts):
    assert_same(
        KINDS[kind](random_logits(4, device)), rows_of(table(4, device, **cuts), truncated=cuts not in CUTS[:2])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_parts_is_the_token_of_the_whole(device, kind):
    """Greedy and drawn, of parts of a vocabulary; a NaN, infinity or nothing allowed in a part; padding."""
    logits = KINDS[kind](random_logits(8, device))
    logits[3, 200], logits[4, 5], logits[5], logits[6, :120] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rows = rows_of(table(8, device, temperature=[0.0, 1.0, 0.7, 1.0, 0.0, 1.0, 1.3, 1.0]), truncated=False)
    rows.index[7] = -1
    whole = reference.sample(logits, rows)
    for module in (backend, reference):
        parts = [module.sample_part(logits[:, start : start + 101], rows, start) for start in range(0, VOCAB, 101)]
        pairs = torch.stack([torch.stack([ids.double(), values], dim=-1) for ids, values in parts])
        ids, values = best_in_order(pairs)
        assert torch.equal(~values.isfinite(), whole.invalid)
        assert torch.equal(ids.masked_fill(whole.invalid, 0), whole.token_ids)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=2, **FIXTURES)
def test_any_mixture_of_rows(device, seed):
    """Greedy rows, rows without cuts and rows of all cuts side by side, under constraints, in any dtype of logits."""
    rng = np.random.default_rng(seed)
    n, words = 5, -(-VOCAB // 32)

    def bits(count):
        return torch.from_numpy(rng.integers(-(2**31), 2**31, (count, words)).astype(np.int32)).to(device)

    def index(count):
        return torch.from_numpy(rng.integers(-1, count, n).astype(np.int32)).to(device)

    def numbers(size, low, high):
        return torch.from_numpy(rng.uniform(low, high, size).astype(np.float32)).to(device)

    ends = np.concatenate([[0], rng.integers(0, 4, n).cumsum()]).astype(np.int32)
    values = numbers(ends[-1], -3, 3).masked_fill_(numbers(ends[-1], 0, 1) < 0.3, -torch.inf)
    constraints = Constraints(
        bitmask=bits(2),
        bitmask_index=index(2),
        edit_start=torch.from_numpy(ends).to(device),
        edit_ids=torch.from_numpy(rng.integers(0, VOCAB, ends[-1]).astype(np.int32)).to(device),
        edit_values=values,
        seen=bits(3),
        seen_index=index(3),
        counts=torch.from_numpy(rng.integers(0, 3, (2, VOCAB)).astype(np.int32)).to(device),
        counts_index=index(2),
        repetition=numbers(n, 0.7, 1.7),
        frequency=numbers(n, -1, 1),
        presence=numbers(n, -1, 1),
    )
    choices = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.9], n),
        "top_k": np.where(rng.random(n) < 0.5, VOCAB, rng.integers(1, VOCAB + 1, n)),
        "top_p": np.where(rng.random(n) < 0.5, 1, rng.uniform(0.01, 1, n)),
        "min_p": np.where(rng.random(n) < 0.7, 0, rng.uniform(0, 0.2, n)),
        "streams": int(rng.integers(-(2**62), 2**62)),
    }
    dtype = [torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]
    logits = random_logits(n, device, rng.choice([0.3, 2.0, 8.0]), seed).to(dtype)
    if backend.INTERPRETED and dtype == torch.bfloat16:
        logits = logits.float()  # as a bfloat16 model gives them: full of ties
    assert_same(logits, rows_of(table(n, device, **choices), constraints, seed=seed))


@pytest.mark.skipif(backend.INTERPRETED, reason="needs a GPU: TRITON_INTERPRET=0")
@pytest.mark.parametrize("sigma", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("cuts", CUTS, ids="+".join)
def test_a_real_vocabulary(device, monkeypatch, cuts, sigma):
    monkeypatch.setattr(sampling, "CONFIG", sampling.SamplingConfig())
    vocab = 151_936
    some = {name: torch.as_tensor(value).clamp(max=vocab).expand(4).repeat(4) for name, value in cuts.items()}
    logits = random_logits(16, device, sigma, vocab=vocab).bfloat16()
    assert_same(logits, rows_of(table(16, device, vocab, **some), truncated=cuts not in CUTS[:2]))


def test_rows_that_cannot_be_sampled(device):
    """They are reported, whatever they ask for, and hurt nobody; rows of padding get token 0 and are not invalid."""
    nan, inf = float("nan"), float("inf")
    logits = random_logits(7, device)
    logits[1, 300] = nan
    logits[2] = nan
    logits[3] = -inf
    logits[4, 17] = inf
    logits[6, :300] = -inf
    for cuts in ({"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9}):
        rows = rows_of(table(7, device, **cuts), truncated="top_k" in cuts)
        rows.index[5] = -1
        tokens = assert_same(logits, rows)
        assert reference.sample(logits, rows).invalid.tolist() == [False, True, True, True, True, False, False]
        assert tokens[5] == 0
        assert tokens[6] == 300, "the only token that is left"


@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_no_mass_asked_for_is_the_best_token(device, scale):
    """top_p = 0 is no value that a request may have, but a kernel must not hang on what a table holds."""
    logits = random_logits(3, device, scale)
    rows = rows_of(table(3, device, top_p=0.0, top_k=[VOCAB, 5, 100]))
    assert torch.equal(assert_same(logits, rows), logits.argmax(-1))


@pytest.mark.sampled(share=2)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_the_lowest_logit_that_there_is_counts(device, cuts):
    """A masked token is -inf; float32's lowest finite number is a token like any other."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((3, VOCAB), -torch.inf, device=device)
    logits[0, [5, 9]] = lowest
    logits[1] = lowest
    logits[2] = lowest
    logits[2, 7] = 1.0
    assert_same(logits, rows_of(table(3, device, **cuts)))
    ids = backend.top_logprobs(logits, torch.tensor([0, 2], device=device), torch.tensor([5, 7], device=device), 2)[0]
    assert ids.tolist() == [[5, 5, 9], [7, 7, 0]]


def test_addresses_do_not_ask_for_other_kernels(device, monkeypatch):
    """What is written between the passes is aligned to 16 bytes for any count of rows: one compilation serves all."""
    seen = []

    class Watched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                seen.extend(args[9:13])  # bound, best, peak, mass
                self.kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(sampling, "scan_kernel", Watched(sampling.scan_kernel))
    for count in (1, 2, 3):
        logits, rows = random_logits(count, device), rows_of(table(count, device, top_k=3))
        backend.sample(logits, rows)
        backend.top_logprobs(logits, rows.index, rows.index, 2)
    assert len(seen) == 24
    assert {tensor.data_ptr() % 16 for tensor in seen} == {0}


def test_a_row_is_its_own(device):
    """In another place of another batch, with other company and another entry of the table: the same token."""
    cuts = {"top_k": [301, 9, 301, 60], "top_p": [1, 1, 0.9, 0.8], "temperature": [1, 2, 0.8, 1.5]}
    logits, rows = random_logits(4, device), rows_of(table(4, device, **cuts))
    together = backend.sample(logits, rows).token_ids
    for i in range(4):
        order = torch.tensor([3, i], device=device)
        rest = SamplingRows(rows.table, order, rows.positions[order], True)
        assert backend.sample(logits[order], rest).token_ids[1] == together[i]


def test_offsets_beyond_32_bits(device):
    """Rows far apart: the second begins more than 2**31 elements into the storage."""
    far = 2**31 + 64
    storage = torch.empty(far + VOCAB, dtype=torch.float16, device=device)  # pages that nobody touches cost nothing
    logits = storage.as_strided((2, VOCAB), (far, 1))
    logits.copy_(random_logits(2, device))
    rows = rows_of(table(2, device, top_k=[20, VOCAB], top_p=0.9))
    dense = logits.clone(memory_format=torch.contiguous_format)
    assert torch.equal(backend.sample(logits, rows).token_ids, reference.sample(dense, rows).token_ids)
    chosen = torch.tensor([3, 5], device=device)
    ours = backend.top_logprobs(logits, torch.arange(2, device=device), chosen, 4)
    assert torch.equal(ours[0], reference.top_logprobs(dense, torch.arange(2, device=device), chosen, 4)[0])


@pytest.mark.parametrize("kind", ["normal", "full of ties", "all equal", "few allowed"])
@pytest.mark.parametrize("k", [0, 16, 40])
def test_top_logprobs(device, kind, k):
    """Ids and ranks exactly, values to float32's rounding; the lower id first among equals."""
    logits = random_logits(4, device)
    if kind == "full of ties":
        logits = logits.round()
    elif kind == "all equal":
        logits = torch.zeros_like(logits)
    elif kind == "few allowed":
        logits[:, 3:] = -torch.inf
    rows, chosen = torch.tensor([3, 0], device=device), torch.tensor([2, 0], device=device)
    ids, values, ranks = backend.top_logprobs(logits, rows, chosen, k)
    plain_ids, plain_values, plain_ranks = reference.top_logprobs(logits, rows, chosen, k)
    assert torch.equal(ids, plain_ids)
    assert torch.equal(ranks, plain_ranks)
    torch.testing.assert_close(values, plain_values, atol=2e-6, rtol=1e-6)


# ---- the noise


@triton.jit
def noise_kernel(streams_ptr, positions_ptr, bits_ptr, noise_ptr, bound_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    key0, key1 = stream_keys(tl.load(streams_ptr + row), tl.load(positions_ptr + row))
    tl.store(bits_ptr + row * BLOCK + ids, random_bits(ids, key0, key1).to(tl.int32))
    tl.store(noise_ptr + row * BLOCK + ids, gumbel(ids, key0, key1))
    tl.store(bound_ptr + row * BLOCK + ids, gumbel_bound(ids, key0, key1))


def draw_noise(streams, positions, size: int, device: str):
    shape = (len(streams), size)
    bits = torch.empty(shape, dtype=torch.int32, device=device)
    noise, bound = torch.empty(shape, dtype=torch.float64, device=device), torch.empty(shape, device=device)
    noise_kernel[(len(streams),)](streams.to(device), positions.to(device), bits, noise, bound, BLOCK=size)
    return bits.cpu(), noise.cpu(), bound.cpu()


def test_the_noise_is_that_of_the_torch_sampler(device):
    """Bit for bit the random bits, in one unit of float64's last place the noise; and the cheap bound holds."""
    keys = [stream_key(seed, i) for seed, i in [(0, 0), (1, 0), (-5, 3), (2**64 - 1, 7)]]
    streams, positions = np.array(keys, np.uint64), np.array([0, 1, 10**6, 2**40])
    bits, noise, bound = draw_noise(torch.from_numpy(streams.view(np.int64)), torch.from_numpy(positions), 4096, device)
    theirs = GumbelNoise(4096, torch.device("cpu"))
    their_keys = torch.from_numpy(position_keys(streams, positions))
    assert torch.equal(bits, theirs.bits(their_keys))
    torch.testing.assert_close(noise, theirs.noise(their_keys), rtol=1e-14, atol=1e-15)
    assert (bound.double() >= noise - 1e-5).all()
    plain = plain_stream_keys(torch.from_numpy(streams.view(np.int64)), torch.from_numpy(positions))
    assert torch.equal(plain.to(torch.int32), their_keys)


def test_the_noise_is_standard_gumbel(device):
    """Equally likely cells of the distribution function exp(-exp(-x)) hold equally many draws (chi-square)."""
    _, noise, _ = draw_noise(torch.arange(64) * 7919, torch.arange(64), 4096, device)
    cells = np.bincount((torch.exp(-torch.exp(-noise)) * 256).long().flatten().numpy(), minlength=256)
    assert chi_square_sigma(cells, np.full(256, 1 / 256)) < 4


def chi_square_sigma(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations the statistic is above its mean (for many cells, nearly normal)."""
    expected = probs * counts.sum()
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("cuts", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_draws_follow_the_distribution(device, cuts):
    """Over many seeds, tokens come as often as the softmax of what the cuts leave says (chi-square).

    In the interpreter these are the draws of plain torch, which are the kernels' to the bit (see above).
    """
    draw = reference.sample if backend.INTERPRETED else backend.sample
    n = 50_000
    vocab = 12
    logits = random_logits(1, device, 1.0, vocab=vocab)
    one = table(1, device, vocab, **cuts)
    kept = reference.sampling.kept_tokens(logits, one.top_k, one.top_p, one.min_p)
    probs = logits.double().masked_fill(~kept, -torch.inf).softmax(-1)[0].cpu().numpy()
    rows = rows_of(table(n, device, vocab, **cuts), truncated=bool(cuts))
    tokens = draw(logits.expand(n, vocab), rows).token_ids.cpu().numpy()
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[probs == 0].sum() == 0
    assert chi_square_sigma(counts[probs > 0], probs[probs > 0]) < 4
