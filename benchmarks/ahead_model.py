"""What drafting ahead of the verdict should be worth: one session's rounds in simulated time.

    python -m benchmarks.ahead_model

prints, for the pairs of `benchmarks.draft_ahead`, the ratio to strict drafting at the best length of each. Three places
take time: a step of the verifier, a pass of the drafter, and every hop between two services. A verdict goes to the
drafter in one hop, and by the gateway in two; a block goes to the verifier in one. For how many texts it drafts at once
is what a drafter chooses. Other sessions and prompts are not simulated.
"""

import argparse
import random
from dataclasses import dataclass, replace
from itertools import product

from draftwire.options.ahead.branching import PassTime, num_worthwhile

GUESSES = 4
"""Guesses of a place's extra token."""
NUM_DIGITS = 10
"""Tokens that share the rest of the law in the place of a rejected one."""
NUM_ROUNDS = 4000
LENGTHS = (2, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Pair:
    """Times of a pair, seconds, and how likely its drafts are right."""

    verify_s: float
    """A step of the verifier, with all that belongs to a round there."""
    pass_s: float
    """A pass of the drafter: one token of a batch."""
    row_s: float
    """What a further block of the batch adds to that."""
    hop_s: float
    """From one service to another."""
    acceptance: float
    """Probability that the next draft token is accepted."""
    recovered: float = 0.5
    """Probability that the first guess is right in the place of a rejected token."""

    @property
    def recovered_right(self) -> list[float]:
        """Probability of each guess in the place of a rejected token."""
        digit = (1.0 - self.recovered) / NUM_DIGITS
        return [self.recovered, *[digit] * (GUESSES - 1)]

    @property
    def bonus_right(self) -> list[float]:
        """Probability of each guess behind a whole block: the drafter's next token, then as after a rejection."""
        others = [(1.0 - self.acceptance) * right for right in self.recovered_right]
        return [self.acceptance, *others][:GUESSES]


@dataclass(slots=True)
class Ending:
    """How a round ends."""

    num_kept: int
    rank: int
    """Of the guess that is right; `GUESSES` for none."""


class Rounds:
    """Draws how rounds end, and knows the endings that the drafter prepares for."""

    def __init__(
        self, pair: Pair, length: int, branches: int, generator: random.Random, *, chooses_branches: bool = True
    ) -> None:
        self._pair, self._length, self._generator = pair, length, generator
        chances = []
        for num_kept in range(length + 1):
            is_whole = num_kept == length
            ends = pair.acceptance**num_kept * (1.0 if is_whole else 1.0 - pair.acceptance)
            right = pair.bonus_right if is_whole else pair.recovered_right
            chances += [(ends * one, num_kept, rank) for rank, one in enumerate(right)]
        chances.sort(key=lambda chance: -chance[0])
        likeliest = chances[:branches]
        outcome_s = pair.verify_s + 2.0 * pair.hop_s
        times = PassTime(pair.pass_s, pair.row_s)
        chosen = [chance for chance, _, _ in likeliest]
        count = num_worthwhile(chosen, length, times, outcome_s) if chosen and chooses_branches else len(chosen)
        self.prepared = [(num_kept, rank) for _, num_kept, rank in likeliest[:count]]
        """The likeliest first."""

    def draw(self) -> Ending:
        """Returns how a round ends."""
        num_kept = 0
        while num_kept < self._length and self._generator.random() < self._pair.acceptance:
            num_kept += 1
        right = self._pair.bonus_right if num_kept == self._length else self._pair.recovered_right
        left = self._generator.random()
        for rank, one in enumerate(right):
            left -= one
            if left < 0.0:
                return Ending(num_kept, rank)
        return Ending(num_kept, GUESSES)


def mean_tokens(acceptance: float, length: int) -> float:
    """Returns how many tokens a round commits on average."""
    return sum(acceptance**number for number in range(length + 1))


def strict_rate(pair: Pair, length: int) -> float:
    """Returns the tokens/s of one session that drafts when it is asked."""
    return mean_tokens(pair.acceptance, length) / (pair.verify_s + length * pair.pass_s + 3.0 * pair.hop_s)


def ahead_rate(
    pair: Pair, length: int, rounds_ahead: int, branches: int, seed: int = 1, *, chooses_branches: bool = True
) -> float:
    """Returns the tokens/s of one session that drafts up to `rounds_ahead` rounds ahead.

    Args:
        pair: its times.
        length: of each block.
        rounds_ahead: rounds beyond the one that was asked for, at least 1.
        branches: texts for which blocks may be drafted at once, over all these rounds.
        seed: of the endings.
        chooses_branches: whether the drafter drafts for as many texts as save time; else for all of these.
    """
    generator = random.Random(seed)
    rounds = Rounds(pair, length, branches // rounds_ahead, generator, chooses_branches=chooses_branches)
    batch_s = pair.pass_s + (len(rounds.prepared) - 1) * pair.row_s
    arrives = length * pair.pass_s + pair.hop_s
    """When the block of the round arrives at the verifier."""
    begins = length * pair.pass_s
    """When the drafter has time for the rounds after."""
    verdict, num_tokens = 0.0, 0
    verdicts = [0.0]
    for number in range(NUM_ROUNDS):
        verdict = max(verdict, arrives) + pair.verify_s
        ending = rounds.draw()
        num_tokens += ending.num_kept + 1
        known = verdict + pair.hop_s
        if number + 1 >= rounds_ahead:  # the request of a round that came by the gateway
            begins = max(begins, verdicts[number + 1 - rounds_ahead] + 2.0 * pair.hop_s)
        verdicts.append(verdict)
        begins_batch = begins + pair.pass_s  # reads the block's last token
        is_prepared = (ending.num_kept, ending.rank) in rounds.prepared
        is_first = is_prepared and (ending.num_kept, ending.rank) == rounds.prepared[0]
        done = begins_batch + length * batch_s
        if begins >= known:  # nothing was prepared yet
            done = known + length * pair.pass_s
            begins = done
        elif is_prepared and done <= known:
            begins = done if is_first else max(known, done)
        elif is_prepared and begins_batch < known:  # the batch goes on for this text alone
            num_drawn = int((known - begins_batch) / batch_s) + 1
            done = begins_batch + num_drawn * batch_s + (length - num_drawn) * pair.pass_s
            begins = done
        else:  # what was prepared is given up at the next token
            if begins_batch >= known:
                free = begins_batch
            elif done <= known:
                free = known
            else:
                free = begins_batch + (int((known - begins_batch) / batch_s) + 1) * batch_s
            done = free + length * pair.pass_s
            begins = done
        arrives = done + pair.hop_s
    return num_tokens / verdict


def best(rates: dict[int, float]) -> int:
    """Returns the length with the highest rate."""
    return max(rates, key=lambda length: rates[length])


def main() -> None:
    """Prints a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--verify-ms", type=float, default=10.0)
    parser.add_argument("--draft-ms", type=float, default=2.0)
    parser.add_argument("--hop-ms", type=float, default=0.7, help="of the services themselves, beside the network")
    parser.add_argument("--rounds-ahead", type=int, default=2)
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--fixed", action="store_true", help="always for all branches, not for as many as save time")
    arguments = parser.parse_args()
    base = Pair(arguments.verify_ms / 1e3, arguments.draft_ms / 1e3, 0.0, 0.0, 0.0)
    for share, delay_ms, acceptance in product((0.0, 0.2), (0.0, 5.0, 20.0), (0.6, 0.8, 0.95)):
        hop_s = (arguments.hop_ms + delay_ms) / 1e3
        pair = replace(base, row_s=share * base.pass_s, hop_s=hop_s, acceptance=acceptance)
        strict = {length: strict_rate(pair, length) for length in LENGTHS}
        limits = arguments.rounds_ahead, arguments.branches
        ahead = {length: ahead_rate(pair, length, *limits, chooses_branches=not arguments.fixed) for length in LENGTHS}
        lengths = best(strict), best(ahead)
        print(
            f"{delay_ms:g} ms, acceptance {acceptance:g}, row {share:g}: strict {strict[lengths[0]]:.0f} tokens/s at "
            f"{lengths[0]}, ahead {ahead[lengths[1]]:.0f} at {lengths[1]}: {ahead[lengths[1]] / strict[lengths[0]]:.2f}"
        )


if __name__ == "__main__":
    main()
