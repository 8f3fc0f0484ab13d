"""Chosen lengths of drafts against fixed ones, in simulated time: the gateway's chooser, and no models.

    python -m benchmarks.simulated_pair --output benchmarks/results/simulated_pair.json

A verifier and a drafter batch what is ready into steps; the verifier may draft by itself too, which costs its rows
alone; of its guesses few are right here. A drafter may draft token trees (`--trees`): each depth is a pass, each node a
row. Each pair of a grid of speeds, acceptance and sessions is run with fixed
lengths twice: the best length by one run is measured in the other. A drop is a pair whose acceptance falls from 0.9 to
0.1. Waves are sixteen texts that begin together, again and again, so that the number of sessions changes all the time.
Bursts are texts that begin and end together, of which a drafter reads for most of the time. Unsteady pairs are on
machines that others use too, and whose texts grow. In the end it says what choosing takes the gateway for a round.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product, starmap
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from benchmarks.pair_simulation import SimulatedPair, Simulation, constant, round_times
from benchmarks.report import progress, write_report
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.pair_chooser import TREES, PairChooser
from draftwire_gateway.speculation.session_length import SessionLength

FIXED = (PLAIN, *(Arm(DraftSource.DRAFTER, length) for length in (1, 2, 4, 8)))
FIXED_TREES = (*FIXED, *(Arm(DraftSource.TREES, *shape) for shape in TREES))
VERIFY_MS, ROW_US, DRAFT_MS = (5, 20), (0, 200, 1000), (0.5, 2)
TREE_ROW_US = (2, 20, 200)
"""A row of a GPU's verifier, of one that has much to do, and of a CPU's."""
SIBLINGS = ((0.46, 0.13, 0.12, 0.04, 0.04, 0.03, 0.03), (0.1, 0.03))
"""Where the first child is not right, how often the others are: first racers of a 1.5B/0.5B pair under `coupled`, 512
places; and of a drafter that knows only one token."""
ACCEPTANCE, SESSIONS = (0.1, 0.5, 0.8, 0.95), (1, 4, 16)
OWN_ACCEPTANCE = 0.1
FIXED_S = 20.0
"""How long fixed lengths are run."""
FIRST_S, EARLY_S, LATE_S = 10.0, 30.0, 60.0
"""Chosen lengths are measured from nothing to the first two, and from the second to the third."""
DROP_AT_S, DROP_SECONDS = 8.0, 5.0
WAVES = (0.5, 0.75, 0.9)
"""Acceptance of the pairs whose texts come in waves."""
BURST_S = 3.0
BURSTS_S, MORE_BURSTS_S = 24.0, 72.0
"""Bursts are measured from nothing to the first, and from there to the second."""
UNSTEADY_S, MORE_UNSTEADY_S = 40.0, 120.0
"""Unsteady pairs are measured from nothing to the first, and from there to the second."""
UNSTEADY_NOISE = 0.1
"""Standard deviation of the time of a step, as a share of it."""
UNSTEADY_SEEDS = 8
DRIFT, DRIFT_S = 0.1, 20.0
"""Standard deviation of the logarithm of a machine's slowness, and after how long a third of it is left."""
TIMED_ROUNDS = 5000


def measure_pair(pair: SimulatedPair, fixed: Sequence[Arm]) -> dict[str, Any]:
    """Returns the best fixed arm of a pair, and what chosen ones make of its tokens/s, by part of the time."""
    seeds = range(SESSIONS[-1] // pair.num_sessions)  # one session alone is noisy

    def rate(arm: Arm | None, seed: int, seconds: float, since: float) -> float:
        runs = [Simulation(pair, arm, seed + each, PairChooser(8, 4, pair.sources)) for each in seeds]
        return mean(run.tokens_per_s(seconds, since) for run in runs)

    best = max(fixed, key=lambda arm: rate(arm, 0, FIXED_S, 1.0))
    measured = rate(best, 100, FIXED_S, 1.0)
    spans = {"first": (FIRST_S, 0.0), "early": (EARLY_S, 0.0), "late": (LATE_S, EARLY_S)}
    shares = {part: rate(None, 200, *span) / measured for part, span in spans.items()}
    return {"best": best.length, "best_nodes": best.num_nodes, **shares}


class GridPair(NamedTuple):
    """Speeds, acceptance and sessions of a pair of the grid."""

    verify_ms: float
    row_us: float
    draft_ms: float
    acceptance: float
    sessions: int
    siblings: tuple[float, ...] | None

    def simulated(self) -> SimulatedPair:
        """Returns the pair."""
        speeds = (self.verify_ms / 1e3, self.row_us / 1e6, self.draft_ms / 1e3)
        return SimulatedPair(
            *speeds,
            constant(self.acceptance),
            self.sessions,
            own_acceptance=OWN_ACCEPTANCE,
            siblings=self.siblings,
        )

    def __str__(self) -> str:
        speeds = f"verify {self.verify_ms} ms, row {self.row_us} us, draft {self.draft_ms} ms"
        name = f"{speeds}, acceptance {self.acceptance}, {self.sessions} sessions"
        return name if self.siblings is None else f"{name}, second children {self.siblings[0]}"


def figures_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures over all pairs."""
    figures: dict[str, Any] = {"pairs": len(results)}
    for part in ("first", "early", "late"):
        ratios = [result[part] for result in results]
        figures[part] = {"median": median(ratios), "tenth": quantiles(ratios, n=10)[0], "least": min(ratios)}
    return figures


def measure_drop(seed: int) -> float:
    """Returns tokens/s from the second second after a drop, over plain decoding."""
    pair = SimulatedPair(0.010, 0.0, 0.0005, lambda now: 0.9 if now < DROP_AT_S else 0.1, 1, hop_s=0.0005)
    plain = Simulation(pair, 0, seed).tokens_per_s(DROP_AT_S)
    since = DROP_AT_S + 1.0
    return Simulation(pair, None, seed).tokens_per_s(since + DROP_SECONDS, since) / plain


def waves(acceptance: float) -> SimulatedPair:
    """Returns the embedded pair about as it is on two slow cores, whose sixteen texts begin at the same time, and the
    next ones when all have ended: for a second of six there are few.
    """
    return SimulatedPair(0.030, 0.0012, 0.012, constant(acceptance), 16, text_tokens=(70, 128), prompt_s=0.04)


def measure_waves(acceptance: float) -> dict[str, float]:
    """Returns tokens/s of waves of texts over plain decoding, which is best there, in the first half minute and the
    minute after.
    """
    pair, seeds = waves(acceptance), range(4)
    spans = {"early": (EARLY_S, 0.0), "late": (EARLY_S + LATE_S, EARLY_S)}
    return {
        part: mean(Simulation(pair, None, seed).tokens_per_s(*span) for seed in seeds)
        / mean(Simulation(pair, 0, seed).tokens_per_s(*span) for seed in seeds)
        for part, span in spans.items()
    }


def bursts() -> dict[str, SimulatedPair]:
    """Returns pairs whose texts all begin and end together: about the embedded one with sixteen sessions, at
    temperatures 0 and 1, and one with 64 whose drafter is quick.
    """
    return {
        "16 sessions, drafts pay": SimulatedPair(
            0.045, 0.0015, 0.010, constant(0.95), 16, 0.006, prompt_s=0.06, burst_s=BURST_S, read_s=0.09
        ),
        "16 sessions, drafts do not pay": SimulatedPair(
            0.045, 0.0012, 0.012, constant(0.65), 16, 0.004, prompt_s=0.04, burst_s=BURST_S, read_s=0.06
        ),
        "64 sessions, drafts pay": SimulatedPair(
            0.022, 0.0004, 0.0008, constant(0.95), 64, 0.004, prompt_s=0.014, burst_s=BURST_S, read_s=0.02
        ),
    }


def measure_bursts(pair: SimulatedPair) -> dict[str, float]:
    """Returns tokens/s over those of the best fixed length, from nothing and later."""
    seeds = range(4)
    best = max(mean(Simulation(pair, arm, seed).tokens_per_s(MORE_BURSTS_S) for seed in seeds) for arm in FIXED)
    spans = {"early": (BURSTS_S, 0.0), "late": (MORE_BURSTS_S, BURSTS_S)}
    return {
        part: mean(Simulation(pair, None, seed).tokens_per_s(*span) for seed in seeds) / best
        for part, span in spans.items()
    }


def slowness_of_machine(seed: int) -> Callable[[float], float]:
    """Returns how slow a machine is by time that others use too."""
    draws, kept, now = random.Random(seed), math.exp(-1.0 / DRIFT_S), 0.0
    drift = []
    for _ in range(math.ceil(MORE_UNSTEADY_S) + 1):
        drift.append(now)
        now = kept * now + math.sqrt(1.0 - kept**2) * draws.gauss(0.0, DRIFT)
    return lambda at: math.exp(drift[int(at)])


def unsteady() -> dict[str, SimulatedPair]:
    """Returns pairs for unsteady machines, whose verifiers guess too: about the embedded one with sixteen sessions, at
    three acceptances, and others with four and one.
    """
    of_sixteen = SimulatedPair(
        0.045,
        0.0012,
        0.010,
        constant(0.78),
        16,
        0.004,
        UNSTEADY_NOISE,
        OWN_ACCEPTANCE,
        text_tokens=(100, 160),
        renews_texts=True,
        text_token_s=2e-5,
        prompt_s=0.02,
    )
    return {
        "16 sessions, drafts hardly pay": of_sixteen,
        "16 sessions, drafts pay": replace(of_sixteen, acceptance=constant(0.88)),
        "16 sessions, drafts do not pay": replace(of_sixteen, acceptance=constant(0.6)),
        "4 sessions, drafts hardly pay": replace(
            of_sixteen, verify_s=0.03, row_s=0.003, num_sessions=4, text_token_s=5e-5
        ),
        "1 session, drafts pay": replace(
            of_sixteen, verify_s=0.02, row_s=0.001, draft_s=0.002, num_sessions=1, text_token_s=1e-4
        ),
    }


def measure_unsteady(pair: SimulatedPair) -> dict[str, float]:
    """Returns tokens/s over those of the best fixed length on the same machines, from nothing and later."""
    pairs = {seed: replace(pair, slowness=slowness_of_machine(seed)) for seed in range(UNSTEADY_SEEDS)}

    def rate(arm: Arm | None, seconds: float, since: float) -> float:
        runs = [
            Simulation(each, arm, seed, PairChooser(8, 4, pair.sources)).tokens_per_s(seconds, since)
            for seed, each in pairs.items()
        ]
        return mean(runs)

    best = max(FIXED, key=lambda arm: rate(arm, MORE_UNSTEADY_S, 0.0))
    spans = {"early": (UNSTEADY_S, 0.0), "late": (MORE_UNSTEADY_S, UNSTEADY_S)}
    shares = {part: rate(None, *span) / rate(best, *span) for part, span in spans.items()}
    return {"best": best.length, **shares}


def chooser_us() -> float:
    """Returns what choosing takes for a round, microseconds: all sessions of a step wait for that."""
    pair, chooser = SimulatedPair(0.022, 2e-4, 8e-4, constant(0.8), 16), PairChooser(8, 4)
    Simulation(pair, None, chooser=chooser).tokens_per_s(FIXED_S)
    session, draws = SessionLength(chooser), random.Random(0)
    arm = Arm(DraftSource.DRAFTER, 8)
    rounds = [
        round_times(number, FIXED_S + 0.003 * number, FIXED_S + 0.003 * number + 0.05, 8, accepted, 0.006, 0.03)
        for number in range(TIMED_ROUNDS)
        for accepted in [pair.num_accepted(arm, 0.0, draws.random)]
    ]
    began = time.perf_counter()
    for times in rounds:
        session.next_draft(times.verdict.fence.round, 100, times.started_at)
        session.observe(times)
    return (time.perf_counter() - began) / TIMED_ROUNDS * 1e6


def main() -> None:
    """Runs the grid and the drops, prints the figures over all pairs, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--every", type=int, default=1, help="takes each so many'th pair of the grid")
    parser.add_argument("--trees", action="store_true", help="pairs whose drafters draft token trees too")
    parser.add_argument("--drops", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows_us = TREE_ROW_US if arguments.trees else ROW_US
    siblings: Sequence[tuple[float, ...] | None] = SIBLINGS if arguments.trees else (None,)
    fixed: Sequence[Arm] = FIXED_TREES if arguments.trees else FIXED
    grid = starmap(GridPair, product(VERIFY_MS, rows_us, DRAFT_MS, ACCEPTANCE, SESSIONS, siblings))
    chosen = list(grid)[:: arguments.every]
    results = [{"pair": str(pair), **measure_pair(pair.simulated(), fixed)} for pair in progress(chosen, "pairs")]
    figures = figures_of(results)
    drops = [measure_drop(seed) for seed in range(arguments.drops)]
    in_waves = {f"acceptance {acceptance}": measure_waves(acceptance) for acceptance in WAVES}
    in_bursts = {name: measure_bursts(pair) for name, pair in bursts().items()}
    on_unsteady = {name: measure_unsteady(pair) for name, pair in unsteady().items()}
    found = {
        "drops": {"mean": mean(drops), "least": min(drops)},
        "waves": in_waves,
        "bursts": in_bursts,
        "unsteady": on_unsteady,
        "chooser_us_per_round": chooser_us(),
    }
    write_report(arguments, {**figures, **found, "results": results})


if __name__ == "__main__":
    main()
