"""Random numbers are a function of their name, and nothing else."""

import math
from hashlib import blake2b

import numpy as np
import pytest
import torch
from cases import every
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from torch import Tensor

from draftwire.method import randomness
from draftwire.method.keys import KEY_BYTES, MAX_SEED, DrawKey, Role, derive_key, new_seed
from draftwire.method.randomness import exponentials, philox, uniforms

torch.set_num_threads(1)

KEY = bytes(range(16))
MAX_NUMBER = 2**32 - 1
ALPHA = 1e-6

GOLDEN_NUMBERS = ["0x1.81624d6ebacd8p-3", "0x1.187f7b13a92b4p-3", "0x1.c448839334117p-1"]
GOLDEN_EXPONENTIALS = [
    "0x1.458fecca7c09bp-2",
    "0x1.bc7586044fa15p-3",
    "0x1.272bd544816aep-1",
    "0x1.4a03bc87e1f99p-1",
    "0x1.3ce054bb2ae92p+2",
]
GOLDEN_KEYS = {
    Role.DRAFTING: "e12020687794433a5a05317264f0fba9",
    Role.VERIFYING: "81f093b8b983275483fa424dd8f1267c",
    Role.COUPLING: "14081a7326c768a28fd95c1c9416a37a",
}

# Counter, key and words as the authors of Philox publish them (Random123, kat_vectors).
PHILOX_ANSWERS = {
    "zeros": ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    "ones": ([MAX_NUMBER] * 4, [MAX_NUMBER] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    "digits of pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
}


def numbers(count: int, key: bytes = KEY, choice: int = 0, round: int = 0) -> list[float]:
    return uniforms([DrawKey(key, choice, round)], count)[0].tolist()


def times(positions: list[int], vocab_size: int, key: bytes = KEY, choice: int = 0) -> Tensor:
    """Exponentials at some places of one text."""
    words = torch.tensor([DrawKey(key, choice, 0).text_words] * len(positions))
    return exponentials(words, torch.tensor(positions), vocab_size)


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper states it, with integers of any size."""
    words, keys = list(counter), list(key)
    for _ in range(10):
        high, low = divmod(words[0] * 0xD2511F53, 2**32)
        other_high, other_low = divmod(words[2] * 0xCD9E8D57, 2**32)
        words = [other_high ^ words[1] ^ keys[0], other_low, high ^ words[3] ^ keys[1], low]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return words


def slow_words(key: bytes, purpose: bytes, *named: int) -> list[int]:
    """The key of Philox: two words of the keyed hash of what names the numbers."""
    message = b"".join(number.to_bytes(8, "little") for number in named)
    digest = blake2b(message, key=key, digest_size=8, person=purpose).digest()
    return [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]


def slow_bits(words: list[int]) -> list[int]:
    """Two numbers of 53 bits from four words."""
    return [(high * 2**32 + low) >> 11 for high, low in (words[:2], words[2:])]


NUMBERS = st.integers(0, MAX_NUMBER) | st.sampled_from([0, 1, MAX_NUMBER])
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
NAMES = st.tuples(KEYS, NUMBERS, NUMBERS)
"""Key, choice and round."""


# Philox


def in_both(counter: list[int], key: list[int]) -> list[list[int]]:
    """Words of numpy and of torch, of arrays that broadcast."""
    arrays = [np.array([[word]]) for word in counter], [np.array([word, word]) for word in key]
    words = [
        philox(tuple(map(make, arrays[0])), tuple(map(make, arrays[1]))) for make in (np.asarray, torch.from_numpy)
    ]
    assert {tuple(one.shape) for each in words for one in each} == {(1, 2)}
    return [[int(word[0, 1]) for word in each] for each in words]


def test_philox_gives_the_published_answers_in_numpy_and_torch() -> None:
    for counter, key, expected in PHILOX_ANSWERS.values():
        assert [slow_philox(counter, key), *in_both(counter, key)] == [expected] * 3


@given(st.lists(NUMBERS, min_size=4, max_size=4), st.lists(NUMBERS, min_size=2, max_size=2))
def test_philox_is_that_of_integers_of_any_size(counter: list[int], key: list[int]) -> None:
    assert in_both(counter, key) == [slow_philox(counter, key)] * 2


# Uniforms


@given(st.lists(NAMES, max_size=6), st.integers(0, 40))
def test_numbers_are_philox_of_their_index_under_a_hash_of_the_key(
    names: list[tuple[bytes, int, int]], count: int
) -> None:
    """Whatever else is in the batch, was drawn before, or is drawn by other generators."""
    drawn = uniforms([DrawKey(*name) for name in names], count)
    assert (drawn.dtype, drawn.shape) == (torch.float64, (len(names), count))
    for row, (key, *named) in zip(drawn.tolist(), names, strict=True):
        words = slow_words(key, b"round", *named, 0)
        expected = [bits * 2.0**-53 for pair in range(20) for bits in slow_bits(slow_philox([pair, 0, 0, 0], words))]
        assert row == expected[:count]


@every(("word", "expected"), [(0, 0.0), (MAX_NUMBER, math.nextafter(1.0, 0.0))])
def test_extreme_words_give_the_smallest_and_largest_number_below_1(
    monkeypatch: pytest.MonkeyPatch, word: int, expected: float
) -> None:
    monkeypatch.setattr(randomness, "philox", lambda counter, key: [np.full_like(one, word) for one in counter])
    assert numbers(3) == [expected] * 3


def test_numbers_and_keys_have_their_golden_values() -> None:
    assert [number.hex() for number in numbers(3, choice=1, round=2)] == GOLDEN_NUMBERS
    assert {role: derive_key(12345, role).hex() for role in Role} == GOLDEN_KEYS


def test_keys_of_different_roles_and_seeds_differ() -> None:
    keys = [derive_key(seed, role) for seed in (0, 1, 2**32, 2**63, MAX_SEED) for role in Role]
    assert len(set(keys)) == 5 * len(Role)
    assert {len(key) for key in keys} == {KEY_BYTES}


def test_numbers_of_different_roles_are_uncorrelated() -> None:
    """Odds of a false alarm: three normal variables beyond 5.5 standard deviations, about 1e-7."""
    count = 10_000
    draws = [np.array(numbers(count, derive_key(1, role))) for role in Role]
    correlations = np.corrcoef(draws)[np.triu_indices(len(draws), k=1)]
    assert np.abs(correlations).max() < 5.5 / count**0.5


def test_first_numbers_of_rounds_are_uniform() -> None:
    """Odds of a false alarm: 1e-6 for each of the two numbers that a round uses, and 1e-6 for both together."""
    key = derive_key(7, Role.DRAFTING)
    drawn = uniforms([DrawKey(key, 0, index) for index in range(20_000)], 2).numpy()
    assert kstest(drawn[:, 0], "uniform").pvalue > ALPHA
    assert kstest(drawn[:, 1], "uniform").pvalue > ALPHA
    cells = (drawn * 10).astype(int)
    assert chisquare(np.bincount(10 * cells[:, 0] + cells[:, 1], minlength=100)).pvalue > ALPHA


def test_numbers_are_uniform_within_and_uncorrelated_between_rounds() -> None:
    """Odds of a false alarm: 1e-6 for the first claim, 4e-8 for the second (5.5 standard deviations)."""
    key = derive_key(8, Role.VERIFYING)
    drawn = uniforms([DrawKey(key, 0, index) for index in range(5_000)], 4).numpy()
    assert kstest(drawn.ravel(), "uniform").pvalue > ALPHA
    correlation = np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]
    assert abs(correlation) < 5.5 / len(drawn) ** 0.5


@every("round_number", [0, 1])
def test_numbers_are_float64_in_the_unit_interval_to_the_last_bits(round_number: int) -> None:
    """Odds of a false alarm: 1e-6 for each round."""
    drawn = uniforms([DrawKey(KEY, 0, round_number)], 50_000)[0]
    assert (drawn.dtype, drawn.shape) == (torch.float64, (50_000,))
    assert bool(((drawn >= 0.0) & (drawn < 1.0)).all())
    bits = (drawn.numpy() * 2.0**53).astype(np.int64)
    assert chisquare(np.bincount(bits & 0xFF, minlength=256)).pvalue > ALPHA


def test_seeds_of_requests_without_one_are_64_bit_and_not_repeated() -> None:
    """Odds of a false alarm: 1e-14."""
    seeds = {new_seed() for _ in range(500)}
    assert len(seeds) == 500
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert max(seeds) >= 2**56  # odds of a false alarm: 2**-4000


# Exponentials


def test_exponentials_have_their_golden_values() -> None:
    # Logarithms may differ in the last bit from one machine to another.
    drawn = times([1234], 5, choice=1)[0].tolist()
    assert drawn == pytest.approx([float.fromhex(number) for number in GOLDEN_EXPONENTIALS], rel=1e-15)


@given(st.lists(st.tuples(KEYS, NUMBERS, NUMBERS), max_size=4), st.integers(1, 51))
def test_exponentials_are_philox_of_token_and_position_in_every_round(
    places: list[tuple[bytes, int, int]], vocab_size: int
) -> None:
    """In every round, and whatever else is in the batch."""
    words = [DrawKey(key, choice, position % 7).text_words for key, choice, position in places]
    positions = torch.tensor([position for _, _, position in places], dtype=torch.int64)
    drawn = exponentials(torch.tensor(words, dtype=torch.int64).reshape(-1, 2), positions, vocab_size)
    assert drawn.shape == (len(places), vocab_size)
    for row, (key, choice, position) in zip(drawn.tolist(), places, strict=True):
        hashed = slow_words(key, b"text", choice)
        bits = [bits for pair in range(26) for bits in slow_bits(slow_philox([pair, position, 0, 0], hashed))]
        expected = [-math.log1p(-((number // 2 + 0.5) * 2.0**-52)) for number in bits[:vocab_size]]
        assert row == pytest.approx(expected, rel=1e-14)


def with_words(monkeypatch: pytest.MonkeyPatch, high: int, low: int) -> float:
    """The exponential of two words."""
    monkeypatch.setattr(
        randomness, "philox", lambda counter, key: [torch.full_like(counter[0], word) for word in (high, low, 0, 0)]
    )
    return times([0], 1)[0, 0].item()


def test_largest_exponential_is_finite_and_smallest_is_above_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_words(monkeypatch, MAX_NUMBER, MAX_NUMBER) == pytest.approx(53 * math.log(2.0), rel=1e-12)
    assert with_words(monkeypatch, 0, 0) == pytest.approx(2.0**-53, rel=1e-12)


def test_small_exponentials_differ_far_below_the_resolution_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [with_words(monkeypatch, 0, index << 12) for index in range(100)]
    assert small == pytest.approx([(index + 0.5) * 2.0**-52 for index in range(100)], rel=1e-12)
    # So are large ones, as far as float64 tells 1 - u from 1.
    large = [with_words(monkeypatch, MAX_NUMBER, MAX_NUMBER - (index << 12)) for index in range(100)]
    assert large == pytest.approx([-math.log((index + 0.5) * 2.0**-52) for index in range(100)], rel=1e-12)


def test_exponentials_are_positive_float64_and_follow_the_exponential_law() -> None:
    """Odds of a false alarm: 1e-6 over tokens, 1e-6 over positions."""
    drawn = times([3], 200_001)
    assert (drawn.dtype, drawn.shape) == (torch.float64, (1, 200_001))
    assert bool(((drawn > 0.0) & drawn.isfinite()).all())
    assert kstest(drawn[0].numpy(), "expon").pvalue > ALPHA
    assert kstest(times(list(range(50_000)), 1)[:, 0].numpy(), "expon").pvalue > ALPHA


def test_small_exponentials_are_as_frequent_as_they_should_be() -> None:
    """Odds of a false alarm: 1e-6. Only what is small can let an unlikely token win."""
    drawn = times(list(range(20)), 200_000).flatten().numpy()
    small = drawn[drawn < 1e-3]
    assert kstest(-np.expm1(-small) / -np.expm1(-1e-3), "uniform").pvalue > ALPHA


def test_exponentials_of_neighbours_are_uncorrelated() -> None:
    """Odds of a false alarm: four normal variables beyond 5.5 standard deviations, about 2e-7."""
    drawn = torch.exp(-times(list(range(300)), 300)).numpy()
    other = torch.exp(-times(list(range(300)), 300, choice=1)).numpy()
    pairs = [(drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:]), (drawn[:-1, :-1], drawn[1:, 1:]), (drawn, other)]
    for left, right in pairs:
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5.5 / left.size**0.5


def test_winners_of_races_follow_the_weights() -> None:
    """Odds of a false alarm: 1e-6 for each of three sets of weights."""
    count = 40_000
    drawn = times(list(range(count)), 6, derive_key(3, Role.COUPLING))
    for weights in ([1, 1, 1, 1, 1, 1], [10, 5, 1, 0.5, 3, 20], [0.002, 0.9, 0.01, 0.003, 0.08, 0.005]):
        shares = torch.tensor(weights, dtype=torch.float64)
        winners = (shares / drawn).argmax(dim=1)
        observed = torch.bincount(winners, minlength=6)
        assert chisquare(observed.numpy(), (shares / shares.sum() * count).numpy()).pvalue > ALPHA


@every(("beside", "choice"), [(1, 0), (0, 1)])
def test_winners_of_neighbouring_places_and_choices_are_independent(beside: int, choice: int) -> None:
    """Odds of a false alarm: 1e-6 for each."""
    count = 100_000
    shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    first, second = (
        (shares / times(list(range(start, 2 * count, 2)), 3, choice=number)).argmax(dim=1)
        for start, number in ((0, 0), (beside, choice))
    )
    observed = torch.bincount(3 * first + second, minlength=9)
    expected = torch.outer(shares, shares).flatten() * count
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > ALPHA
