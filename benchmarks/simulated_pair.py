"""Chosen lengths of drafts against fixed ones, in simulated time: the gateway's chooser, and no models.

    python -m benchmarks.simulated_pair --output benchmarks/results/simulated_pair.json

A verifier and a drafter batch what is ready into steps; the verifier may draft by itself too, which costs its rows
alone; of its guesses few are right here. Each pair of a grid of speeds, acceptance and sessions is run with fixed
lengths twice: the best length by one run is measured in the other. A drop is a pair whose acceptance falls from 0.9 to
0.1. Waves are sixteen texts that begin together, again and again, so that the number of sessions changes all the time.
Bursts are texts that begin and end together, of which a drafter reads for most of the time. Unsteady pairs are on
machines that others use too, and whose texts grow. Short texts begin on a pair that nobody has used. In the end it
says what choosing takes the gateway for a round. With `--uneven`, the times of steps are none that the chooser's model
has: see `SimulatedPair.is_uneven`.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product, starmap
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from benchmarks.pair_simulation import SimulatedPair, Simulation, constant, round_times
from benchmarks.report import progress, write_report
from draftwire.method.round_parts import StepSize
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser

FIXED = (PLAIN, *(Arm(DraftSource.DRAFTER, length) for length in (1, 2, 4, 8)))
VERIFY_MS, ROW_US, DRAFT_MS = (5, 20), (0, 200, 1000), (0.5, 2)
ACCEPTANCE, SESSIONS = (0.1, 0.5, 0.8, 0.95), (1, 4, 16)
FRESH_SEED = 2000
"""From which on seeds are where times are uneven: none of them was used while anything was tuned."""
SHORT_ACCEPTANCE = (0.5, 0.8, 0.95)
"""Of the pairs whose texts are short."""
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


Span = tuple[float, float]
"""Until when tokens are counted, and from when on, seconds."""
Measure = Callable[[SimulatedPair, int], dict[str, Any]]
"""Measures a pair with seeds from one on."""
SCENES = ("pairs", "drops", "waves", "bursts", "unsteady", "short")
Run = tuple[int, SimulatedPair]
"""A seed, and the pair that is run with it."""


def chooser_of(pair: SimulatedPair) -> PredictingChooser:
    """Returns a chooser of a pair that knows what its warm-up took."""
    return PredictingChooser(8, 4, pair.sources, pair.warm_up)


def rate_of(runs: Sequence[Run], span: Span, arm: Arm | None) -> float:
    """Returns mean tokens/s of runs, with a fixed arm, or (None) with what is chosen."""
    return mean(Simulation(pair, arm, seed, chooser_of(pair)).tokens_per_s(*span) for seed, pair in runs)


def chosen_rates(runs: Sequence[Run], spans: Mapping[str, Span], reference: Callable[[Span], float]) -> dict[str, Any]:
    """Returns what chosen lengths make of a reference's tokens/s, by part of the time."""
    return {"chosen": {part: rate_of(runs, span, None) / reference(span) for part, span in spans.items()}}


def measure_pair(
    pair: SimulatedPair, spans: Mapping[str, Span], fixed_span: Span, seeds: Sequence[range]
) -> dict[str, Any]:
    """Returns the best fixed length of a pair, and what chosen ones make of its tokens/s, by part of the time.

    Args:
        pair: to be measured.
        spans: parts of the time.
        fixed_span: of runs with a fixed length.
        seeds: by which the best length is found, by which it is measured, and of runs with chosen ones.
    """
    finding, measuring, choosing = ([(seed, pair) for seed in each] for each in seeds)
    best = max(FIXED, key=lambda arm: rate_of(finding, fixed_span, arm))
    measured = rate_of(measuring, fixed_span, best)
    return {"best": best.length, **chosen_rates(choosing, spans, lambda _: measured)}


def seeds_of(pair: SimulatedPair, *firsts: int) -> list[range]:
    """Returns seeds of a pair from some on: one session alone is noisy."""
    return [range(first, first + SESSIONS[-1] // pair.num_sessions) for first in firsts]


def measure_grid(pair: SimulatedPair, seed: int) -> dict[str, Any]:
    """Returns what chosen lengths make on a pair of the grid, seconds after they knew nothing of it."""
    spans = {"first": (FIRST_S, 0.0), "early": (EARLY_S, 0.0), "late": (LATE_S, EARLY_S)}
    return measure_pair(pair, spans, (FIXED_S, 1.0), seeds_of(pair, seed, seed + 100, seed + 200))


class GridPair(NamedTuple):
    """Speeds, acceptance and sessions of a pair of the grid."""

    verify_ms: float
    row_us: float
    draft_ms: float
    acceptance: float
    sessions: int

    def simulated(self) -> SimulatedPair:
        """Returns the pair."""
        speeds = (self.verify_ms / 1e3, self.row_us / 1e6, self.draft_ms / 1e3)
        return SimulatedPair(*speeds, constant(self.acceptance), self.sessions, own_acceptance=OWN_ACCEPTANCE)

    def __str__(self) -> str:
        speeds = f"verify {self.verify_ms} ms, row {self.row_us} us, draft {self.draft_ms} ms"
        return f"{speeds}, acceptance {self.acceptance}, {self.sessions} sessions"


def figures_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures over all pairs, by part of the time."""
    figures: dict[str, Any] = {}
    for part in results[0]["chosen"]:
        ratios = [result["chosen"][part] for result in results]
        tenth = quantiles(ratios, n=10, method="inclusive")[0] if len(ratios) > 1 else ratios[0]
        figures[part] = {"median": median(ratios), "mean": mean(ratios), "tenth": tenth, "least": min(ratios)}
    return figures


def dropping() -> SimulatedPair:
    """Returns a pair whose acceptance drops."""
    return SimulatedPair(0.010, 0.0, 0.0005, lambda now: 0.9 if now < DROP_AT_S else 0.1, 1, hop_s=0.0005)


def measure_drop(pair: SimulatedPair, seed: int) -> dict[str, Any]:
    """Returns tokens/s from the second second after a drop, over plain decoding."""
    runs, since = [(seed, pair)], DROP_AT_S + 1.0
    plain = rate_of(runs, (DROP_AT_S, 0.0), PLAIN)
    return chosen_rates(runs, {"dropped": (since + DROP_SECONDS, since)}, lambda _: plain)


def waves(acceptance: float) -> SimulatedPair:
    """Returns the embedded pair about as it is on two slow cores, whose sixteen texts begin at the same time, and the
    next ones when all have ended: for a second of six there are few.
    """
    return SimulatedPair(0.030, 0.0012, 0.012, constant(acceptance), 16, text_tokens=(70, 128), prompt_s=0.04)


def measure_waves(pair: SimulatedPair, seed: int) -> dict[str, Any]:
    """Returns tokens/s of waves of texts over plain decoding, which is best there, in the first half minute and the
    minute after.
    """
    runs = [(each, pair) for each in range(seed, seed + 4)]
    spans = {"early": (EARLY_S, 0.0), "late": (EARLY_S + LATE_S, EARLY_S)}
    return chosen_rates(runs, spans, lambda span: rate_of(runs, span, PLAIN))


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


def measure_bursts(pair: SimulatedPair, seed: int) -> dict[str, Any]:
    """Returns tokens/s over those of the best fixed length, from nothing and later."""
    spans = {"early": (BURSTS_S, 0.0), "late": (MORE_BURSTS_S, BURSTS_S)}
    return measure_pair(pair, spans, (MORE_BURSTS_S, 0.0), [range(seed, seed + 4)] * 3)


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


def measure_unsteady(pair: SimulatedPair, seed: int) -> dict[str, Any]:
    """Returns tokens/s over those of the best fixed length on the same machines, from nothing and later."""
    seeds = range(seed, seed + UNSTEADY_SEEDS)
    runs = [(each, replace(pair, slowness=slowness_of_machine(each))) for each in seeds]
    best = max(FIXED, key=lambda arm: rate_of(runs, (MORE_UNSTEADY_S, 0.0), arm))
    spans = {"early": (UNSTEADY_S, 0.0), "late": (MORE_UNSTEADY_S, UNSTEADY_S)}
    return {"best": best.length, **chosen_rates(runs, spans, lambda span: rate_of(runs, span, best))}


def shorts() -> dict[str, SimulatedPair]:
    """Returns pairs of two speeds whose texts have 48 to 128 tokens, one after the other, and have to be read first."""
    quick = SimulatedPair(
        0.020,
        0.0005,
        0.002,
        constant(0.5),
        1,
        own_acceptance=OWN_ACCEPTANCE,
        text_tokens=(48, 128),
        renews_texts=True,
        prompt_s=0.02,
        read_s=0.03,
    )
    slow = replace(quick, verify_s=0.060, row_s=0.003, draft_s=0.012, prompt_s=0.06, read_s=0.09)
    return {
        f"{name}, acceptance {acceptance}, {sessions} sessions": replace(
            pair, acceptance=constant(acceptance), num_sessions=sessions
        )
        for (name, pair), acceptance, sessions in product(
            {"quick": quick, "slow": slow}.items(), SHORT_ACCEPTANCE, SESSIONS
        )
    }


def measure_short(pair: SimulatedPair, seed: int) -> dict[str, Any]:
    """Returns the tokens/s of the first seconds of a cold pair over those of the best fixed length."""
    span = (FIRST_S, 0.0)
    return measure_pair(pair, {"first": span}, span, seeds_of(pair, seed, seed + 50, seed + 50))


def chooser_us() -> float:
    """Returns what choosing takes for a round, microseconds: all sessions of a step wait for that."""
    pair = SimulatedPair(0.022, 2e-4, 8e-4, constant(0.8), 16)
    chooser = chooser_of(pair)
    Simulation(pair, None, chooser=chooser).tokens_per_s(FIXED_S)
    session, draws = PredictedSession(chooser), random.Random(0)
    arm, num_rows = Arm(DraftSource.DRAFTER, 8), 16 * 9
    rounds = [
        round_times(
            number,
            FIXED_S + 0.003 * number,
            FIXED_S + 0.003 * number + 0.05,
            8,
            accepted,
            0.006,
            0.03 + number // 16 * 1e-9,  # sixteen sessions share a step
            step=StepSize(num_rows, 16, number // 16),
        )
        for number in range(TIMED_ROUNDS)
        for accepted in [pair.num_accepted(arm, 0.0, draws.random)]
    ]
    began = time.perf_counter()
    for times in rounds:
        session.next_draft(times.verdict.fence.round, 100, times.started_at)
        session.observe(times)
    return (time.perf_counter() - began) / TIMED_ROUNDS * 1e6


def main() -> None:
    """Runs all scenes, prints the figures over each, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--every", type=int, default=1, help="takes each so many'th pair of the grid")
    parser.add_argument("--first", type=int, default=0, help="the first pair of the grid that is taken")
    parser.add_argument("--drops", type=int, default=20)
    parser.add_argument("--scenes", nargs="+", default=SCENES, choices=SCENES)
    parser.add_argument("--uneven", action="store_true", help="times that are not linear, and other seeds")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    began, seed = time.perf_counter(), FRESH_SEED if arguments.uneven else 0

    def made(pair: SimulatedPair) -> SimulatedPair:
        return replace(pair, is_uneven=arguments.uneven)

    grid = list(starmap(GridPair, product(VERIFY_MS, ROW_US, DRAFT_MS, ACCEPTANCE, SESSIONS)))
    chosen = {str(pair): pair.simulated() for pair in grid[arguments.first :: arguments.every]}
    in_waves = {f"acceptance {acceptance}": waves(acceptance) for acceptance in WAVES}
    drops = {f"seed {seed + each}": dropping() for each in range(arguments.drops)}
    scenes: dict[str, tuple[Measure, dict[str, SimulatedPair]]] = {
        "pairs": (measure_grid, chosen),
        "drops": (measure_drop, drops),
        "waves": (measure_waves, in_waves),
        "bursts": (measure_bursts, bursts()),
        "unsteady": (measure_unsteady, unsteady()),
        "short": (measure_short, shorts()),
    }
    measured: dict[str, dict[str, Any]] = {}
    for scene in arguments.scenes:
        measure, pairs = scenes[scene]
        cells = progress(list(enumerate(pairs.items())), scene)
        measured[scene] = {
            name: measure(made(pair), seed + (at if scene == "drops" else 0)) for at, (name, pair) in cells
        }
    found = {
        "figures": {scene: figures_of(list(results.values())) for scene, results in measured.items()},
        "chooser_us_per_round": chooser_us(),
        "seconds": time.perf_counter() - began,
    }
    write_report(arguments, {**found, "results": measured})


if __name__ == "__main__":
    main()
