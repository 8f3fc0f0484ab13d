"""Rules that share noise with the drafter, integrated exactly over that noise.

At one position both sides race with the same exponentials e: the drafter draws x = argmin e / q, the target y = argmin
e / p. Their joint law has a closed form:

    P(x = y = i) = 1 / sum over k of max(p_k / p_i, q_k / q_i)
    P(x = i, y = j) = integral of dr / c(r)^2 for r from q_j / q_i to p_j / p_i, if that interval is not empty,
                      c(r) = 1 + r + sum over other k of max(q_k / q_i, r p_k / p_j)

where r = e_j / e_i. So noise matters through the cell (x, y) alone, and a few *witnesses* of each cell, samples of
noise that fall into it, show what real code does for the whole cell.
"""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from draftwire.checking.all_blocks import all_blocks, chosen, emitted_codes
from draftwire.checking.emissions import Emissions, num_codes
from draftwire.checking.toy_models import Pair
from draftwire.method.distributions import race
from draftwire.verification.rule import FixedNoise, VerificationRule, verify

LEAST_CELL = 1e-13
"""Less likely cells may be too narrow for float64 to hit. Their mass is missing from the law and adds to its
deviation."""

WITNESSES = ((0.5, 2.0, 1.0), (0.25, 5.0, 0.3), (0.0, 2.0, 1.0), (1.0, 2.0, 1.0))
"""Place of each witness in the cell's range of r, distance of its losers beyond the finish, and scale of e. The last
two witnesses are as close as `MARGIN` to where another token wins, one on each side."""

MARGIN = 1e-7
"""Relative, in wide cells; in narrow ones all witnesses are inside."""


@dataclass(frozen=True, slots=True)
class RaceLaw:
    """The joint law of both winners at several positions."""

    probs: Tensor
    """`[places, vocab, vocab] float64`: probability of the drafter's winner and the target's."""
    times: Tensor
    """`[witnesses, places, vocab, vocab, vocab] float64`: noise that falls into each cell; anything in empty ones."""


@dataclass(frozen=True, slots=True)
class CoupledRound:
    """Emissions of one round of a coupled rule."""

    emissions: Emissions
    reasons: tuple[str, ...]
    """Ways in which the outcome depends on noise that it must not depend on."""


def match_probs(target: Tensor, drafter: Tensor) -> Tensor:
    """Returns the probability that both sides draw token i, `[places, vocab]`, from their laws, `[places, vocab]`."""
    is_possible = (target > 0.0) & (drafter > 0.0)
    p, q = torch.where(is_possible, target, 1.0), torch.where(is_possible, drafter, 1.0)
    slowest = torch.maximum(target.unsqueeze(1) / p.unsqueeze(2), drafter.unsqueeze(1) / q.unsqueeze(2))
    return torch.where(is_possible, 1.0 / slowest.sum(dim=2), 0.0)


def race_law(target: Tensor, drafter: Tensor) -> RaceLaw:
    """Returns the law of both winners of races between weights `[places, vocab]`."""
    places, vocab_size = target.shape
    probs = torch.zeros(places, vocab_size, vocab_size, dtype=torch.float64)
    times = torch.ones(len(WITNESSES), places, vocab_size, vocab_size, vocab_size, dtype=torch.float64)
    matches = match_probs(target, drafter)
    for i in range(vocab_size):
        for j in range(vocab_size):
            # with e_i = 1 and e_j = r the other exponentials have to be above max(draft_k, r * goal_k)
            draft = drafter / drafter[:, i : i + 1]  # inf and NaN where q_i = 0: such cells are empty
            goal = target / target[:, j : j + 1]
            low, high = draft[:, j], target[:, j] / target[:, i]
            is_cell = (drafter[:, i] > 0.0) & (target[:, j] > 0.0)
            if i == j:
                probs[:, i, i] = matches[:, i]
                low = high = torch.ones_like(low)
            else:
                is_cell &= high > low
                others = [k for k in range(vocab_size) if k not in (i, j)]
                area = _integral(low, high, draft[:, others], goal[:, others])
                probs[:, i, j] = torch.where(is_cell, area, 0.0)
            for witness, (share, slack, scale) in enumerate(WITNESSES):
                r = _between(low, high, share)
                beyond = torch.maximum(draft, r.unsqueeze(1) * goal)
                e = scale * torch.where(beyond > 0.0, slack * beyond, slack)
                e[:, i] = scale
                e[:, j] = scale * r
                times[witness, :, i, j] = torch.where(is_cell.unsqueeze(1), e, 1.0)
    return RaceLaw(probs, times)


def _between(low: Tensor, high: Tensor, share: float) -> Tensor:
    """Returns the point at a share of the way from `low` to `high`, which may be infinite; never an end point."""
    inside = torch.where(torch.isfinite(high), low + 0.5 * (high - low), 2.0 * low + 0.5)
    if 0.0 < share < 1.0:
        return torch.where(torch.isfinite(high), low + share * (high - low), 2.0 * low + share)
    edge = low * (1.0 + MARGIN) if share == 0.0 else high * (1.0 - MARGIN)
    is_wide = (low > 0.0) & torch.isfinite(high) & (high > low * (1.0 + 4 * MARGIN))
    return torch.where(is_wide, edge, inside)


def _integral(low: Tensor, high: Tensor, draft: Tensor, goal: Tensor) -> Tensor:
    """Returns the integral of dr / c(r)^2, c(r) = 1 + r + sum over k of max(draft_k, r * goal_k), piece by piece.

    Args:
        low: `[places]`.
        high: `[places]`, may be infinite.
        draft: `[places, others]`.
        goal: `[places, others]`.
    """
    bends = torch.nan_to_num(draft / goal, nan=0.0, posinf=torch.inf)
    bends = bends.clamp(min=low.unsqueeze(1)).minimum(high.unsqueeze(1)).sort(dim=1).values
    ends = torch.cat([low.unsqueeze(1), bends, high.unsqueeze(1)], dim=1)
    area = torch.zeros_like(low)
    for piece in range(ends.shape[1] - 1):
        start, end = ends[:, piece], ends[:, piece + 1]
        middle = torch.where(torch.isfinite(end), 0.5 * (start + end), 2.0 * start + 1.0).unsqueeze(1)
        is_goal = middle * goal > draft
        constant = 1.0 + torch.where(is_goal, 0.0, draft).sum(dim=1)
        slope = 1.0 + torch.where(is_goal, goal, 0.0).sum(dim=1)
        at_start = constant + slope * start
        finite = (end - start) / (at_start * (constant + slope * end))
        part = torch.where(torch.isfinite(end), finite, 1.0 / (slope * at_start))
        area = area + torch.where(end > start, part, 0.0)
    return area


def coupled_round(rule: VerificationRule, pair: Pair, length: int) -> CoupledRound:
    """Returns the law of what a round of `length` draft tokens emits, integrated over all noise."""
    vocab_size, contexts = pair.vocab_size, pair.vocab_size + 1
    races, last = race_law(pair.target, pair.drafter), race_law(pair.target, pair.target)
    # a path is a context, then the cell of each position; the last has no draft token, so its cells are diagonal
    shape = (contexts, *[vocab_size] * (2 * length + 1))
    path = torch.stack([part.flatten() for part in torch.meshgrid(*map(torch.arange, shape), indexing="ij")])
    before = torch.stack([path[0], *path[1:-1:2]])  # [length + 1, paths]: the token before each place
    cells = [last.probs[before[-1], path[-1], path[-1]]]
    cells += [races.probs[before[place], path[1 + 2 * place], path[2 + 2 * place]] for place in range(length)]
    probs = reduce(torch.mul, cells)
    kept = (probs > 0.0) & (torch.stack(cells) > LEAST_CELL).all(dim=0)
    path, before, probs = path[:, kept], before[:, kept], probs[kept]
    found = []
    for witness in range(len(WITNESSES)):
        times = [
            races.times[witness, before[place], path[1 + 2 * place], path[2 + 2 * place]] for place in range(length)
        ]
        times.append(last.times[witness, before[-1], path[-1], path[-1]])
        found.append(_emitted(rule, pair, path[0], torch.stack(times, dim=1)))
    reasons = []
    if not all(torch.equal(found[0], other) for other in found[1:]):
        reasons.append("the outcome depends on more than who wins the race at each place")
    if _reads_ahead(found[0], path, shape):
        reasons.append("the outcome depends on noise of places that it does not commit, which later rounds use again")
    codes = num_codes(vocab_size, length + 1)
    masses = torch.zeros(contexts * codes, dtype=torch.float64).index_add_(0, path[0] * codes + found[0], probs)
    return CoupledRound(Emissions.from_codes(masses.reshape(contexts, codes), vocab_size), tuple(reasons))


def _emitted(rule: VerificationRule, pair: Pair, contexts: Tensor, times: Tensor) -> Tensor:
    """Drafts and verifies with given noise, `[paths, length + 1, vocab]`; returns the codes of the emitted tokens."""
    length, vocab_size = times.shape[1] - 1, pair.vocab_size
    blocks, numbers = all_blocks(pair, length), contexts
    for place in range(length):
        drafted = race(pair.drafter[numbers % vocab_size if place else numbers], times[:, place]).winners
        numbers = numbers * vocab_size + drafted
    batch = chosen(blocks.batch, torch.searchsorted(blocks.numbers, numbers))
    return emitted_codes(batch, verify(rule, batch, FixedNoise(times.new_zeros(len(times), 0), times)))


def _reads_ahead(codes: Tensor, path: Tensor, shape: tuple[int, ...]) -> bool:
    """Returns whether paths that agree up to the last committed position emit different tokens."""
    length, vocab_size = (len(shape) - 2) // 2, shape[1]
    least = 0
    for place in range(length + 1):
        # codes of exactly place + 1 tokens are [least, most)
        most = least + vocab_size ** (place + 1)
        number = path[0]
        for digit in path[1 : min(3 + 2 * place, len(path))]:
            number = number * vocab_size + digit
        groups, group_of = number.unique(return_inverse=True)
        lowest = codes.new_full((len(groups),), 2**62).scatter_reduce_(0, group_of, codes, "amin")
        highest = codes.new_full((len(groups),), -1).scatter_reduce_(0, group_of, codes, "amax")
        ends_here = ((codes >= least) & (codes < most)).nonzero().squeeze(1)
        if bool((lowest != highest)[group_of[ends_here]].any()):
            return True
        least = most
    return False
