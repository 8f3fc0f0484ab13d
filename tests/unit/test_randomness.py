"""Random numbers are a function of their name, and nothing else."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from draftwire.randomness import KEY_BYTES, MAX_SEED, DrawKey, Role, derive_key, new_seed

KEY = bytes(range(16))
OTHER_KEY = bytes(reversed(range(16)))
MAX_NUMBER = 2**32 - 1
ALPHA = 1e-6

GOLDEN_NUMBERS = ["0x1.e85cdf2c11c68p-1", "0x1.a96cd049000d0p-1", "0x1.ef51c9d41250ap-2"]
GOLDEN_KEYS = {
    Role.DRAFTING: "e12020687794433a5a05317264f0fba9",
    Role.VERIFYING: "81f093b8b983275483fa424dd8f1267c",
    Role.COUPLING: "14081a7326c768a28fd95c1c9416a37a",
}


def numbers(count: int, key: bytes = KEY, choice: int = 0, round: int = 0, attempt: int = 0) -> list[float]:
    return DrawKey(key, choice, round, attempt).uniforms(count).tolist()


def philox4x64(counter: int, key: bytes) -> list[int]:
    """Philox4x64-10 as the paper states it: four 64-bit words for one 256-bit counter and one 128-bit key."""
    mask = 2**64 - 1
    words = [(counter >> shift) & mask for shift in (0, 64, 128, 192)]
    keys = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")]
    for _ in range(10):
        high, low = divmod(words[0] * 0xD2E7470EE14C6C93, 2**64)
        other_high, other_low = divmod(words[2] * 0xCA5A826395121157, 2**64)
        words = [other_high ^ words[1] ^ keys[0], other_low, high ^ words[3] ^ keys[1], low]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words


def test_same_name_gives_the_same_numbers() -> None:
    assert numbers(10, choice=1, round=2, attempt=3) == numbers(10, choice=1, round=2, attempt=3)


def test_drawing_does_not_depend_on_what_was_drawn_before_or_on_global_generators() -> None:
    expected = numbers(5, round=7)
    torch.manual_seed(0)
    np.random.seed(0)
    numbers(1000)
    assert numbers(5, round=7) == expected


def test_key_choice_round_and_attempt_each_change_all_numbers() -> None:
    names = product((KEY, OTHER_KEY), (0, 1, MAX_NUMBER), (0, 1, MAX_NUMBER), (0, 1, MAX_NUMBER))
    drawn = [number for name in names for number in numbers(4, *name)]
    assert len(set(drawn)) == 2 * 3 * 3 * 3 * 4


@pytest.mark.parametrize("bit", range(8 * KEY_BYTES))
def test_every_bit_of_the_key_matters(bit: int) -> None:
    flipped = (int.from_bytes(KEY, "little") ^ (1 << bit)).to_bytes(KEY_BYTES, "little")
    assert set(numbers(4, flipped)).isdisjoint(numbers(4))


def test_rounds_do_not_overlap_however_many_numbers_are_drawn() -> None:
    streams = [set(numbers(2000, round=index)) for index in range(4)]
    streams += [set(numbers(2000, choice=1)), set(numbers(2000, attempt=1))]
    assert len(set.union(*streams)) == 2000 * len(streams)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 17])
def test_first_numbers_do_not_depend_on_how_many_are_drawn(count: int) -> None:
    assert numbers(count, round=3) == numbers(50, round=3)[:count]


def test_numbers_are_float64_in_the_unit_interval() -> None:
    uniforms = DrawKey(KEY, 0, 0).uniforms(10_000)
    assert uniforms.dtype == torch.float64
    assert uniforms.shape == (10_000,)
    assert bool(((uniforms >= 0.0) & (uniforms < 1.0)).all())


def test_numbers_have_their_golden_values() -> None:
    assert [number.hex() for number in numbers(3, choice=1, round=2, attempt=3)] == GOLDEN_NUMBERS


def test_numbers_are_philox4x64_of_key_and_counter() -> None:
    # The low word counts blocks of four numbers from 1 on; then come round, choice and attempt.
    expected: list[float] = []
    for block in (1, 2):
        words = philox4x64(block | (5 << 64) | (6 << 128) | (7 << 192), KEY)
        expected += [(word >> 11) * 2.0**-53 for word in words]
    assert numbers(8, choice=6, round=5, attempt=7) == expected


def test_keys_have_their_golden_values() -> None:
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
    """Odds of a false alarm: 1e-6."""
    drawn = [numbers(1, derive_key(7, Role.DRAFTING), round=index)[0] for index in range(20_000)]
    assert kstest(drawn, "uniform").pvalue > ALPHA


def test_numbers_inside_rounds_are_uniform_and_consecutive_rounds_uncorrelated() -> None:
    """Odds of a false alarm: 1e-6 for the first claim, 4e-8 for the second (5.5 standard deviations)."""
    drawn = np.array([numbers(4, derive_key(8, Role.VERIFYING), round=index) for index in range(5_000)])
    assert kstest(drawn.ravel(), "uniform").pvalue > ALPHA
    correlation = np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]
    assert abs(correlation) < 5.5 / len(drawn) ** 0.5


def test_seeds_of_requests_without_one_are_64_bit_and_not_repeated() -> None:
    """Odds of a false alarm: 1e-14."""
    seeds = {new_seed() for _ in range(500)}
    assert len(seeds) == 500
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert max(seeds) >= 2**56  # odds of a false alarm: 2**-4000
