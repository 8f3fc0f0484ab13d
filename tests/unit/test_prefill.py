"""Pacing of prompts: what a step costs is learnt, long prompts hardly delay running sessions, and shares are fair."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draftwire.engine.prefill import (
    CHUNKS_PER_TOKEN,
    LARGEST_CHUNK,
    LONG_SHARE,
    MOST_SHARE,
    PROBE_EVERY,
    SMALLEST_CHUNK,
    SMALLEST_SHARE,
    ChunkCost,
    PrefillPacer,
    share,
)

LONG = 4000
"""Tokens of a prompt that does not fit into a step."""
FIXED_S = st.floats(0.0, 1.0)
PER_TOKEN_S = st.floats(1e-6, 0.1)


def learnt(*steps: tuple[int, int, float]) -> ChunkCost:
    """Learns from prompt tokens, other tokens and seconds of each step."""
    cost = ChunkCost()
    for step in steps:
        cost.learn(*step)
    return cost


# The cost of a chunk


@pytest.mark.parametrize("steps", [[], [(0, 5, 0.1)], [(0, 5, 0.1), (0, 300, 0.3)] * 100])
def test_cost_of_a_prompt_token_is_unknown_before_the_first_was_read(steps: list[tuple[int, int, float]]) -> None:
    assert learnt(*steps).seconds_per_token is None


@given(FIXED_S, PER_TOKEN_S, st.integers(1, 300), st.lists(st.integers(1, 512), min_size=1, max_size=20))
def test_cost_is_the_slope_of_a_line_unless_chunks_are_a_small_share(
    fixed_s: float, per_token_s: float, others: int, chunks: list[int]
) -> None:
    cost = learnt((0, others, fixed_s + per_token_s * others))
    least = True
    for chunk in chunks:
        seconds = fixed_s + per_token_s * (others + chunk)
        cost.learn(chunk, others, seconds)
        least = least and per_token_s * chunk >= SMALLEST_SHARE * seconds
    assert cost.seconds_per_token is not None
    assert cost.seconds_per_token >= per_token_s * 0.999
    if least:
        assert cost.seconds_per_token == pytest.approx(per_token_s, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.104])
def test_chunk_that_seems_to_be_free_counts_for_a_share_of_itsstep(seconds: float) -> None:
    """Noise can make a step with a chunk shorter than one without. A cost of nothing would let in everything."""
    cost = learnt((0, 5, 0.1), (20, 5, seconds))
    assert cost.seconds_per_token == pytest.approx(SMALLEST_SHARE * seconds / 20)


@pytest.mark.parametrize(("others", "alone"), [(5, 0.1), (6, 0.1), (300, 0.3), (100, 0.1), (1, 0.0)])
def test_step_with_a_chunk_is_compared_with_steps_of_its_size_or_smaller(others: int, alone: float) -> None:
    cost = learnt((0, 5, 0.1), (0, 300, 0.3), (20, others, 1.0))
    assert cost.seconds_per_token == pytest.approx((1.0 - alone) / 20)


@pytest.mark.parametrize(("before", "after"), [(0.001, 0.004), (0.004, 0.001)])
def test_cost_follows_changes(before: float, after: float) -> None:
    """The weight of the old steps falls to 0.8**30, 0.1 %."""
    steps = [(chunk, 4, 0.02 + rate * (chunk + 4)) for rate in (before, after) for chunk in (0, 64) * 30]
    assert learnt(*steps[:60]).seconds_per_token == pytest.approx(before, rel=0.01)
    assert learnt(*steps).seconds_per_token == pytest.approx(after, rel=0.05)


# The budget


def pacer_that_knows(per_token_s: float, max_added_latency_s: float) -> PrefillPacer:
    pacer = PrefillPacer(max_added_latency_s, learnt((100, 0, 100 * per_token_s)))
    pacer.budget([LONG], sessions_run=True)  # the first one beside sessions is none
    return pacer


@pytest.mark.parametrize("per_token_s", [0.0, 1e-6, 0.01, 10.0])
def test_budget_is_the_largest_chunk_while_nobody_can_be_delayed(per_token_s: float) -> None:
    assert pacer_that_knows(per_token_s, max_added_latency_s=0.05).budget([LONG], sessions_run=False) == LARGEST_CHUNK
    assert PrefillPacer(0.05).budget([LONG], sessions_run=False) == LARGEST_CHUNK


def test_budget_is_the_smallest_chunk_while_the_cost_is_unknown() -> None:
    assert PrefillPacer(0.05).budget([LONG], sessions_run=True, is_alone=True) == SMALLEST_CHUNK


def test_first_step_beside_sessions_reads_no_prompt_to_learn_a_chunks_cost() -> None:
    """20 ms a step and 0.5 ms a token: without that step the first chunk of 4 tokens would look like 5 ms a token."""
    pacer = PrefillPacer(0.1)
    assert pacer.budget([LONG], sessions_run=True) == 0
    pacer.learn(0, 5, 0.0225)
    assert pacer.budget([LONG], sessions_run=True) == SMALLEST_CHUNK
    pacer.learn(SMALLEST_CHUNK, 5, 0.0245)
    assert pacer.budget([LONG], sessions_run=True) == 33, "fit into a sixth of 100 ms"


def test_steps_of_prompts_alone_take_no_longer_than_one_with_its_chunk() -> None:
    """A step takes 0.3 s however few tokens it reads, and 10 ms more for each: alone it may be a quarter longer than a
    step without a prompt. Fewer tokens would each look dearer, so that chunks would shrink to the smallest.
    """
    pacer = PrefillPacer(0.1)
    pacer.learn(0, 5, 0.3)
    chunk = LARGEST_CHUNK
    for _ in range(60):
        pacer.learn(chunk, 0, 0.3 + 0.01 * chunk)
        chunk = pacer.budget([LONG], sessions_run=True, is_alone=True)
    assert 0.36 < 0.3 + 0.01 * chunk <= 0.375, "what does not make a whole token is left out"


@given(st.floats(0.0, 10.0), st.floats(1e-3, 10.0))
def test_budget_stays_within_bounds_and_uses_up_its_part_of_the_latency(per_token_s: float, latency_s: float) -> None:
    """A token waits for up to `CHUNKS_PER_TOKEN` chunks, whose times together stay below the bound."""
    budget = pacer_that_knows(per_token_s, latency_s).budget([LONG], sessions_run=True)
    assert SMALLEST_CHUNK <= budget <= LARGEST_CHUNK
    if budget > SMALLEST_CHUNK:
        assert CHUNKS_PER_TOKEN * budget * per_token_s <= latency_s * 1.001
    if budget < LARGEST_CHUNK:
        assert CHUNKS_PER_TOKEN * (budget + 1) * per_token_s >= latency_s * 0.999


# Shares


@given(st.integers(0, 600), st.lists(st.integers(0, 400), max_size=40))
def test_first_gets_half_and_the_shortest_the_rest(budget: int, wanted: list[int]) -> None:
    shares = share(budget, wanted, wanted)
    assert len(shares) == len(wanted)
    assert all(0 <= got <= most for got, most in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))
    if wanted:
        assert shares[0] >= min(wanted[0], budget / 2)
    unfinished = [index for index in range(1, len(wanted)) if shares[index] < wanted[index]]
    for index in unfinished:
        assert all(shares[other] == 0 for other in range(1, len(wanted)) if wanted[other] > wanted[index])


@pytest.mark.parametrize(
    ("budget", "wanted", "shares"),
    [
        (10, [], []),
        (10, [4], [4]),
        (10, [400], [10]),
        (30, [5, 100, 100], [5, 25, 0]),
        (30, [100, 5, 3], [22, 5, 3]),
        (30, [100, 20, 3], [15, 12, 3]),
        (30, [100, 20, 40], [15, 15, 0]),
        (512, [1] * 64, [1] * 64),
        (0, [3, 4], [0, 0]),
    ],
)
def test_what_one_does_not_need_goes_to_the_others(budget: int, wanted: list[int], shares: list[int | None]) -> None:
    for got, expected in zip(share(budget, wanted, wanted), shares, strict=True):
        assert expected is None or got == expected


def test_those_who_may_have_little_in_a_step_do_not_pass_for_short_prompts() -> None:
    assert share(40, [100_000, 200], [128, 200]) == [20, 20]
    assert share(512, [9_000, 9_000, 9_000, 200], [128, 128, 128, 200]) == [128, 128, 56, 200]
    assert share(512, [9_000, 9_000], [128, 9_000]) == [128, 384]


# Everything together


@dataclass
class Simulation:
    """Sessions that decode `num_running` tokens a step beside a long prompt that the pacer lets in."""

    fixed_s: float
    per_token_s: float
    max_added_latency_s: float
    num_running: int = 5
    noise: float = 0.0
    """Standard deviation of a step's duration, relative."""
    generator: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.pacer = PrefillPacer(self.max_added_latency_s)
        for size in (2, 64):  # the warm-up
            self.step(size, 0)

    def decode(self, num_steps: int, sizes: tuple[int, ...] = ()) -> None:
        """Runs steps without a prompt."""
        for _ in range(num_steps):
            self.step(0, self.generator.choice(sizes or (self.num_running,)))

    def read(self, prompt_len: int, until: int = 0) -> list[float]:
        """Reads a prompt and returns what each step took longer for it, seconds without noise. `until` so many tokens
        are left.
        """
        added = []
        while prompt_len > until:
            (chunk,) = share(self.pacer.budget([prompt_len], sessions_run=True), [prompt_len], [prompt_len])
            prompt_len -= chunk
            self.step(chunk, self.num_running)
            added.append(self.per_token_s * chunk)
        return added

    def step(self, num_prompt_tokens: int, num_other_tokens: int) -> None:
        """Runs a step, from which the pacer learns."""
        seconds = self.fixed_s + self.per_token_s * (num_prompt_tokens + num_other_tokens)
        seconds *= max(0.1, 1.0 + self.generator.gauss(0.0, self.noise))
        self.pacer.learn(num_prompt_tokens, num_other_tokens, seconds)


@given(FIXED_S, PER_TOKEN_S, st.floats(1e-3, 1.0), st.integers(1, 64), st.integers(0, 300))
def test_chunks_that_a_token_meets_stay_below_the_bound(
    fixed_s: float, per_token_s: float, latency_s: float, num_running: int, num_before: int
) -> None:
    """So a token is delayed less than the bound, at drafter and verifier together. The smallest chunk always runs, and
    one that is short beside a step without, or as long as that at the prompt's end.
    """
    simulation = Simulation(fixed_s, per_token_s, latency_s, num_running)
    simulation.decode(num_before)
    unread = 3000
    for added_s in simulation.read(unread):
        step_share = LONG_SHARE if unread > LARGEST_CHUNK else 1.0
        least_s = max(SMALLEST_CHUNK * per_token_s, step_share * (fixed_s + num_running * per_token_s))
        assert added_s <= max(latency_s / CHUNKS_PER_TOKEN, least_s) * 1.01
        unread -= round(added_s / per_token_s)


@given(FIXED_S, PER_TOKEN_S, st.lists(st.integers(2, 5000), min_size=1, max_size=64), st.booleans())
def test_chunks_of_all_prompts_are_bounded_together(
    fixed_s: float, per_token_s: float, unread: list[int], is_alone: bool
) -> None:
    """A step takes two and a half times as long at most, if the smallest chunk is no longer, nor the bound."""
    simulation = Simulation(fixed_s, per_token_s, max_added_latency_s=0.1)
    simulation.decode(PROBE_EVERY)
    simulation.read(1)
    added_s = per_token_s * simulation.pacer.budget(unread, sessions_run=True, is_alone=is_alone)
    shares = [1.0 if each <= LARGEST_CHUNK else LONG_SHARE for each in unread]
    step_s = (min(MOST_SHARE, sum(shares)) + is_alone) * (fixed_s + simulation.num_running * per_token_s)
    assert added_s <= max(0.1 / CHUNKS_PER_TOKEN, SMALLEST_CHUNK * per_token_s, step_s) * 1.01


def test_long_prompt_may_take_a_quarter_of_long_steps() -> None:
    """0.4 s for eight tokens, and 15 ms for one more: 6 fit into a quarter of that, and one into a sixth of 100 ms."""
    simulation = Simulation(0.28, 0.015, max_added_latency_s=0.1, num_running=8)
    simulation.decode(PROBE_EVERY)
    added = simulation.read(LARGEST_CHUNK + 600, until=LARGEST_CHUNK)
    assert max(added) == pytest.approx(6 * 0.015)
    assert len(added) <= 600 / 6 * PROBE_EVERY / (PROBE_EVERY - 1) + 2


@pytest.mark.parametrize(("prompt_len", "least"), [(64, 0.96), (120, 0.94), (200, 0.9), (500, 0.78)])
def test_steps_are_nearly_full_where_texts_follow_each_other(prompt_len: int, least: float) -> None:
    """Eight sessions with texts of 48 to 64 tokens, each the next one after the other. A step takes 0.1 s, and 2 ms
    more for each row. With a quarter of a step for all prompts together it would be 0.85, 0.71, 0.42 and 0.15.
    """
    simulation, seats = Simulation(0.1, 0.002, max_added_latency_s=0.1, num_running=8), 8
    unread, left = [prompt_len] * seats, [simulation.generator.randint(48, 64) for _ in range(seats)]
    arrivals, num_steps, num_decided = list(range(seats)), 500, 0
    for _ in range(num_steps):
        reading = [seat for seat in arrivals if unread[seat]]
        running = seats - len(reading)
        wanted = [unread[seat] for seat in reading]
        chunks = share(simulation.pacer.budget(wanted, sessions_run=running > 0), wanted, wanted)
        simulation.step(sum(chunks), running)
        for seat, chunk in zip(reading, chunks, strict=True):
            unread[seat] -= chunk
        for seat in [seat for seat in arrivals if not unread[seat]]:
            num_decided += 1
            left[seat] -= 1
            if not left[seat]:
                unread[seat], left[seat] = prompt_len, simulation.generator.randint(48, 64)
                arrivals.remove(seat)
                arrivals.append(seat)
    assert num_decided / num_steps / seats >= least


@given(st.floats(0.0, 0.01), PER_TOKEN_S, st.integers(1, 64))
def test_prompt_is_read_as_fast_as_the_bound_allows_if_steps_are_short(
    fixed_s: float, per_token_s: float, num_running: int
) -> None:
    """Half as fast at least, once the cost is learnt. Beside steps as long as the bound, chunks may stay small."""
    latency_s = 0.1
    assume(fixed_s + per_token_s * num_running <= latency_s / CHUNKS_PER_TOKEN)
    simulation = Simulation(fixed_s, per_token_s, latency_s, num_running)
    simulation.decode(20)
    simulation.read(4000)
    fitting = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, latency_s / CHUNKS_PER_TOKEN / per_token_s))
    assert len(simulation.read(4000)) <= 4000 / (0.5 * fitting) + 1


def test_long_prompt_after_many_noisy_small_steps_stalls_no_session() -> None:
    """A 100 ms step plus 1 ms a token: 8 tokens fit into a sixth of 50 ms, and 512 would add half a second.

    Steps of 4 to 6 tokens whose durations vary by 5 % say next to nothing about the cost of a token: a line through
    them alone finds tokens free in about one case of six.
    """
    worst = 0.0
    for seed in range(50):
        simulation = Simulation(0.1, 0.001, 0.05, noise=0.05, generator=random.Random(seed))
        simulation.decode(150, sizes=(4, 5, 6))
        worst = max(worst, *simulation.read(2000 + LARGEST_CHUNK, until=LARGEST_CHUNK))
    assert worst <= 0.05


def test_chunks_grow_although_prompts_never_cease_to_wait() -> None:
    """20 ms a step and 0.5 ms a token: 33 tokens fit into a sixth of 100 ms. No step was without a prompt before."""
    simulation = Simulation(0.02, 0.0005, max_added_latency_s=0.1)
    added = simulation.read(20_000)
    assert added.count(0.0) == -(-len(added) // PROBE_EVERY)
    assert max(added[-50:]) > 0.8 * 0.1 / CHUNKS_PER_TOKEN
