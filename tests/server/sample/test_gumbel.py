"""The noise is a pure function of (seed, sample, position, token), uniform, independent; the draw its exact argmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import chi_square_sigma, normal_logits

from octavo.sample.gumbel import GumbelNoise, position_keys, stream_key

CPU = torch.device("cpu")


def bits_of(seed: int, sample_index: int, positions: np.ndarray, vocab: int) -> np.ndarray:
    """The 31 random bits by the definition, in unsigned numpy arithmetic: [positions, vocab]."""
    u32, u64 = np.uint32, np.uint64

    def mix64(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> u64(27))) * u64(0x94D049BB133111EB)
        return x ^ (x >> u64(31))

    def mix32(x: np.ndarray, added: np.ndarray) -> np.ndarray:
        x = x * u32(0x7FEB352D)
        x = (x ^ (x >> u32(15))) + added
        x = x * u32(0x846CA68B)
        return x ^ (x >> u32(16))

    golden = u64(0x9E3779B97F4A7C15)
    seed64 = np.array([seed % 2**64], dtype=u64)
    stream = mix64(mix64(seed64 ^ u64(0x6A09E667F3BCC909)) + np.array([sample_index + 1], u64) * golden)
    key = mix64(stream + (positions.astype(u64) + u64(1)) * golden)
    low, high = (key & u64(0xFFFFFFFF)).astype(u32), (key >> u64(32)).astype(u32)
    ids = np.arange(vocab, dtype=u32)
    salt = mix32(ids ^ (ids >> u32(16)), np.zeros(1, u32))
    return ((mix32(salt ^ low[:, None], high[:, None])) & u32(0x7FFFFFFF)) | u32(1)


def our_bits(seed: int, sample_index: int, positions: np.ndarray, vocab: int) -> np.ndarray:
    streams = np.full(len(positions), stream_key(seed, sample_index), dtype=np.uint64)
    keys = torch.from_numpy(position_keys(streams, positions))
    return GumbelNoise(vocab, CPU).bits(keys).numpy()


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    sample_index=st.integers(0, 2000),
    position=st.integers(0, 2**31),
    vocab=st.integers(1, 300),
)
def test_bits_are_the_documented_hash(seed: int, sample_index: int, position: int, vocab: int) -> None:
    """Wrapping int32 tensor arithmetic equals unsigned arithmetic, in vector lanes and in the elements after them."""
    positions = np.array([position, position + 1, 0])
    np.testing.assert_array_equal(
        our_bits(seed, sample_index, positions, vocab), bits_of(seed, sample_index, positions, vocab)
    )


def test_noise_of_chosen_tokens_is_that_of_the_whole_row() -> None:
    noise = GumbelNoise(1000, CPU)
    keys = torch.randint(-(2**31), 2**31 - 1, (4, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 1000, (4, 57), generator=torch.Generator().manual_seed(1))
    assert torch.equal(noise.noise(keys, ids), noise.noise(keys).gather(1, ids))


@pytest.mark.parametrize("shift", [0, 8, 15, 23])
def test_every_byte_of_the_bits_is_uniform(shift: int) -> None:
    """Over positions and tokens together, and over the positions of a single token."""
    bits = our_bits(7, 0, np.arange(4000), 64)
    for some in (bits, bits[:, :1]):
        cells = np.bincount(((some >> (shift + 1 if shift == 0 else shift)) & 0xFF).ravel(), minlength=256)
        assert chi_square_sigma(cells, np.full(256, 1 / 256)) < 4


@pytest.mark.parametrize(
    "pair",
    ["next position", "next seed", "next sample", "next token", "token and position swapped"],
)
def test_related_draws_are_independent(pair: str) -> None:
    """The joint distribution of two draws that differ in one counter is the product of uniforms."""
    positions = np.arange(2000)
    a = our_bits(5, 0, positions, 100)
    b = {
        "next position": lambda: our_bits(5, 0, positions + 1, 100),
        "next seed": lambda: our_bits(6, 0, positions, 100),
        "next sample": lambda: our_bits(5, 1, positions, 100),
        "next token": lambda: np.roll(a, 1, axis=1),
        "token and position swapped": lambda: our_bits(5, 0, np.arange(100), 2000).T,
    }[pair]()
    if pair == "token and position swapped":  # the diagonal is compared with itself
        a, b = a[100:], b[100:]
    for shift in (26, 10):  # the most significant five bits, and five in the middle
        cells = np.bincount((((a >> shift) & 31) * 32 + ((b >> shift) & 31)).ravel(), minlength=1024)
        assert chi_square_sigma(cells, np.full(1024, 1 / 1024)) < 4


def test_noise_is_standard_gumbel() -> None:
    """Equally likely cells of the distribution function exp(-exp(-x)) hold equally many draws."""
    keys = torch.from_numpy(position_keys(np.full(2000, stream_key(1, 0), np.uint64), np.arange(2000)))
    x = GumbelNoise(200, CPU).noise(keys).numpy()
    cells = np.bincount((np.exp(-np.exp(-x)) * 500).astype(int).clip(0, 499).ravel(), minlength=500)
    assert chi_square_sigma(cells, np.full(500, 1 / 500)) < 4
    assert np.isfinite(x).all()


@settings(max_examples=60)
@given(
    rows=st.integers(1, 30),
    vocab=st.sampled_from([1, 2, 31, 1000, 49152]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 5.0, 1e5]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 2**31),
)
def test_the_pruned_argmax_is_the_true_one(rows: int, vocab: int, scale: float, masked: float, seed: int) -> None:
    """The shortlist by a bound on the noise never loses the winner, whatever the scores."""
    if rows * vocab > 300_000:
        rows = 3
    scores = normal_logits(rows, vocab, seed, scale)
    mask = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) < masked
    mask[:, seed % vocab] = False
    scores.masked_fill_(mask, -torch.inf)
    noise = GumbelNoise(vocab, CPU)
    keys = torch.from_numpy(position_keys(np.full(rows, stream_key(seed, 0), np.uint64), np.arange(rows)))
    assert torch.equal(noise.argmax(scores, keys), (scores.double() + noise.noise(keys)).argmax(-1))


def test_close_races_are_decided_by_the_true_noise() -> None:
    """Many draws among few tokens, where the bound's order and the truth's differ often."""
    noise, n = GumbelNoise(64, CPU), 50_000
    keys = torch.from_numpy(position_keys(np.full(n, stream_key(3, 0), np.uint64), np.arange(n)))
    scores = normal_logits(1, 64, seed=1, scale=1.0).repeat(n, 1)
    assert torch.equal(noise.argmax(scores, keys), (scores.double() + noise.noise(keys)).argmax(-1))
